"""Plans of a model that FSDP2 spreads over ranks: by arithmetic alone, for a forward that fails cannot be undone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigbatch.errors import BudgetError, EmptyBatchError
from bigbatch.memory.recompute import apply
from bigbatch.planning.advice import with_advice
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.search import Recompute, search
from bigbatch.planning.sharding_costs import Shards, When, sharded
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.fitting.planner import Planner
    from bigbatch.stepping.step import Step

MARGIN = 0.03
"""Share of a budget that such a plan leaves free: three times that of one whose peak is traced; see docs/ranks.md."""


def costs_of(profile: MemoryProfile, shards: Shards, plan: Plan) -> MemoryProfile:
    """The costs that a plan was made from."""
    return sharded(profile, shards, "after" if plan.reduce == "after" and plan.accumulation_steps != 1 else "each")


def plan_sharded(
    profile: MemoryProfile,
    shards: Shards,
    batch_size: int,
    budget_bytes: int,
    *,
    ways: Sequence[When] = ("after", "each"),
    micro_batch_size: int | None = None,
    recompute: Recompute = None,
) -> Plan:
    """The fastest plan of those that sum the gradients once a step, and of those that do it in each micro-batch.

    A plan of one micro-batch does it once, whatever it says.

    Args:
        profile: Of the whole model in one process.
        batch_size: Samples of the rank with the largest share.
        ways: How gradients may be summed; "each" is always among them.

    Raises:
        BudgetError: Nothing fits.
    """
    found, failures = [], []
    for way in ways:
        try:
            plan = search(
                sharded(profile, shards, way),
                batch_size=batch_size,
                budget_bytes=budget_bytes,
                margin=MARGIN,
                micro_batch_size=micro_batch_size,
                recompute=recompute,
            )
        except BudgetError as error:
            failures.append((error, way))
            continue
        if way == "after" and plan.accumulation_steps == 1:
            continue  # that of "each" sends its gradients in that micro-batch, and is the same
        found.append(replace(plan, reduce=ways[0] if plan.accumulation_steps == 1 else way))
    if found:
        return min(found, key=lambda plan: plan.step_seconds or 0.0)
    error, way = min(failures, key=lambda failure: failure[0].smallest_bytes or math.inf)
    raise with_advice(error, sharded(profile, shards, way), batch_size)


def ways_of(step: Step) -> tuple[When, ...]:
    """How gradients may be summed: as the step was told, or as is better."""
    return ("each",) if step.options.reduce == "each" else ("after", "each")


def fit(planner_of: Callable[[Step, Any], Planner], step: Step, batch: Any, budget_bytes: int) -> Plan:
    """The plan of a step on all ranks, put on the model. Each plans for the largest share, with a batch of its own.

    Args:
        planner_of: Makes the planner of this rank, from its share; it is ``Planner``, which stands above this module.

    Raises:
        BudgetError: Nothing fits.
        EmptyBatchError: No rank has a sample.
    """
    ranks = step.accumulator.ranks
    plan, failure, planner = None, None, None
    try:
        planner = planner_of(step, batch)
    except EmptyBatchError:
        pass
    except Exception as error:
        failure = error
    rows = ranks.agree(failure, [planner.num_samples if planner else 0])
    most = int(max(row[0] for row in rows))
    if not most:
        raise EmptyBatchError("The batch is empty on every rank, so no plan can be made for it.")
    try:
        plan = planner and _planned(planner, step, most, budget_bytes)
    except Exception as error:
        failure = error
    # With lengths a micro-batch size means another number of tokens on each rank; as good as equal, the leaner one.
    held = (math.inf, 0) if plan is None else (plan.max_tokens or plan.micro_batch_size, plan.reduce != "each")
    rows = ranks.agree(failure, [float(number) for number in held])
    chosen = min(range(len(rows)), key=lambda rank: rows[rank])
    careful = Plan.from_json(ranks.from_rank(chosen, plan.to_json() if plan else None))
    put_on(careful, step)
    return careful


def put_on(plan: Plan, step: Step) -> None:
    """Recompute its modules, and let FSDP2 sum gradients as it says."""
    apply(plan, step.model)
    reducer = step.accumulator.ranks.reducer
    if plan.reduce is not None and reducer.is_sharded:
        step.options = step.accumulator.options = replace(step.options, reduce=plan.reduce)
        reducer.when = plan.reduce


def _planned(planner: Planner, step: Step, num_samples: int, budget_bytes: int) -> Plan:
    return planner.plan(planner.traced, num_samples, budget_bytes, micro_batch_size=step.wanted_micro_batch_size)
