"""Which blocks to recompute, alone or in groups, for a step that is cut in one way: a walk along the slots.

A state is what later slots see of a choice for the earlier ones: bytes held, seconds spent, and the key of shared
storages (see ``Chain``). A state that holds no less and has spent no less than another one of the same key can be
dropped, since whatever follows, the other does as well. So the walk finds the optimum. Where more states are left than
``width``, they are thinned evenly over the bytes held; this happens in long chains of unequal blocks, and in those
with many skip connections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

from bigbatch.planning.chain import Segment
from bigbatch.planning.fronts import Front, State, count_up_to, spread, undominated, undominated_in_both
from bigbatch.planning.naming import entries_of
from bigbatch.planning.simulate import Move, Simulation

WORK = 800_000
"""States times moves that a walk may look at. Chains of up to twelve blocks hardly ever need so many."""

QUICK_WORK = WORK // 8
"""Enough to be exact in chains of ten blocks, and within a per cent in long ones."""

_WIDTHS = (16, 4096)
_NARROW = 8
_BETTER = 1 - 1e-9
_NOTHING = Move(0, 0, 0)


def cheapest(
    simulation: Simulation, most_bytes: float, most_seconds: float = math.inf, work: int = WORK
) -> tuple[tuple[Segment, ...] | None, bool]:
    """The segments of least added seconds with which a step stays within ``most_bytes``.

    Args:
        simulation: Of the step.
        most_bytes: The most that ``Simulation.peak_of`` may be.
        most_seconds: The most that may be added; a bound makes the walk quicker.
        work: States times moves that the walk may look at, about.

    Returns:
        The segments, or None when there are none within both bounds; and whether that is certain.
    """
    # A narrow walk has an answer at once, and with that bound the wide one is short.
    found = _Walk(simulation, most_bytes, most_seconds, _NARROW).run()
    bound = most_seconds if found is None else _added(simulation, found) * _BETTER
    if bound <= 0:
        return found, True
    walk = _Walk(simulation, most_bytes, bound, _width(simulation, work))
    better = walk.run() or found
    if better and walk.is_thinned:
        better = _without_useless(simulation, better, most_bytes)
    return better, not walk.is_thinned


def leanest(simulation: Simulation, most_bytes: float = math.inf) -> tuple[Segment, ...] | None:
    """The segments of the least peak, whatever they cost; None when it is above ``most_bytes``."""
    width = _width(simulation, WORK)
    found = _Walk(simulation, most_bytes, None, width).run()
    if found is None:
        return None
    none_fits, peak = -1, simulation.peak_of(found)
    while peak - none_fits > 1:
        middle = (peak + none_fits) // 2
        leaner = _Walk(simulation, middle, None, width).run()
        if leaner is None:
            none_fits = middle
        else:
            found, peak = leaner, simulation.peak_of(leaner)
    return found


def least_added(simulation: Simulation, most_bytes: float) -> float:
    """No choice within ``most_bytes`` adds less seconds than this; infinite when there is none."""
    room = most_bytes - simulation.fixed_bytes
    if simulation.update_bytes > room:
        return math.inf
    return max(prices.least(room)[0] for prices in simulation.prices)


def _width(simulation: Simulation, work: int) -> int:
    least, most = _WIDTHS
    return min(most, max(least, work // sum(1 + len(choices) for choices in simulation.chain.choices)))


def _without_useless(simulation: Simulation, segments: tuple[Segment, ...], most_bytes: float) -> tuple[Segment, ...]:
    """The segments without those that the bytes do not need: a thinned walk may have lost the states without them."""
    entries = sorted(entries_of(simulation.chain, segments), key=lambda entry: -_added(simulation, entry))
    for entry in entries:
        rest = tuple(segment for segment in segments if segment not in entry)
        if simulation.peak_of(rest) <= most_bytes:
            segments = rest
    return segments


def _added(simulation: Simulation, segments: Sequence[Segment]) -> float:
    return sum(simulation.seconds_of(*segment) for segment in segments)


class _Walk:
    """One walk along the slots, within bytes and seconds; without seconds, only bytes count."""

    def __init__(self, simulation: Simulation, most_bytes: float, most_seconds: float | None, width: int):
        self.simulation, self.chain = simulation, simulation.chain
        self.first, self.second = simulation.phases[0], simulation.phases[1] if simulation.phases[1:] else None
        self.room = most_bytes - simulation.fixed_bytes
        self.bound, self.times_count, self.width = most_seconds or 0.0, most_seconds is not None, width
        self.prices = simulation.prices[0]
        self.least, self.price = self.prices.least(self.room)
        self.constants = self.prices.constants(self.room, self.price) if self.times_count else []
        self.is_thinned = False
        self.fronts: list[Front] = [{} for _ in range(len(self.chain.slots) + 1)]

    def run(self) -> tuple[Segment, ...] | None:
        """The segments of the best state at the end."""
        if self.simulation.update_bytes > self.room or math.isinf(self.least):
            return None
        if self.times_count and self.least > self.bound:
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

    def _keep(self, slot: int, key: int, states: list[State]) -> None:
        if self.chain.must_recompute(slot, key):
            return
        need, gain = self.first.moves(slot, key)[0][1:]
        other_need, other_gain = self.second.moves(slot, key)[0][1:] if self.second else (0, 0)
        room = self.room - other_need
        self._arrive(
            slot + 1,
            key | self.chain.saved_bits[slot],
            [
                (held + gain, other + other_gain, seconds, link)
                for held, other, seconds, link in states[: count_up_to(states, self.room - need)]
                if other <= room
            ],
        )

    def _recompute(self, slot: int, key: int, states: list[State]) -> None:
        choices = self.chain.choices[slot]
        if not choices:
            return
        moves = self.first.moves(slot, key)[1]
        others = self.second.moves(slot, key)[1] if self.second else [_NOTHING] * len(moves)
        price, constants, bound = self.price, self.constants, self.bound
        least = min(state[2] + state[0] * price for state in states) if constants else -math.inf
        for segment, (last, need, gain), other in zip(choices, moves, others, strict=True):
            cost = self.simulation.seconds_of(*segment) if self.times_count else 0.0
            count, most, room = count_up_to(states, self.room - need), self.bound - cost, self.room - other.need
            if not count or states[count - 1][2] > most or not self.chain.is_open(segment, key):
                continue
            if constants and least + cost + gain * price + constants[last + 1] > bound:
                continue
            other_gain = other.gain
            self._arrive(
                last + 1,
                key | self.chain.after(segment),
                [
                    (held + gain, other + other_gain, seconds + cost, (segment, link))
                    for held, other, seconds, link in states[:count]
                    if seconds <= most and other <= room
                ],
            )

    def _arrive(self, slot: int, key: int, states: list[State]) -> None:
        if states:
            self.fronts[slot].setdefault(key & self.chain.alive_bits[slot], []).extend(states)

    def _thinned(self, slot: int) -> Front:
        """The states at a slot that are worth going on from, by key, each list by ascending bytes held."""
        worth = {key: self._worth(slot, states) for key, states in self.fronts[slot].items()}
        front = {key: states for key, states in worth.items() if states}
        if sum(map(len, front.values())) <= self.width:
            return front
        self.is_thinned = True
        return spread(front, self.width)

    def _worth(self, slot: int, states: list[State]) -> list[State]:
        if self.times_count:
            price, most = self.price, self.bound - self.constants[slot]
            states = [state for state in states if state[2] + state[0] * price <= most]
        most_held = self.room - self.prices.demand[slot] + self.prices.freeable[slot]
        states = [state for state in states if state[0] <= most_held]
        return undominated_in_both(states) if self.second else undominated(states)
