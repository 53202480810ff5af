"""What ``batch_norm="merge"`` would be where ``"exact"`` does not fit: a plan, and how far it turns the gradient.

It is offered in the error and not taken, because it is another gradient than was asked for. How far it turns is
measured on a few samples: those at once, within the same budget, and the same in micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity

from bigbatch.errors import BigBatchError, BudgetError
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.stepping.fitting.pooled_plans import with_batch_norm
from bigbatch.stepping.fitting.recording import apply_quietly
from bigbatch.stepping.fitting.rivals import free_bytes
from bigbatch.stepping.fitting.trial import put_back_afterwards
from bigbatch.units import format_bytes
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

_MOST_MICRO_BATCHES = 4


def offer_of_merging(planner: Planner, batch_size: int, budget_bytes: int | None) -> tuple[str, ...]:
    """In words, for ``BudgetError.what_else``; nothing where the step does not ask for "exact", or nothing fits."""
    if planner.pooled is None or budget_bytes is None:
        return ()
    merged = with_batch_norm(planner.pooled, "merge")
    other = Planner(merged, planner.batch, device=planner.device, card=planner.card, num_ranks=planner.spread.num_ranks)
    try:
        plan = other.plan(other.traced, batch_size, budget_bytes)
    except BigBatchError:
        return ()
    text = (
        f'batch_norm="merge" fits, in micro-batches of {plan.micro_batch_size} with a peak of '
        f"{format_bytes(plan.peak_bytes or 0, at_least=True)}, and is another gradient: "
    )
    try:
        return (text + _turned(planner, merged, plan, budget_bytes),)
    except Exception as error:
        if not isinstance(error, BigBatchError | TypeError | RuntimeError) and not is_out_of_memory(error):
            raise
        return (f"{text}how far it turns could not be measured ({type(error).__name__}: {error}).",)


def _turned(planner: Planner, merged: Step, plan: Plan, budget_bytes: int) -> str:
    """How far the gradient of a few samples is from that of the same at once, in words."""
    if not planner.can_run or merged.accumulator.ranks.are_several:
        return "bb.verify measures how far it turns, where the model can run by itself."
    whole = _at_once(planner, plan.micro_batch_size, budget_bytes)
    if whole is None:
        return "how far it turns cannot be measured within this budget. bb.verify needs more memory, and tells."
    num_samples = whole.micro_batch_size
    size = min(plan.micro_batch_size, num_samples // 2)
    few = planner.batch_of(num_samples) if merged.options.collate is None else planner.batch[:num_samples]
    with put_back_afterwards(planner.step):
        expected = _gradient(planner.step, few, whole)
        found = _gradient(merged, few, replace(plan, micro_batch_size=size))
    cosine = float(cosine_similarity(found, expected, dim=0))
    return (
        f"that of {num_samples} samples in micro-batches of {size} has a cosine of {cosine:.3f} to that of these "
        f"samples at once."
    )


def _at_once(planner: Planner, size: int, budget_bytes: int) -> Plan | None:
    """The plan that runs a few micro-batches of this size at once, or of a smaller one; None where nothing fits."""
    room = min(budget_bytes, free_bytes(planner.step.accumulator.device))
    num_samples = min(_MOST_MICRO_BATCHES * size, planner.num_samples)
    while num_samples >= 2 * planner.traced.smallest_micro_batch:
        try:
            return planner.plan(planner.traced, num_samples, room, micro_batch_size=num_samples)
        except BudgetError:
            num_samples //= 2
    return None


def _gradient(step: Step, batch: Any, plan: Plan) -> torch.Tensor:
    """Of all parameters, as one vector on the host; zeros where there is none."""
    named = step.named_parameters()
    with apply_quietly(plan, step.model), without_compiled_code(step.model):
        done = step.accumulator.run(batch, plan.micro_batch_size, named)
        done.gradients.correct(done.shares.corrections())
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in named.values()]
        found = torch.cat([part.detach().to("cpu", torch.float64).flatten() for part in parts])
        step.accumulator.abandon(done)
    return found
