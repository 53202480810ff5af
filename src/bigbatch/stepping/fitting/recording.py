"""Let a step run with a recorder: its micro-batches, their backward and the update are marked."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
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
def after_last_backward(step: Step, do: Callable[[], Any]) -> Iterator[None]:
    """Within the block, do something in each step between its last backward and what follows."""
    accumulator, run = step.accumulator, step.accumulator.run

    def run_and_do(*args: Any, **kwargs: Any) -> Any:
        done = run(*args, **kwargs)
        do()
        return done

    accumulator.run = run_and_do
    try:
        yield
    finally:
        del accumulator.run


@contextlib.contextmanager
def recorded(step: Step, recorder: Recorder, *, closely: bool, moment_bytes: int = 0) -> Iterator[None]:
    """Within the block, what the step does is noted.

    Args:
        closely: Note modules and what they save too, and not the marks alone.
        moment_bytes: That summing the gradients over ranks, which this step does not, needs before the update.
    """
    accumulator = step.accumulator
    loss_fn, listener = accumulator.loss_fn, step.on_micro_batch

    def watched(model: Any, micro_batch: Any) -> Any:
        with recorder.strictly(), recorder.watching_saves() if closely else contextlib.nullcontext():
            returned = loss_fn(model, micro_batch)
        recorder.mark("backward")
        return returned

    def begin_update() -> None:
        recorder.mark("update")
        torch.empty(moment_bytes, dtype=torch.uint8)

    step.on_micro_batch = lambda k, count: recorder.mark("micro-batch")
    accumulator.loss_fn = watched
    modules = recorder.watching_modules() if closely else contextlib.nullcontext()
    try:
        with after_last_backward(step, begin_update), modules:
            yield
        recorder.mark("end")
    finally:
        step.on_micro_batch, accumulator.loss_fn = listener, loss_fn
