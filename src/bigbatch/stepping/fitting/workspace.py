"""The workspace of a step's kernels, found by running small micro-batches for real; see ``memory/kernels.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.batch.logical import LogicalBatch
from bigbatch.batch.resizing import micro_batch_of
from bigbatch.errors import BatchError, RecomputeError, TraceError
from bigbatch.memory.kernels import Kernel, Workspaces, watching_kernels
from bigbatch.memory.recompute import apply
from bigbatch.planning.costs import NOTHING, Line, MemoryProfile
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.fitting.shadow import Shadow
from bigbatch.stepping.fitting.trial import put_back_afterwards
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

Fits = Callable[[int, bool], bool]
_Calls = list[tuple[Kernel, float]]

_SMALL, _LARGE = 2, 8
"""Micro-batches in which kernels are watched. Some kernels treat a single sample in a way of their own."""
_MANY = 16
"""From here on, torch gives convolutions of one pixel to another library (``use_mkldnn`` in ATen's Convolution.cpp)."""
_MOST_SECONDS = 10.0
"""For a larger one; else one of twice the small one has to do."""


def find_workspace(step: Step, batch: Any, shadow: Shadow, profile: MemoryProfile, most: int, fits: Fits) -> Line:
    """Let the shadow know the workspace of the step's kernels; what they add to peaks, by samples of a micro-batch.

    State of model, optimizers and random numbers is as before, bit for bit. Where another profiler runs, nothing can
    be measured on CPU.

    Args:
        step: Whose model is run.
        batch: To make micro-batches of.
        shadow: Of the step; from now on its records have ``most_in_kernels``.
        profile: What was traced.
        most: The largest micro-batch that is to be planned.
        fits: ``fits(size, recompute_all)``: whether a step with micro-batches of this size may be tried.
    """
    plans = list(_plans(shadow, profile, most, fits))
    busy = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    if not plans or (busy and step.accumulator.device.type == "cpu"):
        return NOTHING
    sizes, shadow.workspaces = _measured(step, batch, plans[0], most, fits)
    if not any(known for _, known in shadow.workspaces):
        return NOTHING
    found = [(size, max(_beyond_tensors(shadow, size, plan) for plan in plans)) for size in sizes]
    line = Line.through(found[0], found[-1])
    if line.per_sample < 0:
        return Line(max(num_bytes for _, num_bytes in found), 0.0)
    return Line(max(0.0, line.fixed), line.per_sample)


def _plans(shadow: Shadow, profile: MemoryProfile, most: int, fits: Fits) -> Iterator[Plan]:
    """Nothing and everything recomputed, as far as that goes and fits."""
    for names in dict.fromkeys(((), profile.recomputable)):
        plan = Plan(micro_batch_size=most, recompute=names)
        if fits(min(_SMALL, most), bool(names)):
            try:
                shadow.run([min(_SMALL, most)], plan)
            except (RecomputeError, TraceError):
                continue
            yield plan


def _unless_refused(run: Callable[[], _Calls]) -> _Calls | None:
    """What a run of a single sample gives; None where BatchNorm refuses it, having one value per channel."""
    try:
        return run()
    except BatchError:
        return None


def _measured(
    step: Step, batch: Any, plan: Plan, most: int, fits: Fits
) -> tuple[list[int], tuple[tuple[int, Workspaces], ...]]:
    """The sizes that were run, and what kernels need in micro-batches of so many samples and more."""
    with put_back_afterwards(step), without_compiled_code(step.model), apply(plan, step.model):

        def kernels_of(size: int) -> tuple[list[tuple[Kernel, float]], float]:
            return _kernels(step, micro_batch_of(batch, size, step.options))

        size = min(_SMALL, most)
        small, seconds = kernels_of(size)

        def may_run(larger: int) -> bool:
            is_slow = larger > 2 * size and seconds * larger / size > _MOST_SECONDS
            return size < larger <= most and fits(larger, bool(plan.recompute)) and not is_slow

        sizes = [larger for larger in (min(_LARGE, most), 2 * size) if may_run(larger)][:1]
        sizes += [_MANY] if may_run(_MANY) else []
        calls = [kernels_of(larger)[0] for larger in sizes]
        single = _unless_refused(lambda: kernels_of(1)[0]) if size > 1 else None
    found = [(1, Workspaces(small, calls[0] if calls else small))]
    if single is not None:
        found = [(1, Workspaces(single, single)), (size, found[0][1])]
    if sizes[-1:] == [_MANY]:
        found.append((_MANY, Workspaces([(kernel, 0.0) for kernel, _ in small], calls[-1])))
    return [size, *sizes], tuple(found)


def _kernels(step: Step, micro_batch: Any) -> tuple[list[tuple[Kernel, float]], float]:
    """Operations of a forward and backward, with the workspace of each in bytes; seconds without being watched."""

    def run() -> None:
        done = step.accumulator.run(LogicalBatch([micro_batch]), None, step.named_parameters())
        step.accumulator.abandon(done)

    began = time.perf_counter()
    run()  # what libraries make once is made here
    seconds = time.perf_counter() - began
    with watching_kernels(step.accumulator.device) as found:
        run()
    return found, seconds


def _beyond_tensors(shadow: Shadow, size: int, plan: Plan) -> float:
    """What kernels add to the peak of two micro-batches of this size, in bytes."""
    record = shadow.run((size, size), plan)
    return max(0.0, record.most_before_update - record.peak_of_micro_batches)
