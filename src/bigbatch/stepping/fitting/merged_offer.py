"""Whether ``batch_norm="merge"`` would fit where ``"exact"`` does not, and how far it turns the gradient.

It is offered in the error and not taken, because it is another gradient than was asked for. How far it turns is
measured on a few samples: those at once, within the same budget, and the same in micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.errors import BigBatchError, BudgetError
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.cosine import MOST_MICRO_BATCHES, cosine, why_not_measured
from bigbatch.stepping.dropout.per_sample import same_masks
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.stepping.fitting.pooled_plans import with_options
from bigbatch.stepping.fitting.recording import apply_quietly
from bigbatch.stepping.fitting.rivals import free_bytes
from bigbatch.stepping.fitting.trial import put_back_afterwards
from bigbatch.units import format_bytes, format_count
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

_SEED = 0  # of masks; any will do


def offer_of_merging(planner: Planner, batch_size: int, budget_bytes: int | None, *held: Any) -> tuple[str, ...]:
    """In words, for ``BudgetError.what_else``; nothing where the step does not ask for "exact", or nothing fits.

    Args:
        planner: Of the step.
        batch_size: Samples in a step.
        budget_bytes: The memory there is.
        held: What the person holds fixed, of which nothing is offered: micro-batch size, what is recomputed.
    """
    if planner.pooled is None or budget_bytes is None or any(value is not None for value in held):
        return ()
    merged, ranks = with_options(planner.pooled, batch_norm="merge"), planner.spread.num_ranks
    other = Planner(merged, planner.batch, device=planner.device, card=planner.card, num_ranks=ranks)
    try:
        plan = other.plan(other.traced, batch_size, budget_bytes)
    except BigBatchError:
        return ()
    modules = f" with {format_count(plan.num_recomputed, 'module')} recomputed" if plan.recompute else ""
    text = (
        f'batch_norm="merge" fits, in micro-batches of {plan.micro_batch_size}{modules} and a peak of '
        f"{format_bytes(plan.peak_bytes or 0, at_least=True)}, and is another gradient: "
    )
    try:
        return (text + _turned(planner, plan, budget_bytes),)
    except Exception as error:
        # The BudgetError is what the person needs; what fails beside it must not hide it.
        return (f"{text}how far it turns could not be measured ({why_not_measured(error)}).",)


def _turned(planner: Planner, plan: Plan, budget_bytes: int) -> str:
    """How far the gradient of a few samples is from that of the same at once, in words."""
    step = planner.pooled
    assert step is not None
    if not planner.can_run or step.accumulator.ranks.are_several:
        return (
            "how far it turns is not measured here (several ranks, or a model that cannot run on this machine); "
            "bb.verify measures it."
        )
    whole = _at_once(planner, plan.micro_batch_size, budget_bytes)
    if whole is None:
        return "how far it turns could not be measured: there are too few samples, or memory for them."
    num_samples = whole.micro_batch_size
    size = min(plan.micro_batch_size, num_samples // 2)
    few = planner.batch_of(num_samples) if step.options.collate is None else planner.batch[:num_samples]
    with put_back_afterwards(step), same_masks(_SEED):
        expected = _gradient(with_options(step, batch_norm="native", dropout="per-sample"), few, whole)
        cut = replace(plan, micro_batch_size=size)
        found = _gradient(with_options(step, batch_norm="merge", dropout="per-sample"), few, cut)
    turned = cosine(found, expected)
    if turned == 0:
        return "how far it turns could not be measured (the gradient is zero or not finite)."
    return (
        f"that of {num_samples} samples in micro-batches of {size} has a cosine of {turned:.3f} to that of these "
        f"samples at once."
    )


def _at_once(planner: Planner, size: int, budget_bytes: int) -> Plan | None:
    """The plan that runs a few micro-batches of this size at once, or of a smaller one; None where nothing fits."""
    room = min(budget_bytes, free_bytes(planner.step.accumulator.device))
    num_samples = min(MOST_MICRO_BATCHES * size, planner.num_samples)
    while num_samples >= 2 * planner.traced.smallest_micro_batch:
        try:
            return planner.plan(planner.traced, num_samples, room, micro_batch_size=num_samples)
        except BudgetError:
            num_samples //= 2
    return None


def _gradient(step: Step, batch: Any, plan: Plan) -> dict[str, torch.Tensor | None]:
    """Of a batch, by parameter, on the host."""
    named = step.named_parameters()
    with apply_quietly(plan, step.model), without_compiled_code(step.model):
        done = step.accumulator.run(batch, plan.micro_batch_size, named)
        try:
            done.gradients.correct(done.shares.corrections())
            return {name: None if p.grad is None else p.grad.to("cpu", copy=True) for name, p in named.items()}
        finally:
            step.accumulator.abandon(done)
