"""Which blocks to recompute, alone or in groups, for a step that is cut in one way: a walk along the slots.

A state is what later slots see of a choice for the earlier ones: bytes held, seconds spent, and the key of shared
storages (see ``Chain``). A state that holds no less and has spent no less than another one of the same key can be
dropped, since whatever follows, the other does as well. So the walk finds the optimum. Where more states are left than
``width``, they are thinned evenly over the bytes held; this happens in long chains of unequal blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter

from bigbatch.planning.chain import Segment
from bigbatch.planning.simulate import Simulation

# Bytes held in the first phase and in the second (0 when there is one), seconds, and the segments, the last one first.
_State = tuple[int, int, float, tuple]
_Front = dict[int, list[_State]]

WIDTH = 256
"""States that are kept at a slot. Up to twelve blocks there are hardly ever so many."""

_NARROW = 8
_BETTER = 1 - 1e-9


def cheapest(
    simulation: Simulation, most_bytes: float, most_seconds: float = float("inf"), width: int = WIDTH
) -> tuple[Segment, ...] | None:
    """The segments of least added seconds with which a step stays within ``most_bytes``.

    Args:
        most_bytes: The most that ``Simulation.peak_of`` may be.
        most_seconds: The most that may be added; a bound makes the walk quicker.
        width: States kept at a slot.

    Returns:
        The segments, or None when there are none within both bounds.
    """
    # A narrow walk has an answer at once, and with that bound the wide one is short.
    found = _Walk(simulation, most_bytes, most_seconds, _NARROW).run()
    bound = most_seconds if found is None else _added(simulation, found) * _BETTER
    better = _Walk(simulation, most_bytes, bound, width).run() if bound > 0 else None
    return better if better is not None else found


def leanest(simulation: Simulation, most_bytes: float = float("inf")) -> tuple[Segment, ...] | None:
    """The segments of the least peak, whatever they cost; None when it is above ``most_bytes``."""
    found = _Walk(simulation, most_bytes, None, WIDTH).run()
    if found is None:
        return None
    none_fits, peak = -1, simulation.peak_of(found)
    while peak - none_fits > 1:
        middle = (peak + none_fits) // 2
        leaner = _Walk(simulation, middle, None, WIDTH).run()
        if leaner is None:
            none_fits = middle
        else:
            found, peak = leaner, simulation.peak_of(leaner)
    return found


def _added(simulation: Simulation, segments: Sequence[Segment]) -> float:
    return sum(simulation.seconds_of(*segment) for segment in segments)


class _Walk:
    """One walk along the slots, within bytes and seconds; without seconds, only bytes count."""

    def __init__(self, simulation: Simulation, most_bytes: float, most_seconds: float | None, width: int):
        self.simulation, self.chain = simulation, simulation.chain
        self.first, self.second = simulation.phases[0], simulation.phases[1] if simulation.phases[1:] else None
        self.room = most_bytes - simulation.fixed_bytes
        self.bound, self.times_count, self.width = most_seconds or 0.0, most_seconds is not None, width
        self.to_drop, self.price = self._prices()
        self.fronts: list[_Front] = [{} for _ in range(len(self.chain.slots) + 1)]

    def _prices(self) -> tuple[list[float], list[float]]:
        """By slot: bytes that would be held too many at the end if all from here on were kept, and what one costs less.

        Only storages of one slot count, so that both are bounds: recompute of a block frees these at most.
        """
        ends, saved = self.chain.ends, self.first.saved_own
        seconds_of, whole_seconds_of = self.simulation.seconds_of, self.simulation.whole_seconds_of
        count = len(ends)
        too_many, price = [0.0] * (count + 1), [float("inf")] * (count + 1)
        too_many[count] = self.first.backward[-1] - self.room
        for slot in reversed(range(count)):
            own = saved[slot]
            too_many[slot], price[slot] = too_many[slot + 1] + own, price[slot + 1]
            if ends[slot] and own:
                # Before the last member of a group it costs a whole forward, as the last one that up to its last save.
                price[slot] = min(price[slot], min(seconds_of(slot, slot), whole_seconds_of(slot)) / own)
        return too_many, price

    def run(self) -> tuple[Segment, ...] | None:
        """The segments of the best state at the end."""
        if self.simulation.update_bytes > self.room:
            return None
        self.fronts[0][0] = [(0, 0, 0.0, ())]
        for slot in range(len(self.chain.slots)):
            front, self.fronts[slot] = self._thinned(slot), {}
            for key, states in front.items():
                self._keep(slot, key, states)
                self._recompute(slot, key, states)
        last = [state for states in self.fronts[-1].values() for state in states]
        if not last:
            return None
        link, segments = min(last, key=itemgetter(2, 0))[3], []
        while link:
            segment, link = link
            segments.append(segment)
        return tuple(reversed(segments))

    def _keep(self, slot: int, key: int, states: list[_State]) -> None:
        if key & self.chain.repeat_bit[slot]:
            return
        need, gain = self.first.moves(slot, key)[0][1:]
        other_need, other_gain = self.second.moves(slot, key)[0][1:] if self.second else (0, 0)
        room = self.room - other_need
        self._arrive(
            slot + 1,
            key | self.chain.saved_bits[slot],
            [
                (held + gain, other + other_gain, seconds, link)
                for held, other, seconds, link in states[: _count(states, self.room - need)]
                if other <= room
            ],
        )

    def _recompute(self, slot: int, key: int, states: list[_State]) -> None:
        if not self.chain.ends[slot] or self._was_kept(slot, key):
            return
        moves = self.first.moves(slot, key)[1]
        others = self.second.moves(slot, key)[1] if self.second else [(0, 0, 0)] * len(moves)
        after = key | self.chain.inputs_bits[slot] | self.chain.repeat_bit[slot]
        promising = self._promising(slot, states)
        for (last, need, gain), (_, other_need, other_gain) in zip(moves, others, strict=True):
            cost = self.simulation.seconds_of(slot, last) if self.times_count else 0.0
            count, most, room = _count(states, self.room - need), self.bound - cost, self.room - other_need
            if not count or states[count - 1][2] > most or not promising(last, gain, cost):
                continue
            segment = slot, last
            self._arrive(
                last + 1,
                after,
                [
                    (held + gain, other + other_gain, seconds + cost, (segment, link))
                    for held, other, seconds, link in states[:count]
                    if seconds <= most and other <= room
                ],
            )

    def _promising(self, slot: int, states: list[_State]) -> Callable[[int, int, float], bool]:
        """Whether a segment that ends there, holds so much and costs so much may stay within the bound at all."""
        price = self.price[slot] if self.times_count else 0.0
        if math.isinf(price) or math.isinf(self.room):
            return lambda last, gain, cost: True
        least, bound, to_drop = min(state[2] + state[0] * price for state in states), self.bound, self.to_drop
        return lambda last, gain, cost: least + cost + (gain + to_drop[last + 1]) * price <= bound

    def _was_kept(self, slot: int, key: int) -> bool:
        """Whether this is a later call of a module whose first call is kept."""
        bit = self.chain.repeat_bit[slot]
        is_first_call = self.chain.calls[self.chain.slots[slot].name or ""][0] == slot
        return bit != 0 and not is_first_call and not key & bit

    def _arrive(self, slot: int, key: int, states: list[_State]) -> None:
        if states:
            self.fronts[slot].setdefault(key & self.chain.alive_bits[slot], []).extend(states)

    def _thinned(self, slot: int) -> _Front:
        """The states at a slot that are worth going on from, by key, each list by ascending bytes held."""
        worth = {key: self._worth(slot, states) for key, states in self.fronts[slot].items()}
        front = {key: states for key, states in worth.items() if states}
        num_states = sum(map(len, front.values()))
        if num_states <= self.width:
            return front
        most = max(1, self.width // len(front))
        thin = {key: _evenly(states, most) for key, states in front.items()}
        if len(thin) > self.width:
            kept = sorted(thin, key=lambda key: thin[key][0])[: self.width]
            thin = {key: thin[key] for key in kept}
        return thin

    def _worth(self, slot: int, states: list[_State]) -> list[_State]:
        if self.times_count and self.to_drop[slot] > 0 and self.price[slot] < float("inf"):
            drop, price, bound = self.to_drop[slot], self.price[slot], self.bound
            states = [state for state in states if state[2] + max(0.0, state[0] + drop) * price <= bound]
        return _undominated_in_both(states) if self.second else _undominated(states)


def _count(states: list[_State], most_held: float) -> int:
    return bisect_right(states, most_held, key=itemgetter(0))


def _undominated(states: list[_State]) -> list[_State]:
    """States by ascending bytes, without those that another one is no worse than in bytes and seconds."""
    states.sort()
    kept, least = [], float("inf")
    for state in states:
        if state[2] < least:
            kept.append(state)
            least = state[2]
    return kept


def _undominated_in_both(states: list[_State]) -> list[_State]:
    """The same where a state holds other bytes in the second phase: a staircase of those and the seconds."""
    states.sort()
    kept: list[_State] = []
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


def _evenly(states: list[_State], most: int) -> list[_State]:
    """At most so many states: the leanest, and the quickest of each of equal stretches of bytes held."""
    if len(states) <= most:
        return states
    if most == 1:
        return states[:1]
    low, high = states[0][0], states[-1][0]
    stretches: dict[int, _State] = {}
    for state in states:
        place = (state[0] - low) * (most - 2) // max(1, high - low)
        if place not in stretches or state[2] <= stretches[place][2]:
            stretches[place] = state
    thin = list(stretches.values())
    return thin if thin[0] is states[0] else [states[0], *thin]
