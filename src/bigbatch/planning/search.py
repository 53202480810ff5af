"""From what a model costs to what to do: the fastest step of a batch that stays within a budget.

Micro-batch size and recomputed blocks are chosen together. Past the size where a sample gets no faster, a smaller
micro-batch is free and recompute is not; before it, the other way round. So neither "the largest batch that fits" nor
"recompute everything" is what to look for, but the least time of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bigbatch.batch.sizes import micro_batch_sizes, part_sizes
from bigbatch.errors import BudgetError, OptionError
from bigbatch.planning.chain import Chain, Segment
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.grouping import WORK, cheapest, leanest
from bigbatch.planning.seconds import seconds_without_recompute
from bigbatch.planning.simulate import Simulation
from bigbatch.units import format_bytes
from bigbatch.values import Plan, check_positive

MARGIN = 0.02
"""Share of the budget that a plan leaves free, for what the prediction may be off by."""

MAX_FRONTIER_PLANS = 40
_FRONTIER_WORK = WORK // 4
_TIES = 3
_SAME = 1 + 1e-12

Recompute = Literal["all", "none"] | Sequence[str | tuple[str, ...]] | None


class _Choice(NamedTuple):
    """A cut and what is recomputed in it. The least seconds come first, then the least bytes."""

    seconds: float
    needed_bytes: int  # with workspace
    micro_batch_size: int
    segments: tuple[Segment, ...]


class _Known(NamedTuple):
    """What was found out about a cut at a limit: its best choice, or that there is none of less than ``seconds``."""

    limit: float
    seconds: float
    choice: _Choice | None


def search(
    profile: MemoryProfile,
    *,
    batch_size: int,
    budget_bytes: int,
    margin: float = MARGIN,
    micro_batch_size: int | None = None,
    recompute: Recompute = None,
) -> Plan:
    """The plan of least seconds whose peak, with the workspace of kernels, is at most ``budget_bytes * (1 - margin)``.

    Args:
        profile: What the model costs.
        batch_size: Samples in a step.
        budget_bytes: Memory that there is.
        margin: Share of the budget that stays free.
        micro_batch_size: Held at this; None to choose it.
        recompute: Held at this: "all" blocks, each alone, "none", or names as in ``Plan.recompute``. None to choose.

    Raises:
        BudgetError: Nothing fits; ``smallest_bytes`` is the smallest budget with which this call has a plan.
        OptionError: An option is out of its range, or ``recompute`` names what the profile does not have.
    """
    check_positive("budget_bytes", budget_bytes)
    space = _Space(profile, batch_size, micro_batch_size, recompute)
    limit = _limit(budget_bytes, margin)
    choice = space.fastest(limit, WORK, ties=_TIES)
    if choice is None:
        raise _nothing_fits(space, budget_bytes, margin)
    return space.plan(choice, budget_bytes)


def frontier(
    profile: MemoryProfile,
    *,
    batch_size: int,
    micro_batch_size: int | None = None,
    recompute: Recompute = None,
    most: int = MAX_FRONTIER_PLANS,
) -> tuple[Plan, ...]:
    """Plans from the leanest to the fastest; each has a higher peak and less seconds than the one before it.

    Every plan is the fastest for its peak. Where there are more than ``most``, they are spread evenly over the
    logarithm of the peak. ``budget_bytes`` of each is None.

    Args:
        profile: What the model costs.
        batch_size: Samples in a step.
        micro_batch_size: As in ``search``.
        recompute: As in ``search``.
        most: Plans at most, at least 2.
    """
    space = _Space(profile, batch_size, micro_batch_size, recompute)
    smallest = space.smallest()
    choice = space.fastest(math.inf, _FRONTIER_WORK)
    found: list[_Choice] = []
    ratio = (max(1, smallest.needed_bytes) / max(1, choice.needed_bytes)) ** (1 / (most - 1)) if choice else 1.0
    limit = float(choice.needed_bytes) if choice else 0.0
    while choice is not None:
        found.append(choice)
        if choice.needed_bytes <= smallest.needed_bytes:
            break
        # The last one is at the smallest peak of all, so that the frontier ends where a budget begins to work.
        limit = max(smallest.needed_bytes, min(math.floor(limit * ratio), choice.needed_bytes - 1))
        choice = space.fastest(limit, _FRONTIER_WORK) or smallest
    return _undominated([space.plan(choice, None) for choice in found])


def _undominated(plans: list[Plan]) -> tuple[Plan, ...]:
    """Plans by ascending peak, without those for which another one is no worse in peak and seconds."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes or 0, plan.step_seconds or 0.0)):
        if not kept or (plan.step_seconds or 0.0) < (kept[-1].step_seconds or 0.0):
            kept.append(plan)
    return tuple(kept)


def _limit(budget_bytes: int, margin: float) -> int:
    if not 0 <= margin < 1:
        raise OptionError(f"margin={margin!r}; it is a share of the budget, from 0 to less than 1.")
    return math.floor(budget_bytes * (1 - margin))


def _budget_for(needed_bytes: int, margin: float) -> int:
    """The smallest budget that leaves so many bytes."""
    budget = math.ceil(needed_bytes / (1 - margin))
    while _limit(budget, margin) < needed_bytes:
        budget += 1
    while budget > 1 and _limit(budget - 1, margin) >= needed_bytes:
        budget -= 1
    return budget


class _Space:
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
        return self.chain.segments_of(recompute)

    def simulation(self, size: int) -> Simulation:
        """The simulation of a cut, made once."""
        if size not in self._simulations:
            self._simulations[size] = Simulation(self.profile, self.cuts[size], self.chain)
        return self._simulations[size]

    def plan(self, choice: _Choice, budget_bytes: int | None) -> Plan:
        """The choice as a plan."""
        simulation = self.simulation(choice.micro_batch_size)
        return Plan(
            micro_batch_size=choice.micro_batch_size,
            accumulation_steps=len(simulation.sizes),
            recompute=self.chain.names_of(choice.segments),
            peak_bytes=simulation.peak_of(choice.segments),
            step_seconds=choice.seconds,
            budget_bytes=budget_bytes,
        )

    def _choice(self, size: int, segments: tuple[Segment, ...]) -> _Choice:
        simulation = self.simulation(size)
        needed = simulation.peak_of(segments) + simulation.workspace_bytes
        return _Choice(simulation.step_seconds_of(segments), needed, size, segments)

    def fastest(self, limit: float, work: int, ties: int = 0) -> _Choice | None:
        """The choice of least seconds that needs at most ``limit`` bytes.

        Args:
            limit: Bytes, with workspace.
            work: How much the walk along the slots may look at.
            ties: How often to look for a choice that is as fast and needs less.
        """
        best: _Choice | None = None
        least = {size: self._least_seconds(size, limit, work) for size in self.cuts}
        # The most promising first: what it takes then rules most of the others out.
        for size in sorted(least, key=lambda size: (least[size], size)):
            if least[size] > (math.inf if best is None else best.seconds) or math.isinf(least[size]):
                break
            found = self._fastest_of(size, limit, math.inf if best is None else best.seconds, work)
            if found is not None and (best is None or found[:2] < best[:2]):
                best = found
        for _ in range(ties):
            if best is None or not best.segments:
                break
            found = self._fastest_of(best.micro_batch_size, best.needed_bytes - 1, best.seconds, work)
            if found is None or found.seconds > best.seconds * _SAME:
                break
            best = found
        return best

    def _fastest_of(self, size: int, limit: float, seconds: float, work: int) -> _Choice | None:
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
        segments = cheapest(simulation, limit - simulation.workspace_bytes, added, work)
        choice = None if segments is None else self._choice(size, segments)
        self._known[size, work] = _Known(limit, seconds if choice is None else choice.seconds, choice)
        return choice

    def _least_seconds(self, size: int, limit: float, work: int) -> float:
        """No choice of this cut is faster; infinite when it has none. With less memory nothing gets faster."""
        known = self._known.get((size, work))
        return known.seconds if known is not None and known.limit >= limit else self.plain_seconds[size]

    def smallest(self) -> _Choice:
        """The choice that needs the least bytes."""
        best: _Choice | None = None
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


def _nothing_fits(space: _Space, budget_bytes: int, margin: float) -> BudgetError:
    choice = space.smallest()
    smallest_bytes = _budget_for(choice.needed_bytes, margin)
    num_blocks = len([slot for first, last in choice.segments for slot in range(first, last + 1)])
    modules = f"{num_blocks} module{'s' if num_blocks != 1 else ''}"
    kept_free = f", with {margin:.0%} of it kept free" if margin else ""
    return BudgetError(
        f"No plan fits in {format_bytes(budget_bytes)}: even micro-batches of {choice.micro_batch_size} with {modules} "
        f"recomputed need a budget of {format_bytes(smallest_bytes)}{kept_free}. "
        f"Raise the budget by {format_bytes(smallest_bytes - budget_bytes)}.",
        smallest_bytes,
        budget_bytes,
    )
