"""The micro-batch size for a memory budget, found by trying: every size that is returned was itself run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.batch.collating import longest_of
from bigbatch.batch.logical import LogicalBatch, num_samples_of
from bigbatch.batch.sizes import part_sizes
from bigbatch.batch.structure import is_array, leaves
from bigbatch.errors import BudgetError, OptionError
from bigbatch.memory.measure import count_peak_bytes
from bigbatch.memory.out_of_memory import is_out_of_memory, release
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.coupled.whole_batch import whole_of
from bigbatch.stepping.distributed.buckets import buckets_of
from bigbatch.stepping.fitting.recording import after_last_backward
from bigbatch.stepping.fitting.trial import put_back_afterwards, step_with_zeros
from bigbatch.units import format_bytes
from bigbatch.values import Plan, StepOptions

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step


_EXPECTED_LESS = 0.99
"""The line through two peaks may be off by a per cent, and a try more than needed is cheap."""


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
        raise _nothing_fits(candidates[0], peaks[0], budget_bytes)
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


def _nothing_fits(size: int, peak: float, budget_bytes: int) -> BudgetError:
    needed = "more than there is" if math.isinf(peak) else format_bytes(peak)
    return BudgetError(
        f"No micro-batch fits in {format_bytes(budget_bytes)}: even {size} sample(s) at a time need {needed}. Raise "
        f"the budget, recompute modules (plan=bb.Plan(..., recompute=(names))), use "
        f'precision="bf16", or an optimizer with less state.',
        smallest_bytes=None if math.isinf(peak) else int(peak),
        budget_bytes=budget_bytes,
    )


def fit(step: Step, batch: Any, budget_bytes: int) -> Plan:
    """A plan whose measured peak is inside the budget; see ``Step.fit``."""
    check_can_be_cut(step, batch)
    num_samples = num_samples_of(batch, step.options)
    peaks: dict[int, float] = {}

    def peak_of(size: int) -> float:
        peaks[size] = peak_or_infinite(step, batch, size)
        return peaks[size]

    if step.wanted_micro_batch_size is not None:
        size, _ = largest_that_fits([min(step.wanted_micro_batch_size, num_samples)], peak_of, budget_bytes)
    else:
        size = _largest(step, num_samples, peak_of, peaks, budget_bytes)
    return Plan(
        micro_batch_size=step.wanted_micro_batch_size or size,
        accumulation_steps=math.ceil(num_samples / size),
        peak_bytes=int(peaks[size]),
        budget_bytes=budget_bytes,
        max_tokens=max_tokens_of(step.wanted_micro_batch_size or size, batch, step.options),
    )


def max_tokens_of(micro_batch_size: int, batch: Any, options: StepOptions) -> int | None:
    """Padded tokens of a micro-batch of the longest samples; None when samples have no lengths."""
    return None if options.length is None else max(micro_batch_size * longest_of(batch, options), 1)


def _largest(
    step: Step, num_samples: int, peak_of: Callable[[int], float], peaks: dict[int, float], budget_bytes: int
) -> int:
    """The largest size that fits.

    The whole batch in one piece stands apart: it has no gradients beside the activations, so it may need less than its
    half. It is tried when the line through the parts says so, and not before: on CPU, a try that is much too large ends
    the process.
    """
    parts = part_sizes(num_samples, step.accumulator.smallest_micro_batch)
    best, failure = num_samples, None
    if parts:
        try:
            best, _ = largest_that_fits(parts, peak_of, budget_bytes)
        except BudgetError as error:
            failure = error
        gradient_bytes = sum(p.numel() * p.element_size() for p in step.named_parameters().values())
        if _EXPECTED_LESS * _expected(peaks, num_samples) - gradient_bytes > budget_bytes:
            if failure is not None:
                raise failure
            return best
    if peak_of(num_samples) <= budget_bytes:
        return num_samples
    if parts and failure is None:
        return best
    raise failure or _nothing_fits(num_samples, peaks[num_samples], budget_bytes)


def _expected(peaks: dict[int, float], size: int) -> float:
    """What the line through the two largest sizes says; what one size needs, when that is all there is."""
    known = sorted((n, peak) for n, peak in peaks.items() if math.isfinite(peak))[-2:]
    if not known:
        return math.inf
    slope = (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0]) if len(known) == 2 else 0.0
    return known[-1][1] + slope * (size - known[-1][0])


def check_can_be_cut(step: Step, batch: Any) -> None:
    """Raise ``OptionError`` when the micro-batch size is not ours to choose."""
    if isinstance(batch, LogicalBatch) or step.options.split is not None:
        raise OptionError(
            "A batch that is cut already has its micro-batch size, so there is none to choose. Leave memory_budget out."
        )


def check_size(step: Step, batch: Any) -> None:
    """Raise ``BatchError`` for a batch that is larger than a batch may be, before anything is tried."""
    check_can_be_cut(step, batch)
    step.accumulator.check_size(num_samples_of(batch, step.options))


def may_fit_more(plan: Plan, step: Step, batch: Any) -> bool:
    """Whether the plan says "all of the batch" of a batch that was smaller than this one."""
    if plan.accumulation_steps != 1 or step.wanted_micro_batch_size is not None:
        return False
    check_can_be_cut(step, batch)
    return num_samples_of(batch, step.options) > plan.micro_batch_size


def peak_or_infinite(step: Step, batch: Any, micro_batch_size: int) -> float:
    """What ``measure`` says; infinite when it runs out of memory."""
    try:
        return measure(step, batch, micro_batch_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Out of the except block: the traceback holds the activations of the failed try.
    release()
    return math.inf


def measure(step: Step, batch: Any, micro_batch_size: int | None) -> int:
    """Peak bytes of a steady step; see ``Step.measure``.

    Two micro-batches are run: the first, and the one with most bytes of the others, which has the gradients of the
    first beside it; or all of them, where BatchNorm layers need them at once. A steady step has its optimizer state
    from the beginning, so that is made before.
    """
    accumulator = step.accumulator
    held = [step.model, *step.optimizers, step.options.ema]
    with accumulator.ranks.apart(), put_back_afterwards(step), without_compiled_code(step.model):
        given, all_of_them = _to_be_run(step, batch, micro_batch_size)
        _make_optimizer_state(step, given)
        _update_average(step)  # the first update only copies
        if accumulator.device.type == "cpu":
            held += [batch.micro_batches if isinstance(batch, LogicalBatch) else batch, all_of_them, given.whole]
        buckets = buckets_of(step.model, num_ranks=_num_ranks(step), reduce=step.options.reduce)
        counting = count_peak_bytes(accumulator.device, track=held, resized=accumulator.ranks.reducer.is_sharded)
        # Summing gradients over ranks would make copies, which a rank by itself does not.
        copies = partial(torch.empty, buckets.moment_bytes, dtype=torch.uint8, device=accumulator.device)
        with counting as meter, after_last_backward(step, copies):
            result = step.attempt(given, None, step.named_parameters())
            if result.skipped:  # the optimizer did not run, but its temporaries belong to a steady step
                step_with_zeros(step)
            _update_average(step)
    # Made in C++, they are seen by allocators alone.
    return meter.peak_bytes + (buckets.held_bytes if accumulator.device.type == "cpu" else 0)


def _num_ranks(step: Step) -> int:
    group = step.accumulator.ranks.group
    return 1 if group is None else group.size()


def _to_be_run(step: Step, batch: Any, micro_batch_size: int | None) -> tuple[LogicalBatch, list[Any]]:
    """The micro-batches that are run, and all of them. A loss of the whole batch needs all."""
    if isinstance(batch, LogicalBatch) and not isinstance(batch.micro_batches, Sequence):
        raise OptionError("A LogicalBatch of an iterator is used up by measuring it. Measure one made of a list.")
    pieces = list(step.accumulator.cut(batch, micro_batch_size).pieces)
    all_of_them = [piece.micro_batch for piece in pieces]
    if step.accumulator.two_passes is not None:
        return LogicalBatch(all_of_them, whole=whole_of(batch, pieces, step.options)), all_of_them
    if step.accumulator.pools_statistics:  # their graphs are there together
        return LogicalBatch(all_of_them), all_of_them
    # One without weight is not backpropagated, and needs less.
    counting = [piece.micro_batch for piece in pieces if any(piece.weights.values())]
    rest = sorted(counting[1:], key=_num_bytes, reverse=True)
    return LogicalBatch(counting[:1] + rest[:1]), all_of_them


def _make_optimizer_state(step: Step, given: LogicalBatch) -> None:
    if all(optimizer.state for optimizer in step.optimizers):
        return
    first = next(iter(given.micro_batches))
    if step.attempt(LogicalBatch([first]), None, step.named_parameters()).skipped:
        step_with_zeros(step)
    step.clear()


def _update_average(step: Step) -> None:
    """Let the average take in the weights, if it is one that can be put back: a module."""
    if isinstance(step.options.ema, torch.nn.Module):
        step.update_average()


def _num_bytes(micro_batch: Any) -> int:
    return sum(value.nbytes for value in leaves(micro_batch) if is_array(value))
