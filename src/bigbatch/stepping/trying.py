"""Plans that should be about as fast, tried in turns: times that were predicted do not decide between them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import torch

from bigbatch.batch.sizes import part_sizes
from bigbatch.errors import BudgetError
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.search import search
from bigbatch.planning.space import ABOUT
from bigbatch.stepping.timing import tried
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.planner import Planner

_MOST_SIZES, _MOST_RIVALS = 8, 3
_MOST_TRIAL_SECONDS = 5.0
_WORTH_A_TRIAL = 1.1


def fastest_in_trial(planner: Planner, plan: Plan, profile: MemoryProfile, batch_size: int, budget_bytes: int) -> Plan:
    """The plan, or one of other micro-batches that should be about as fast and, tried in turns with it, is.

    Of those that are about as fast, the one of the largest micro-batches is taken, as in the search.
    Times of sizes that were not measured lie on lines between those that were, and kernels do not.
    """
    size, rivals = plan.micro_batch_size, [plan]
    sizes = {*part_sizes(batch_size, profile.smallest_micro_batch), batch_size} - {size}
    for other in sorted(sizes, key=lambda other: abs(math.log(other / size)))[:_MOST_SIZES]:
        try:
            chosen = search(
                profile,
                batch_size=batch_size,
                budget_bytes=budget_bytes,
                margin=planner.margin,
                micro_batch_size=other,
            )
        except BudgetError:
            continue
        if seconds_of(chosen) < _WORTH_A_TRIAL * seconds_of(plan):
            rivals.append(chosen)
    rivals = [plan, *sorted(rivals[1:], key=seconds_of)[:_MOST_RIVALS]]
    traced = [plan, *(planner.traced_plan(rival, batch_size) for rival in rivals[1:])]
    room = min(budget_bytes, free_bytes(planner.step.accumulator.device))
    fitting = [rival for rival in traced if planner.budget_for(rival, profile) <= room]
    one_round = sum(2 * seconds_of(rival) / (rival.accumulation_steps or 1) for rival in fitting)
    if fitting[:1] != [plan] or len(fitting) == 1 or one_round > _MOST_TRIAL_SECONDS:
        return plan
    with planner.any_number_of_samples():
        times = tried(planner.step, planner.batch, fitting, [planner.sizes_of(rival, batch_size) for rival in fitting])
    about_as_fast = [pair for pair in zip(times, fitting, strict=True) if pair[0] <= ABOUT * min(times)]
    seconds, best = max(about_as_fast, key=lambda pair: pair[1].micro_batch_size)
    return replace(best, step_seconds=seconds)


def seconds_of(plan: Plan) -> float:
    """Of a step, as it is expected."""
    return plan.step_seconds or 0.0


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available
