"""Plans that should be about as fast, tried in turns: times that were predicted do not decide between them."""

from __future__ import annotations

import bisect
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch

from bigbatch.batch.sizes import part_sizes
from bigbatch.errors import BudgetError
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.search import search
from bigbatch.planning.space import ABOUT
from bigbatch.stepping.fitting.timing import tried
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.fitting.planner import Planner

_MOST_SIZES, _MOST_RIVALS = 8, 3
_MOST_TRIAL_SECONDS = 5.0
_WORTH_A_TRIAL, _WORTH_FILLING = 1.1, 1.03


def fastest_in_trial(planner: Planner, plan: Plan, profile: MemoryProfile, batch_size: int, budget_bytes: int) -> Plan:
    """The plan, or one of other micro-batches that should be about as fast and, tried in turns with it, is.

    Of those that are about as fast, the one of the largest micro-batches is taken, as in the search.
    Times of sizes that were not measured lie on lines between those that were, and kernels do not.
    """

    def of_size(size: int) -> Plan | None:
        try:
            return search(
                profile, batch_size=batch_size, budget_bytes=budget_bytes, margin=planner.margin, micro_batch_size=size
            )
        except BudgetError:
            return None

    size = plan.micro_batch_size
    sizes = {*part_sizes(batch_size, profile.smallest_micro_batch), batch_size} - {size}
    near = [of_size(other) for other in sorted(sizes, key=lambda other: abs(math.log(other / size)))[:_MOST_SIZES]]
    worth = [other for other in near if other is not None and seconds_of(other) < _WORTH_A_TRIAL * seconds_of(plan)]
    rivals = sorted(worth, key=seconds_of)[:_MOST_RIVALS]
    fits = _Fits(planner, profile, batch_size, budget_bytes)
    plan = _largest_about_as_fast(fits, plan, [planner.traced_plan(rival, batch_size) for rival in rivals])
    return _largest_about_as_fast(fits, plan, _fuller(fits, plan, of_size))


class _Fits(NamedTuple):
    """What plans are held against."""

    planner: Planner
    profile: MemoryProfile
    batch_size: int
    budget_bytes: int

    def over(self, plan: Plan) -> int:
        """Bytes by which a traced plan exceeds the budget, or the memory that nobody uses."""
        room = min(self.budget_bytes, free_bytes(self.planner.step.accumulator.device))
        return self.planner.budget_for(plan, self.profile) - room


def _largest_about_as_fast(fits: _Fits, plan: Plan, rivals: Sequence[Plan]) -> Plan:
    planner, batch_size = fits.planner, fits.batch_size
    fitting = [some for some in (plan, *rivals) if fits.over(some) <= 0]
    one_round = sum(2 * seconds_of(some) / (some.accumulation_steps or 1) for some in fitting)
    if fitting[:1] != [plan] or len(fitting) == 1 or one_round > _MOST_TRIAL_SECONDS:
        return plan
    with planner.any_number_of_samples():
        rounds = tried(planner.step, planner.batch, fitting, [planner.sizes_of(some, batch_size) for some in fitting])
    fastest = min(rounds, key=min)
    pairs = zip(rounds, fitting, strict=True)
    about_as_fast = [pair for pair in pairs if cannot_be_told_apart(pair[0], fastest)]
    seconds, best = max(about_as_fast, key=lambda pair: pair[1].micro_batch_size)
    return replace(best, step_seconds=min(seconds))


def cannot_be_told_apart(seconds: Sequence[float], fastest: Sequence[float]) -> bool:
    """Whether steps were about as fast as the fastest, or no slower in more than a quarter of the rounds.

    >>> cannot_be_told_apart([1.02, 0.99, 0.99, 1.02], [1.0, 1.0, 1.0, 1.0])
    True
    >>> cannot_be_told_apart([1.02, 1.02, 1.02, 1.02], [1.0, 1.0, 1.0, 1.0])
    False

    Args:
        seconds: By round.
        fastest: Those of another way, of the same rounds.
    """
    ratios = sorted(mine / theirs for mine, theirs in zip(seconds, fastest, strict=True))
    return statistics.median(ratios) <= ABOUT or ratios[len(ratios) // 4] <= 1


def _fuller(fits: _Fits, plan: Plan, of_size: Callable[[int], Plan | None]) -> list[Plan]:
    """Plans of as many micro-batches that are larger, the last one smaller: as far as the budget goes, and half as far.

    Equal micro-batches leave free what lies between two numbers of them. A larger one takes it: it is nearer to the
    big batch, and a batch of fewer samples, such as the end of an epoch, needs fewer of them.
    """
    count, expected = plan.accumulation_steps or 1, of_size(plan.micro_batch_size)
    if count == 1 or expected is None:
        return []
    smallest, last = plan.micro_batch_size, math.ceil(fits.batch_size / (count - 1)) - 1

    @functools.cache
    def traced(size: int) -> Plan | None:
        found = of_size(size)
        # Where a rest of one sample may not be (BatchNorm), the cut has smaller micro-batches than it was asked for.
        if found is None or max(fits.planner.sizes_of(found, fits.batch_size)) < size:
            return None
        if seconds_of(found) > _WORTH_FILLING * seconds_of(expected):
            return None
        return fits.planner.traced_plan(found, fits.batch_size)

    def is_too_large(size: int) -> bool:
        found = traced(size)
        return found is None or fits.over(found) > 0

    largest = smallest + bisect.bisect_left(range(smallest + 1, last + 1), True, key=is_too_large)
    wanted = {largest, (smallest + largest + 1) // 2} - {smallest}
    return [found for found in map(traced, wanted) if found is not None]


def seconds_of(plan: Plan) -> float:
    """Of a step, as it is expected."""
    return plan.step_seconds or 0.0


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available
