"""Let a step run with a recorder: its micro-batches, their backward and the update are marked."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bigbatch.errors import BigBatchWarning
from bigbatch.memory.recompute import Recomputing, apply
from bigbatch.memory.trace import Recorder
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step


def apply_quietly(plan: Plan, model: nn.Module) -> Recomputing:
    """Put a plan on for a look at it: what ``apply`` warns of is for those who keep it on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BigBatchWarning)
        return apply(plan, model)


@contextlib.contextmanager
def recorded(step: Step, recorder: Recorder, *, closely: bool, moment_bytes: int = 0) -> Iterator[None]:
    """Within the block, what the step does is noted.

    Args:
        closely: Note modules and what they save too, and not the marks alone.
        moment_bytes: That summing the gradients over ranks, which this step does not, needs before the update.
    """
    accumulator = step.accumulator
    loss_fn, listener, run = accumulator.loss_fn, step.on_micro_batch, accumulator.run

    def watched(model: Any, micro_batch: Any) -> Any:
        with recorder.strictly(), recorder.watching_saves() if closely else contextlib.nullcontext():
            returned = loss_fn(model, micro_batch)
        recorder.mark("backward")
        return returned

    def run_and_mark(*args: Any, **kwargs: Any) -> Any:
        done = run(*args, **kwargs)
        recorder.mark("update")
        torch.empty(moment_bytes, dtype=torch.uint8)
        return done

    step.on_micro_batch = lambda k, count: recorder.mark("micro-batch")
    accumulator.loss_fn = watched
    accumulator.run = run_and_mark
    try:
        with recorder.watching_modules() if closely else contextlib.nullcontext():
            yield
        recorder.mark("end")
    finally:
        step.on_micro_batch, accumulator.loss_fn = listener, loss_fn
        del accumulator.run
