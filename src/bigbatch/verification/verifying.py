"""Whether a batch that is cut has the gradient of the whole batch, tried in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bigbatch.batch.sizes import sizes_without_rest_of_one, smallest_without_single
from bigbatch.errors import ArgumentError, BatchError, BigBatchError, OptionError
from bigbatch.stepping.checks import check_loss_fn, check_model, num_ranks
from bigbatch.stepping.cosine import cosine
from bigbatch.stepping.generators import Generators
from bigbatch.stepping.normalization import batchnorm
from bigbatch.stepping.placing import is_of_a_single_value
from bigbatch.values import StepOptions, check_positive
from bigbatch.verification import reasons
from bigbatch.verification.comparison import MAX_DIFFERENCE, Comparison, DType, relative_differences
from bigbatch.verification.runs import Found, Runs, check_can_be_run_at_once, untouched


def verify(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    micro_batch_size: int | None = None,
    dtype: DType = "float64",
    **step_options: Any,
) -> Comparison:
    r"""Compare the gradient of a batch that is cut with that of the whole batch at once, and say why they differ.

    Everything runs on a private copy of the model in ``dtype``, without dropout; with ``dropout="per-sample"`` a second
    time with it, and with the same masks. In float64 rounding is about 1e-15, so what is left is a mistake: a loss that
    is a mean over other things than was said, a loss or a layer that looks across samples, something that changes from
    call to call. The whole batch is run by ``loss_fn`` and autograd alone, and the cut by ``accumulate``. Model,
    ``.grad``, buffers, flags and random numbers stay as they are.

    In a process group each rank compares its own share with itself, and talks to nobody: call it on any of them.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> batch = torch.randn(10, 3), torch.randn(10, 1)
    >>> verify(model, lambda m, b: (m(b[0]) - b[1]).square().mean(), batch).equal
    True
    >>> print(verify(model, lambda m, b: (m(b[0]) - b[1]).square().sum(), batch).findings[0][-48:])
    but was weighed by samples: return bb.Sum(loss).

    Args:
        model: As it is trained: its layers are run in the mode that they are in.
        loss_fn: As for ``accumulate``.
        batch: The whole batch, with two samples or more; a small one will do.
        micro_batch_size: Of the cut. None: an uneven cut in two, and micro-batches of one sample (of two or
            more where BatchNorm needs them).
        dtype: ``"float64"``, or ``"float32"`` for code that cannot run in float64, where less can be told.
        step_options: Those of ``StepOptions``; what a step does after the gradient has no effect.

    Raises:
        ArgumentError: The model cannot be copied, or an argument is of the wrong kind.
        BatchError: The batch cannot be cut, or has less than two samples.
        LossError: What ``loss_fn`` returned is no loss, or it reaches no parameter of the model.
        OptionError: An option has a value that it cannot have.
        DistributedError: The weights are spread over the ranks.
    """
    check_model(model)
    check_loss_fn(loss_fn)
    check_can_be_run_at_once(batch)
    if dtype not in MAX_DIFFERENCE:
        raise OptionError(f"dtype={dtype!r}; it is one of {', '.join(map(repr, MAX_DIFFERENCE))}.")
    if micro_batch_size is not None:
        check_positive("micro_batch_size", micro_batch_size)
    options = StepOptions.of(step_options)
    with untouched(model):
        runs = _private(model, loss_fn, batch, options, getattr(torch, dtype))
        whole = _whole(runs, dtype)
        sizes = _sizes(runs, micro_batch_size)
        try:
            found = _compared(runs, whole, sizes, dtype, options)
        except BatchError as error:  # F.batch_norm in a forward has refused micro-batches of one
            if micro_batch_size is not None or not is_of_a_single_value(error.__cause__):
                raise
            sizes = _without_single(runs, sizes)
            found = _compared(runs, whole, sizes, dtype, options)
        if options.dropout == "per-sample":
            with_masks = _private(model, loss_fn, batch, options, getattr(torch, dtype), with_masks=True)
            return _with_masks(found, with_masks, sizes, dtype)
        return found


def _private(
    model: nn.Module, loss_fn: Any, batch: Any, options: StepOptions, dtype: torch.dtype, *, with_masks: bool = False
) -> Runs:
    try:
        return Runs(model, loss_fn, batch, options, dtype, with_masks=with_masks)
    except BigBatchError:
        raise
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ArgumentError(
            f"The model cannot be copied in {dtype}: {error}. verify needs a private copy: make it so that "
            f"copy.deepcopy(model) works."
        ) from error


def _whole(runs: Runs, dtype: str) -> Found:
    try:
        return runs.whole()
    except BigBatchError:
        raise
    except Exception as error:
        error.add_note(
            f"In the whole batch at once, which bb.verify runs in {dtype} on a copy of the model"
            + ('; code that needs float32 is verified with dtype="float32".' if dtype == "float64" else ".")
        )
        raise


def _sizes(runs: Runs, micro_batch_size: int | None) -> list[int]:
    """Sizes of the micro-batches of the cuts that are tried."""
    num_samples = runs.num_samples
    if num_samples == 0 and micro_batch_size is None:
        raise BatchError("The samples of the batch cannot be counted; give micro_batch_size=.")
    if num_samples == 1:
        raise BatchError("The batch has 1 sample, which cannot be cut; give at least 2.")
    if micro_batch_size is not None:
        if num_samples and micro_batch_size >= num_samples:
            raise OptionError(
                f"micro_batch_size={micro_batch_size} cuts nothing: the batch has {num_samples} samples. Give less."
            )
        return [micro_batch_size]
    smallest = smallest_without_single(num_samples) if _sees_statistics(runs) else 1
    sizes = [size for size in dict.fromkeys([max(num_samples // 2 + 1, smallest), smallest]) if size < num_samples]
    return _checked(sizes, num_samples)


def _checked(sizes: list[int], num_samples: int) -> list[int]:
    if not sizes:
        raise BatchError(
            f"The batch has {num_samples} samples, which cannot be cut into micro-batches of 2 or more, as BatchNorm "
            f"needs them; give at least 4."
        )
    return sizes


def _without_single(runs: Runs, sizes: Sequence[int]) -> list[int]:
    """The cuts nearest to those of these sizes that have no micro-batch of one sample."""
    several = list(sizes_without_rest_of_one(runs.num_samples))
    return _checked([size for size in dict.fromkeys([sizes[0], *several[:1]]) if size in several], runs.num_samples)


def _sees_statistics(runs: Runs) -> bool:
    policy = runs.options.batch_norm
    return any(batchnorm.uses_batch_statistics(layer, policy) for layer in batchnorm.layers_of(runs.model))


def _compared(runs: Runs, whole: Found, sizes: Sequence[int], dtype: DType, options: StepOptions) -> Comparison:
    rng = Generators(next((p.device for p in runs.model.parameters()), torch.device("cpu")))
    again = _distance([runs.whole()], whole, dtype)
    drew_random_numbers = rng.were_used()
    cuts = [runs.cut(size) for size in sizes]
    found = dataclasses.replace(_distance(cuts, whole, dtype), deterministic=again.equal)
    notes = _notes(runs, options)
    if not math.isfinite(whole.loss):
        findings = [f"The loss of the whole batch is {whole.loss}, so there is no gradient to compare with."]
    elif not again.equal:
        findings = [reasons.not_deterministic(max(again.worst[1], again.loss_difference), drew_random_numbers)]
    else:
        unequal = [size for size, cut in zip(sizes, cuts, strict=True) if not _distance([cut], whole, dtype).equal]
        findings = [*_findings(runs, found, unequal), *reasons.layers_without_gradient(whole)]
    return dataclasses.replace(found, findings=tuple(findings), notes=notes)


def _with_masks(without: Comparison, runs: Runs, sizes: Sequence[int], dtype: DType) -> Comparison:
    """What was found without dropout, and the same with the masks of a step: the worse of the two."""
    found = _distance([runs.cut(size) for size in sizes], _whole(runs, dtype), dtype)
    worst = {name: max(found.differences[name], value) for name, value in without.differences.items()}
    findings = without.findings
    if without.equal and not found.equal:
        findings = (*findings, _MASKS_DIFFER)
    return dataclasses.replace(
        without,
        differences=dict(sorted(worst.items(), key=lambda item: -item[1])),
        loss_difference=max(found.loss_difference, without.loss_difference),
        cosine=min(found.cosine, without.cosine),
        findings=findings,
        notes=tuple(note for note in without.notes if note != _DROPOUT_IS_OFF),
    )


_MASKS_DIFFER = (
    "With dropout, a cut is not the whole batch: the samples of some tensor are not in dimension 0 one after another, "
    'or the forward drops in another order in another cut. Bring the samples there, or give dropout="native".'
)
_RANKS_ARE_APART = (
    "This rank has compared a cut of its own share with the whole of it. What the ranks make together is not compared."
)
_DROPOUT_IS_OFF = (
    "Dropout was switched off on the copy: in a step, micro-batches draw other masks than the whole batch "
    'would, from the same distribution. With dropout="per-sample" they have the same, and are compared too.'
)


def _distance(cuts: Sequence[Found], whole: Found, dtype: DType) -> Comparison:
    per_cut = [relative_differences(cut.gradients, whole.gradients) for cut in cuts]
    worst = {name: max(differences[name] for differences in per_cut) for name in whole.gradients}
    losses = [abs(cut.loss - whole.loss) / max(abs(whole.loss), 1.0) for cut in cuts]
    return Comparison(
        dict(sorted(worst.items(), key=lambda item: -item[1])),
        max(loss if math.isfinite(loss) else math.inf for loss in losses),
        tuple(cut.sizes for cut in cuts),
        dtype,
        cosine=min(cosine(cut.gradients, whole.gradients) for cut in cuts),
    )


def _findings(runs: Runs, found: Comparison, unequal: Sequence[int]) -> list[str]:
    """Why these cuts are not the whole batch."""
    layers = reasons.batch_norms(runs, found)
    if not unequal or (layers and not reasons.can_be_frozen(runs)):
        return layers
    policy = None
    if layers:
        # What is wrong beside BatchNorm shows when the layers use their running statistics.
        policy = "frozen"
        whole = runs.whole(batch_norm=policy)
        cuts = {size: runs.cut(size, batch_norm=policy) for size in unequal}
        unequal = [size for size, cut in cuts.items() if not _distance([cut], whole, found.dtype).equal]  # pyright: ignore
        if not unequal:
            return layers
    functions = reasons.batch_norm_functions(runs, policy)
    if functions:  # what is wrong beside them does not show, for they cannot be frozen
        return [*layers, *functions]
    return [*layers, *reasons.terms_that_do_not_add_up(runs, unequal, found, policy)]


def _notes(runs: Runs, options: StepOptions) -> tuple[str, ...]:
    notes = []
    if num_ranks() > 1:
        notes.append(_RANKS_ARE_APART)
    if runs.dropouts or runs.drops_in_functions:
        notes.append(_DROPOUT_IS_OFF)
    if options.precision not in ("fp32", torch.float32):
        named = options.precision if isinstance(options.precision, str | torch.dtype) else "fp16"
        notes.append(f"precision={named} was left out: rounding in 16 bits would hide what is compared.")
    return tuple(notes)
