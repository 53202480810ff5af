"""States of the walk along the slots, and which of them are kept: by what they hold and what they have spent."""

from __future__ import annotations

import math
from bisect import bisect_right
from operator import itemgetter

State = tuple[int, int, float, tuple]
"""Bytes held in the first phase and in the second (0 when there is one), seconds, and segments, the last one first."""

Front = dict[int, list[State]]
"""The states at a slot by their key (see ``Chain``), each list by ascending bytes."""

_KEYS_IN_A_STRETCH = 8


def count_up_to(states: list[State], most_held: float) -> int:
    """How many of the states, by ascending bytes, hold at most so much."""
    return bisect_right(states, most_held, key=itemgetter(0))


def undominated(states: list[State]) -> list[State]:
    """States by ascending bytes, without those that another one is no worse than in bytes and seconds."""
    states.sort()
    kept, least = [], math.inf
    for state in states:
        if state[2] < least:
            kept.append(state)
            least = state[2]
    return kept


def undominated_in_both(states: list[State]) -> list[State]:
    """The same where a state holds other bytes in the second phase: a staircase of those and the seconds."""
    states.sort()
    kept: list[State] = []
    stairs: list[tuple[int, float]] = []  # second bytes ascending, seconds descending
    for state in states:
        place = bisect_right(stairs, state[1], key=itemgetter(0))
        if place and stairs[place - 1][1] <= state[2]:
            continue
        kept.append(state)
        first = bisect_right(stairs, state[1] - 1, key=itemgetter(0))
        after = first
        while after < len(stairs) and stairs[after][1] >= state[2]:
            after += 1
        stairs[first:after] = [(state[1], state[2])]
    return kept


def spread(front: Front, most: int) -> Front:
    """About so many states: the leanest, and some of the quickest of each of equal stretches of bytes held.

    They are of different keys, so that those which hold shared storages early are not all lost.
    """
    if len(front) == 1:
        return {key: _evenly(states, most) for key, states in front.items()}
    pool = sorted((state, key) for key, states in front.items() for state in states)
    low, high = pool[0][0][0], pool[-1][0][0]
    each = min(_KEYS_IN_A_STRETCH, len(front))
    count = max(1, most // each)
    stretches: dict[int, list[tuple[State, int]]] = {}
    for state, key in pool:
        stretches.setdefault((state[0] - low) * count // (high - low + 1), []).append((state, key))
    thin: Front = {pool[0][1]: [pool[0][0]]}
    for stretch in stretches.values():
        quickest: dict[int, State] = {}
        for state, key in stretch:
            if key not in quickest or state[2] < quickest[key][2]:
                quickest[key] = state
        for key, state in sorted(quickest.items(), key=lambda item: item[1][2])[:each]:
            if state is not pool[0][0]:
                thin.setdefault(key, []).append(state)
    return {key: sorted(states) for key, states in thin.items()}


def _evenly(states: list[State], most: int) -> list[State]:
    """The same for states of one key."""
    low, high = states[0][0], states[-1][0]
    # They get quicker with more bytes, so the last of a stretch is its quickest.
    quickest = {(state[0] - low) * most // (high - low + 1): state for state in states}
    thin = list(quickest.values())
    return thin if thin[0] is states[0] else [states[0], *thin]
