"""The micro-batch size for a memory budget, found by trying: every size that is returned was itself run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.batch.cutting import lay_out
from bigbatch.batch.logical import LogicalBatch, num_samples_of
from bigbatch.batch.structure import is_array, mapped
from bigbatch.errors import BudgetError, OptionError
from bigbatch.memory.measure import count_peak_bytes
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.trial import materialise_state, put_back_afterwards
from bigbatch.units import format_bytes
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step


def largest_that_fits(candidates: Sequence[int], peak_of: Callable[[int], float], budget_bytes: int) -> tuple[int, int]:
    """The largest candidate whose peak is inside the budget, and that peak; it was itself measured, as was the next.

    Peaks of two sizes give a line, and the line the next guess; each guess lies strictly between the largest that fits
    and the smallest that does not, so the search ends however wrong the line is.

    Args:
        candidates: Sizes, ascending.
        peak_of: Bytes that a size needs; infinite when it runs out of memory.
        budget_bytes: The most that may be needed.

    Raises:
        BudgetError: Not even the smallest fits.
    """
    peaks = {0: peak_of(candidates[0])}
    if peaks[0] > budget_bytes:
        raise BudgetError(
            f"No micro-batch fits in {format_bytes(budget_bytes)}: even {candidates[0]} sample(s) at a time need "
            f"{_bytes_or_more(peaks[0])}. Raise the budget, recompute modules (plan=bb.Plan(..., "
            "recompute=(names))), use "
            f'precision="bf16", or an optimizer with less state.',
            smallest_bytes=-1 if math.isinf(peaks[0]) else int(peaks[0]),
            budget_bytes=budget_bytes,
        )
    fits, too_large = 0, len(candidates)
    while too_large - fits > 1:
        i = _guess(candidates, peaks, budget_bytes, fits, too_large)
        peaks[i] = peak_of(candidates[i])
        if peaks[i] <= budget_bytes:
            fits = i
        else:
            too_large = i
    return candidates[fits], int(peaks[fits])


def _guess(candidates: Sequence[int], peaks: dict[int, float], budget: int, fits: int, too_large: int) -> int:
    """Index to try next: where the line through two measured peaks meets the budget, or the middle."""
    known = sorted((candidates[i], peak) for i, peak in peaks.items() if math.isfinite(peak))
    middle = (fits + too_large) // 2
    if len(known) < 2 or len(peaks) > 5:
        return middle
    (size_a, peak_a), (size_b, peak_b) = known[-2:]
    if peak_b <= peak_a:
        return middle
    at_budget = size_a + (budget - peak_a) * (size_b - size_a) / (peak_b - peak_a)
    below = sum(size <= at_budget for size in candidates) - 1
    return min(max(below, fits + 1), too_large - 1)


def _bytes_or_more(peak: float) -> str:
    return "more than there is" if math.isinf(peak) else format_bytes(peak)


def fit(step: Step, batch: Any, budget_bytes: int) -> Plan:
    """A plan whose measured peak is inside the budget; see ``Step.fit``."""
    check_can_be_cut(step, batch)
    num_samples = num_samples_of(batch, step.options)
    smallest = min(step.accumulator.smallest_micro_batch, num_samples)
    sizes = {math.ceil(num_samples / steps) for steps in range(1, num_samples + 1)}
    candidates = sorted(size for size in sizes if size >= smallest)
    if step.wanted_micro_batch_size is not None:
        candidates = [min(step.wanted_micro_batch_size, num_samples)]
    size, peak_bytes = largest_that_fits(candidates, lambda n: _peak_or_infinite(step, batch, n), budget_bytes)
    return Plan(
        micro_batch_size=step.wanted_micro_batch_size or size,
        accumulation_steps=math.ceil(num_samples / size),
        peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
    )


def check_can_be_cut(step: Step, batch: Any) -> None:
    """Raise ``OptionError`` when the micro-batch size is not ours to choose."""
    if isinstance(batch, LogicalBatch) or step.options.split is not None:
        raise OptionError(
            "A batch that is cut already has its micro-batch size, so there is none to choose. Leave memory_budget out."
        )


def may_fit_more(plan: Plan, step: Step, batch: Any) -> bool:
    """Whether the plan says "all of the batch" of a batch that was smaller than this one."""
    if plan.accumulation_steps != 1 or step.wanted_micro_batch_size is not None:
        return False
    check_can_be_cut(step, batch)
    return num_samples_of(batch, step.options) > plan.micro_batch_size


def _peak_or_infinite(step: Step, batch: Any, micro_batch_size: int) -> float:
    try:
        return measure(step, batch, micro_batch_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Out of the except block: the traceback holds the activations of the failed try.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return math.inf


def measure(step: Step, batch: Any, micro_batch_size: int | None) -> int:
    """Peak bytes of a steady step; see ``Step.measure``.

    Two micro-batches are run, because the gradients of the first are there during the second, and no later one adds
    anything; a steady step has its optimizer state from the beginning.
    """
    cut, on_device = _first_two_micro_batches(step, batch, micro_batch_size)
    device = step.accumulator.device
    listener, step.on_micro_batch = step.on_micro_batch, None
    try:
        with put_back_afterwards(step), without_compiled_code(step.model):
            materialise_state(step)
            held = [step.model, *step.optimizers, step.options.ema, batch if on_device else cut]
            with count_peak_bytes(device, track=held) as meter:
                result = step.attempt(cut, micro_batch_size, step.named_parameters())
                if result.skipped:  # the optimizer did not run, but its temporaries belong to a steady step
                    materialise_state(step)
    finally:
        step.on_micro_batch = listener
    return meter.peak_bytes


def _first_two_micro_batches(step: Step, batch: Any, micro_batch_size: int | None) -> tuple[Any, bool]:
    """The part of a batch that is run, and whether the whole batch lies where the model is."""
    if micro_batch_size is None or isinstance(batch, LogicalBatch) or step.options.split is not None:
        return batch, step.accumulator.device.type == "cpu"
    if step.options.collate is not None:
        return LogicalBatch(_two_largest(step.accumulator.micro_batches(batch, micro_batch_size))), False
    layout = lay_out(batch, step.options.batch_dims)
    cut = layout.cut(0, min(2 * micro_batch_size, layout.num_samples))
    return cut, True


def _two_largest(micro_batches: list[Any]) -> list[Any]:
    """Those with most bytes: samples of different lengths are padded to the longest of their micro-batch."""
    return sorted(micro_batches, key=_num_bytes, reverse=True)[:2]


def _num_bytes(micro_batch: Any) -> int:
    sizes: list[int] = []
    mapped(lambda value: sizes.append(value.nbytes if is_array(value) else 0), micro_batch)
    return sum(sizes)
