"""All that a plan is chosen from: cuts of a batch, and what may be recomputed in each; the best of them for a limit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bigbatch.batch.sizes import micro_batch_sizes, part_sizes
from bigbatch.errors import OptionError
from bigbatch.planning.chain import Chain, Segment
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.grouping import QUICK_WORK, WORK, cheapest, leanest, least_added
from bigbatch.planning.naming import keep_of, names_of, segments_of
from bigbatch.planning.seconds import seconds_without_recompute
from bigbatch.planning.simulate import Simulation
from bigbatch.values import Plan, check_positive

_TIES = 3
ABOUT = 1.01
"""Times that differ by less cannot be told apart where they were measured."""
_LARGER_CUTS = 16
_SAME = 1 + 1e-12
_BETTER = 1 - 1e-9

Recompute = Literal["all", "none"] | Sequence[str | tuple[str, ...]] | None


def names_held(recompute: Recompute) -> tuple[str | tuple[str, ...], ...]:
    """The modules, and groups of them, that are held by name."""
    return () if recompute is None or isinstance(recompute, str) else tuple(recompute)


class Choice(NamedTuple):
    """A cut and what is recomputed in it. The least seconds come first, then the least bytes."""

    seconds: float
    needed_bytes: int  # with workspace
    micro_batch_size: int
    segments: tuple[Segment, ...]


class _Known(NamedTuple):
    """What was found out about a cut at a limit: its best choice, or that there is none of less than ``seconds``."""

    limit: float
    seconds: float
    choice: Choice | None
    is_exact: bool


class Space:
    """All that may be chosen from: cuts of the batch, and what may be recomputed in each."""

    def __init__(self, profile: MemoryProfile, batch_size: int, micro_batch_size: int | None, recompute: Recompute):
        check_positive("batch_size", batch_size)
        self.profile, self.chain = profile, Chain(profile)
        smallest = profile.smallest_micro_batch
        if micro_batch_size is not None:
            check_positive("micro_batch_size", micro_batch_size)
            candidates = [micro_batch_size]
        else:
            candidates = [*part_sizes(batch_size, smallest), batch_size]
        self.cuts = {size: micro_batch_sizes(batch_size, size, smallest) for size in candidates}
        self.plain_seconds = {size: seconds_without_recompute(profile, cut) for size, cut in self.cuts.items()}
        self.held = self._held_segments(recompute)
        self._simulations: dict[int, Simulation] = {}
        self._known: dict[tuple[int, int], _Known] = {}

    def _held_segments(self, recompute: Recompute) -> tuple[Segment, ...] | None:
        if recompute is None:
            return None
        if isinstance(recompute, str):
            if recompute not in ("all", "none"):
                raise OptionError(f'recompute={recompute!r}; it is "all", "none", or a tuple of names of modules.')
            return self.chain.every_block() if recompute == "all" else ()
        return segments_of(self.chain, recompute)

    def simulation(self, size: int) -> Simulation:
        """The simulation of a cut, made once."""
        if size not in self._simulations:
            self._simulations[size] = Simulation(self.profile, self.cuts[size], self.chain)
        return self._simulations[size]

    def plan(self, choice: Choice, budget_bytes: int | None) -> Plan:
        """The choice as a plan."""
        simulation = self.simulation(choice.micro_batch_size)
        return Plan(
            micro_batch_size=choice.micro_batch_size,
            accumulation_steps=len(simulation.sizes),
            recompute=names_of(self.chain, choice.segments),
            keep=keep_of(self.chain, choice.segments),
            peak_bytes=simulation.peak_of(choice.segments),
            step_seconds=choice.seconds,
            budget_bytes=budget_bytes,
        )

    def _choice(self, size: int, segments: tuple[Segment, ...]) -> Choice:
        simulation = self.simulation(size)
        needed = simulation.peak_of(segments) + simulation.workspace_bytes
        return Choice(simulation.step_seconds_of(segments), needed, size, segments)

    def fastest(self, limit: float, close_looks: int) -> Choice | None:
        """The choice of least seconds that needs at most ``limit`` bytes, workspace included.

        Args:
            limit: Bytes.
            close_looks: Every cut gets a quick look. So many of those that look best then get a close one, where the
                quick one was not exact already: it is, in short chains.
        """
        best, found = self._look_at_all(limit)
        for choice in sorted(found)[:close_looks]:
            known = self._known.get((choice.micro_batch_size, QUICK_WORK))
            if best is not None and known is not None and not known.is_exact:
                closer = self._fastest_of(choice.micro_batch_size, limit, best.seconds, WORK)
                best = min(best, closer) if closer is not None else best
        return best

    def _look_at_all(self, limit: float) -> tuple[Choice | None, list[Choice]]:
        """The best choice that a quick look finds, and those it was held against."""
        best, found = None, []
        queue = [(self._least_seconds(size, limit), size, False) for size in self.cuts]
        heapq.heapify(queue)
        # The most promising first: what it takes then rules most of the others out.
        while queue:
            least, size, is_close = heapq.heappop(queue)
            seconds = math.inf if best is None else best.seconds
            if math.isinf(least) or least > seconds * _SAME:
                break
            if not is_close:
                heapq.heappush(queue, (max(least, self._least_within(size, limit)), size, True))
                continue
            choice = self._fastest_of(size, limit, seconds, QUICK_WORK)
            if choice is not None:
                found.append(choice)
                best = choice if best is None else min(best, choice)
        return best, found

    def of_more_samples(self, choice: Choice, limit: float) -> Choice:
        """Of choices about as fast, one of larger micro-batches: it is nearer to the big batch (BatchNorm, dropout).

        Only where times were measured: estimated ones differ as exactly as they are computed.
        """
        if self.profile.timing != "measured":
            return choice
        seconds = choice.seconds * ABOUT
        for size in sorted((size for size in self.cuts if size > choice.micro_batch_size), reverse=True)[:_LARGER_CUTS]:
            found = self._fastest_of(size, limit, seconds, QUICK_WORK)
            if found is not None and found.seconds <= seconds:
                return found
        return choice

    def leaner(self, choice: Choice) -> Choice:
        """A choice that is as fast and needs less, as far as one is found: of equal blocks, it matters which ones."""
        for _ in range(_TIES if choice.segments else 0):
            found = self._fastest_of(choice.micro_batch_size, choice.needed_bytes - 1, choice.seconds, QUICK_WORK)
            if found is None or found.seconds > choice.seconds * _SAME:
                break
            choice = found
        return choice

    def _fastest_of(self, size: int, limit: float, seconds: float, work: int) -> Choice | None:
        """The best choice of a cut within bytes and seconds, as far as there is one."""
        simulation = self.simulation(size)
        if self.held is not None:
            choice = self._choice(size, self.held)
            return choice if choice.needed_bytes <= limit else None
        direct = self._choice(size, ())
        if direct.needed_bytes <= limit:
            return direct
        known = self._known.get((size, work))
        if known is not None and known.choice is not None and known.choice.needed_bytes <= limit <= known.limit:
            return known.choice
        # A sum in another order must not miss a choice that is exactly as fast.
        added = seconds * _SAME - simulation.plain_seconds
        segments, is_exact = cheapest(simulation, limit - simulation.workspace_bytes, added, work)
        choice = None if segments is None else self._choice(size, segments)
        self._known[size, work] = _Known(limit, seconds if choice is None else choice.seconds, choice, is_exact)
        return choice

    def _least_seconds(self, size: int, limit: float) -> float:
        """No choice of this cut is faster; infinite when it has none. With less memory nothing gets faster."""
        known = self._known.get((size, QUICK_WORK))
        return known.seconds if known is not None and known.limit >= limit else self.plain_seconds[size]

    def _least_within(self, size: int, limit: float) -> float:
        """The same from what recompute has to free at least, at the lowest prices; no walk is needed for it."""
        if self.held is not None:
            return self.plain_seconds[size]
        simulation = self.simulation(size)
        added = least_added(simulation, limit - simulation.workspace_bytes)
        return self.plain_seconds[size] + added * _BETTER

    def smallest(self) -> Choice:
        """The choice that needs the least bytes."""
        best: Choice | None = None
        for size in sorted(self.cuts):
            simulation = self.simulation(size)
            segments = self.held
            if segments is None:
                most = math.inf if best is None else best.needed_bytes - 1 - simulation.workspace_bytes
                segments = leanest(simulation, most)
            if segments is not None:
                choice = self._choice(size, segments)
                best = choice if best is None or choice.needed_bytes < best.needed_bytes else best
        assert best is not None, "A batch has at least one cut, and the first one was held against no limit."
        return best
