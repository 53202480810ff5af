"""What kernels need only while they run, beyond tensors: found by running small micro-batches for real.

A convolution of oneDNN or cuDNN, and an LSTM, ask the allocator for room that belongs to no tensor. So a trace, which
counts tensors, says less than the allocator does; by how much is measured where the model can run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bigbatch.batch.logical import LogicalBatch
from bigbatch.batch.resizing import micro_batch_of
from bigbatch.memory.recompute import apply
from bigbatch.planning.costs import Line
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.trial import put_back_afterwards
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

_FIRST_MICRO_BATCH = "bigbatch: the first micro-batch"
_MOST_SECONDS = 10.0


def workspace_of(
    step: Step, batch: Any, sizes: Sequence[int], plans: Sequence[Plan], traced: Callable[[int, Plan], float]
) -> Line:
    """Bytes that the allocator gives out at the peak of two micro-batches beyond those of tensors.

    State of model, optimizers and random numbers is as before, bit for bit. Where another profiler runs, nothing can
    be measured on CPU, and none is returned.

    Args:
        step: Whose model is run.
        batch: To make micro-batches of.
        sizes: Of micro-batches, ascending, at most two. Two give a line; the second is left out when it would take
            long.
        plans: What is recomputed; the one that needs most counts.
        traced: ``traced(size, plan)``: bytes of tensors at the peak of two micro-batches of this size, beyond what is
            alive before the first.
    """
    if step.accumulator.device.type == "cpu" and torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return Line()
    found: list[tuple[int, float]] = []
    with put_back_afterwards(step), without_compiled_code(step.model):
        _run(step, micro_batch_of(batch, sizes[0], step.options), plans[0])  # what is made once is made here
        began = time.perf_counter()
        for size in sizes:
            if found and (time.perf_counter() - began) * size / sizes[0] > _MOST_SECONDS:
                break
            micro_batch = micro_batch_of(batch, size, step.options)
            beyond = [_allocated(step, micro_batch, plan) - traced(size, plan) for plan in plans]
            found.append((size, max(0.0, *beyond)))
    return _line(found, only=len(sizes) == 1)


def _line(found: Sequence[tuple[int, float]], *, only: bool) -> Line:
    """A line that is nowhere below what was found."""
    if len(found) == 1:
        size, num_bytes = found[0]
        return Line(num_bytes, 0.0) if only else Line(0.0, num_bytes / size)
    line = Line.through(*found)
    if line.per_sample < 0:
        return Line(max(num_bytes for _, num_bytes in found), 0.0)
    return Line(max(0.0, line.fixed), line.per_sample)


def _run(step: Step, micro_batch: Any, plan: Plan) -> None:
    """Forward and backward of the micro-batch, twice, without a trace in model and gradients."""
    with apply(plan, step.model):
        done = step.accumulator.run(LogicalBatch([micro_batch, micro_batch]), None, step.named_parameters())
        step.accumulator.abandon(done)


def _allocated(step: Step, micro_batch: Any, plan: Plan) -> float:
    """Bytes that the allocator gave out at the peak of two micro-batches, beyond what was alive before the first."""
    on_cpu = step.accumulator.device.type == "cpu"
    return (_allocated_on_cpu if on_cpu else _allocated_on_device)(step, lambda: _run(step, micro_batch, plan))


def _allocated_on_device(step: Step, run: Callable[[], None]) -> float:
    device = step.accumulator.device
    allocator: Any = getattr(torch, device.type)
    before: list[int] = []

    def begin(number: int, count: int | None) -> None:
        if number == 1:
            allocator.reset_peak_memory_stats(device)
            before.append(allocator.memory_allocated(device))

    with _listening(step, begin):
        run()
    return allocator.max_memory_allocated(device) - before[0]


def _allocated_on_cpu(step: Step, run: Callable[[], None]) -> float:
    def begin(number: int, count: int | None) -> None:
        if number == 1:
            with record_function(_FIRST_MICRO_BATCH):
                pass

    with _quietly(), _listening(step, begin), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events: list[Any] = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    names = [event.name() for event in events]
    # Blocks that come have a size above zero, blocks that go one below; those that were there before go unnoticed.
    changes = (event.nbytes() for event in events[names.index(_FIRST_MICRO_BATCH) :] if event.name() == "[memory]")
    return max(itertools.accumulate(changes, initial=0))


@contextlib.contextmanager
def _listening(step: Step, listener: Callable[[int, int | None], None]) -> Iterator[None]:
    before, step.on_micro_batch = step.on_micro_batch, listener
    try:
        yield
    finally:
        step.on_micro_batch = before


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the profiler from printing that it begins, and that blocks go which it did not see come.

    The first is asked of its environment, the second is written by C++ straight to the standard error of the process.
    """
    name = "KINETO_LOG_LEVEL"
    before = os.environ.setdefault(name, "99")
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        if before == "99":
            os.environ.pop(name, None)
