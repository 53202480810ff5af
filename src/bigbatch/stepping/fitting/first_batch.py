"""The plan that a step makes at its first batch: planned, then tried for real."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigbatch.errors import BudgetError, EmptyBatchError, OptionError, TraceError
from bigbatch.memory.recompute import apply
from bigbatch.planning.advice import with_advice
from bigbatch.planning.costs import NOTHING, MemoryProfile
from bigbatch.stepping.fitting import sharded_plans, sizing
from bigbatch.stepping.fitting.footprints import planned
from bigbatch.stepping.fitting.merged_offer import offer_of_merging
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

_log = logging.getLogger("bigbatch")

_MOST_TRIES = 8
_STEP_DOWN = 0.2
"""Of the budget: how much less to plan for when a plan really ran out of memory."""


def is_needed(step: Step, batch: Any) -> bool:
    """Whether there is no plan yet, or the one there is was made for less than this batch."""
    several = step.accumulator.ranks.are_several
    if step.plan is not None and (several or not sizing.may_fit_more(step.plan, step, batch)):
        return False  # several ranks do not decide by what one of them has got
    if not several:
        sizing.check_size(step, batch)
    return True


def fit_together(step: Step, batch: Any, budget_bytes: int) -> Plan:
    """The plan of the step: of several ranks each makes one for its share, and all take the most careful.

    Raises:
        OptionError: SyncBatchNorm has collectives in the forward, so that no rank can try a plan by itself.
    """
    ranks = step.accumulator.ranks
    if ranks.reducer.is_sharded:
        return sharded_plans.fit(Planner, step, batch, budget_bytes)
    if not ranks.are_several:
        return fit(step, batch, budget_bytes)
    if ranks.reducer.must_run_together or ranks.reducer.has_sync_batch_norm:
        raise OptionError(
            "With SyncBatchNorm a plan cannot be found by trying, because a rank that runs out of memory "
            "cannot tell the others. Give micro_batch_size=, or plan=bb.Plan(micro_batch_size=..., recompute=(...)), "
            "and leave memory_budget out."
        )
    plan, failure = None, None
    try:
        with ranks.apart():
            plan = fit(step, batch, budget_bytes)
    except EmptyBatchError:
        pass
    except Exception as error:
        failure = error
    # With lengths a micro-batch size means another number of tokens on each rank.
    held = math.inf if plan is None else plan.max_tokens or plan.micro_batch_size
    sizes = [row[0] for row in ranks.agree(failure, [held])]
    if not any(map(math.isfinite, sizes)):
        raise EmptyBatchError("The batch is empty on every rank, so no plan can be made for it.")
    careful = Plan.from_json(ranks.from_rank(sizes.index(min(sizes)), plan.to_json() if plan else None))
    apply(careful, step.model)
    return careful


def fit(step: Step, batch: Any, budget_bytes: int) -> Plan:
    """The fastest plan for this batch whose measured peak is within the budget; see ``Step.fit``.

    The plan is put on the model. Where the model cannot be traced, micro-batch sizes are tried with real tensors.
    """
    planner = Planner(step, batch)
    step.accumulator.plan = None  # an earlier one does not bound what is tried now
    target = budget_bytes
    try:
        profile = planner.traced
        if not planner.fits_directly(budget_bytes):
            profile = planner.timed(planner.num_samples, budget_bytes)
        for _ in range(_MOST_TRIES):
            try:
                plan = _plan_to_be_tried(planner, profile, target)
            except BudgetError:
                if target == budget_bytes:
                    raise
                break
            peak = _tried(step, batch, plan, budget_bytes)
            if peak <= budget_bytes:
                return replace(plan, peak_bytes=int(peak), budget_bytes=budget_bytes)
            over = peak - budget_bytes if math.isfinite(peak) else _STEP_DOWN * target
            target = max(1, int(target - over))
    except TraceError as error:
        _log.warning("The plan is found by trying, because the model cannot be traced: %s", error)
    if step.plan is not None and step.plan.recompute:
        apply(None, step.model)  # what an earlier plan put on, this one does not name
    return sizing.fit(step, batch, budget_bytes)


def leanest(step: Step, batch: Any) -> Plan | None:
    """The plan that needs least at the micro-batch size that the step has; None when there is nothing to recompute.

    It is traced without numbers, so it can be made where memory has run out.
    """
    planner, held = Planner(step, batch), step.micro_batch_size
    try:
        planner.plan(planner.traced, planner.num_samples, 1, micro_batch_size=held)
    except TraceError:
        return None
    except BudgetError as error:
        plan = planner.plan(planner.traced, planner.num_samples, error.smallest_bytes, micro_batch_size=held)
        return plan if plan.recompute else None
    return None


def _plan_to_be_tried(planner: Planner, profile: MemoryProfile, budget_bytes: int) -> Plan:
    """The plan with a margin or, where there is none, without: it will be measured."""
    held = planner.step.wanted_micro_batch_size
    try:
        return planned(planner, profile, planner.num_samples, budget_bytes, micro_batch_size=held)
    except BudgetError:
        planner.margin = 0.0
        profile = replace(profile, workspace=NOTHING)
        try:
            return planned(planner, profile, planner.num_samples, budget_bytes, micro_batch_size=held)
        except BudgetError as error:
            offers = offer_of_merging(planner, planner.num_samples, error.budget_bytes, held)
            raise with_advice(error, profile, planner.num_samples, offers) from None


def _tried(step: Step, batch: Any, plan: Plan, budget_bytes: int) -> float:
    """Measured peak of the plan, which stays on the model if it is within the budget."""
    recomputing, peak = apply(plan, step.model), math.inf
    step.accumulator.plan = plan
    try:
        peak = sizing.peak_or_infinite(step, batch, plan.micro_batch_size)
    finally:
        step.accumulator.plan = None
        if peak > budget_bytes:
            recomputing.remove()
    return peak
