"""Which blocks to recompute, alone or in groups, for a step that is cut in one way: a walk along the slots.

A state is what later slots see of a choice for the earlier ones: bytes held, seconds spent, and the key of shared
storages (see ``Chain``). A state that holds no less and has spent no less than another one of the same key can be
dropped, since whatever follows, the other does as well. So the walk finds the optimum. Where more states are left than
``width``, they are thinned evenly over the bytes held; this happens in long chains of unequal blocks, and in those
with many skip connections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from bigbatch.planning.chain import WHOLE, Segment
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
        self.to_drop, self.price = self._prices()
        self.is_thinned = False
        self.fronts: list[Front] = [{} for _ in range(len(self.chain.slots) + 1)]

    def _prices(self) -> tuple[list[float], list[float]]:
        """By slot: bytes that would be held too many at the end if all from here on were kept, and what one costs less.

        Only storages of one slot count, so that both are bounds: recompute of a block frees these at most.
        """
        saved, count = self.first.saved_own, len(self.chain.slots)
        too_many, price = [0.0] * (count + 1), [math.inf] * (count + 1)
        too_many[count] = (self.first.backward[-1] if count else 0) - self.room
        for slot in reversed(range(count)):
            own = saved[slot]
            too_many[slot], price[slot] = too_many[slot + 1] + own, price[slot + 1]
            for seconds, freed in self._ways_to_free(slot):
                price[slot] = min(price[slot], seconds / freed)
        return too_many, price

    def _ways_to_free(self, slot: int) -> Iterator[tuple[float, int]]:
        """Of each way to recompute a slot the least that it costs, and the bytes that it does not hold."""
        own, simulation = self.first.saved_own[slot], self.simulation
        if self.chain.ends[slot] and own:
            # Before the last member of a group it costs a whole forward, as the last one that up to its last save.
            yield min(simulation.seconds_of(slot, slot), simulation.whole_seconds_of(slot)), own
        for segment in self.chain.choices[slot]:
            if segment.part != WHOLE and (freed := own - self.first.parts_own[slot][segment.part]) > 0:
                yield simulation.seconds_of(*segment), freed

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
        promising = self._promising(slot, states)
        for segment, (last, need, gain), other in zip(choices, moves, others, strict=True):
            cost = self.simulation.seconds_of(*segment) if self.times_count else 0.0
            count, most, room = count_up_to(states, self.room - need), self.bound - cost, self.room - other.need
            if not count or states[count - 1][2] > most or not promising(last, gain, cost):
                continue
            if not self.chain.is_open(segment, key):
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

    def _promising(self, slot: int, states: list[State]) -> Callable[[int, int, float], bool]:
        """Whether a segment that ends there, holds so much and costs so much may stay within the bound at all."""
        price = self.price[slot] if self.times_count else 0.0
        if math.isinf(price) or math.isinf(self.room):
            return lambda last, gain, cost: True
        least, bound, to_drop = min(state[2] + state[0] * price for state in states), self.bound, self.to_drop
        return lambda last, gain, cost: least + cost + (gain + to_drop[last + 1]) * price <= bound

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
        if self.times_count and self.to_drop[slot] > 0 and self.price[slot] < math.inf:
            drop, price, bound = self.to_drop[slot], self.price[slot], self.bound
            states = [state for state in states if state[2] + max(0.0, state[0] + drop) * price <= bound]
        return undominated_in_both(states) if self.second else undominated(states)
