r"""What it costs at least to stay within memory: a bound that rules out cuts, and states of a walk, without walking.

At a slot $t$ at least $f(t) = \max(\mathrm{forward}, |\mathrm{saved}| + \mathrm{backward})$ is alive beyond what the
slots before it hold. If all of them were kept, and only storages of one slot counted, that is

$$ D = \max_t \Big( \sum_{j<t} |\mathrm{saved}(j)| + f(t) \Big) $$

bytes. Recompute has to take away $D$ minus the room there is, from slots before that $t$; each can give up so many
bytes at such a price. To take the cheapest ones first, and of the last one a share, costs no more than any real choice
(a fractional knapsack). For states in the middle of a walk it is a line, with the price $\lambda$ of the last byte:

$$ \mathrm{cost}(b) \ge \lambda b - \sum_j \max(0, \lambda - \mathrm{price}_j) \, \mathrm{bytes}_j. $$
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigbatch.planning.chain import WHOLE

if TYPE_CHECKING:
    from bigbatch.planning.simulate import Phase, Simulation

Offer = tuple[float, int]
"""Seconds for a byte, and bytes at that price."""


class Prices:
    """What each slot can give up in one phase, and at which price.

    Attributes:
        demand: By slot, the most bytes alive from here on beyond those held before it, if all are kept.
        freeable: By slot, bytes that recompute can take away from that.
        offers: By slot, what it can give up.
    """

    def __init__(self, simulation: Simulation, phase: Phase):
        count = len(phase.saved_own)
        self.offers = [_offers(simulation, phase, slot) for slot in range(count)]
        self.demand, self.freeable = [0] * (count + 1), [0] * (count + 1)
        self._target = [count] * (count + 1)
        for slot in reversed(range(count)):
            own = phase.saved_own[slot]
            floor, later = max(phase.passes[slot], own + phase.backward[slot]), own + self.demand[slot + 1]
            # Slots from the one of the highest demand on can give up nothing that counts there.
            if floor >= later:
                self.demand[slot], self._target[slot] = floor, slot
            else:
                self.demand[slot], self._target[slot] = later, self._target[slot + 1]
                self.freeable[slot] = self.freeable[slot + 1] + sum(num_bytes for _, num_bytes in self.offers[slot])
        before = self._target[0] if count else 0
        self._cheapest_first = sorted(offer for offers in self.offers[:before] for offer in offers)

    def least(self, room: float) -> tuple[float, float]:
        """Seconds that a step adds at least to need no more than ``room``, and the price of the last byte."""
        seconds, price, missing = (
            0.0,
            self._cheapest_first[0][0] if self._cheapest_first else 0.0,
            self.demand[0] - room,
        )
        for price, num_bytes in self._cheapest_first:
            if missing <= num_bytes:
                return seconds + max(0.0, missing) * price, price
            seconds, missing = seconds + num_bytes * price, missing - num_bytes
        return (math.inf if missing > 0 else seconds), price

    def constants(self, room: float, price: float) -> list[float]:
        """By slot, what to add to ``price * held`` for a bound on the seconds from there on."""
        given, found = 0.0, [-math.inf] * len(self.demand)
        for slot in reversed(range(len(self.offers))):
            gain = sum((price - each) * num_bytes for each, num_bytes in self.offers[slot] if each < price)
            given = 0.0 if self._target[slot] == slot else given + gain
            found[slot] = price * (self.demand[slot] - room) - given if price else 0.0
        return found


def _offers(simulation: Simulation, phase: Phase, slot: int) -> list[Offer]:
    """The bytes of a slot, the cheapest first: the lower edge of all ways to recompute it."""
    own, ways = phase.saved_own[slot], []
    if simulation.chain.ends[slot]:
        # Before the last member of a group it costs a whole forward, as the last one that up to its last save.
        ways.append((own, min(simulation.seconds_of(slot, slot), simulation.whole_seconds_of(slot))))
    for segment in simulation.chain.choices[slot]:
        if segment.part != WHOLE:
            ways.append((own - phase.parts_own[slot][segment.part], simulation.seconds_of(*segment)))
    return _lower_edge(ways)


def _lower_edge(ways: Sequence[tuple[int, float]]) -> list[Offer]:
    offers, freed, seconds = list[Offer](), 0, 0.0
    while True:
        prices = [((cost - seconds) / (num - freed), num, cost) for num, cost in ways if num > freed]
        if not prices:
            return offers
        price, num_bytes, cost = min(prices)
        offers.append((price, num_bytes - freed))
        freed, seconds = num_bytes, cost
