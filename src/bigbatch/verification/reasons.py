"""Why a cut does not give the gradient of the whole batch, in words, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from bigbatch.batch.structure import leaves
from bigbatch.stepping.coupled.outputs import joined_leaves, opened, shown
from bigbatch.stepping.exactness import EXACT_WITH_WHOLE_BATCH_LOSS
from bigbatch.stepping.losses import Sum
from bigbatch.stepping.normalization import batchnorm
from bigbatch.units import format_names
from bigbatch.verification.adding_up import Parts, candidates, parts_of
from bigbatch.verification.comparison import MAX_DIFFERENCE, Comparison, relative_differences
from bigbatch.verification.copying import inside
from bigbatch.verification.functional import BatchNormCalls
from bigbatch.verification.runs import Found, Runs

_MOST_ENTRIES = 50_000_000
"""Of all gradients of micro-batches that are kept at once to look for weights."""


def layers_without_gradient(whole: Found) -> list[str]:
    """A finding about the parameters that the loss does not reach, if there are any."""
    unreached = [name for name, gradient in whole.gradients.items() if gradient is None]
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in unreached))
    if not layers:
        return []
    return [
        f"{_layers(layers)} never {_s('get', layers)} a gradient from this batch: something between "
        f"them and the loss runs under torch.no_grad() or .detach(), or the loss does not use them. Freeze them with "
        f"requires_grad_(False) if that is meant."
    ]


def not_deterministic(difference: float, drew_random_numbers: bool) -> str:
    """The finding that two runs of the same batch differ."""
    why = (
        "random numbers other than dropout are drawn in the forward or the loss, and micro-batches draw others than "
        "the whole batch. Draw them before, into the batch"
        if drew_random_numbers
        else "the loss or the model changes from call to call (a counter, a schedule, a state of its own). Let it "
        "depend on the model and the batch alone"
    )
    return f"The loss is not deterministic: the whole batch gave gradients {difference:.1e} apart in two runs: {why}."


def batch_norms(runs: Runs, comparison: Comparison) -> list[str]:
    """A finding about the layers that normalise by the micro-batch they get, if there are any."""
    policy = runs.options.batch_norm
    named = inside(runs.model).named_modules()
    found = {
        name: layer
        for name, layer in named
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and batchnorm.uses_batch_statistics(layer, policy)
    }
    if not found or policy == "exact":
        return []
    text = (
        f"BatchNorm: {_layers(list(found))} {_s('see', found)} the statistics of each micro-batch, and not of "
        f"the whole batch. So the gradient has a cosine of {comparison.cosine:.3f} to that of the whole batch, and a "
        f"parameter is up to {comparison.worst[1]:.1e} off. "
    )
    text += (
        EXACT_WITH_WHOLE_BATCH_LOSS
        if runs.is_of_whole_batch
        else f'Take GroupNorm, give batch_norm="exact" or batch_norm="frozen", or {_at_once(runs)}.'
    )
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in found.values()):
        text += " SyncBatchNorm joins ranks, not micro-batches."
    return [text]


def batch_norm_functions(runs: Runs, batch_norm: str | None) -> list[str]:
    """A finding about forwards that normalise by the micro-batch in a function, if there are any.

    Args:
        runs: Of which some cut was not equal.
        batch_norm: The policy to run with.
    """
    with BatchNormCalls(inside(runs.model)) as calls:
        runs.forward(batch_norm=batch_norm)
    if not calls.callers:
        return []
    return [
        f"F.batch_norm in {' and in '.join(_forward_of(*caller) for caller in calls.callers.items())} sees the "
        f"statistics of each micro-batch, and not of the whole batch; batch_norm= has no effect on it, since it is no "
        f'layer. Write nn.BatchNorm layers and give batch_norm="exact", take another normalisation, such as '
        f"GroupNorm, or {_at_once(runs)}."
    ]


def _forward_of(name: str | None, module: nn.Module | None) -> str:
    if name is None:
        return "the loss"
    return f"the forward of {f'{name!r}, a ' if name else ''}{type(module).__name__}{',' if name else ''}"


def can_be_frozen(runs: Runs) -> bool:
    """Whether all BatchNorm layers have running statistics to use."""
    return all(layer.running_mean is not None for layer in batchnorm.layers_of(runs.model))


def terms_that_do_not_add_up(
    runs: Runs, cuts: Sequence[int], comparison: Comparison, batch_norm: str | None
) -> list[str]:
    """Findings about each term of the loss.

    Args:
        runs: Of which some cut was not equal.
        cuts: Sizes of micro-batches of cuts that were not equal; a cut in two is tried before them.
        comparison: With what was measured.
        batch_norm: The policy to run with.
    """
    tolerance = 100 * MAX_DIFFERENCE[comparison.dtype]
    if runs.is_of_whole_batch:
        return [_outputs_that_depend_on_the_cut(runs, cuts[0], tolerance, batch_norm)]
    for size in dict.fromkeys([*_in_two(runs), *cuts]):
        if runs.num_entries * -(-runs.num_samples // size) > _MOST_ENTRIES:
            continue
        parts = parts_of(runs, size, batch_norm, tolerance)
        wrong = {name: part for name, part in parts.items() if not part.is_given_by(part.declared())}
        if wrong:
            alone = len(parts) == 1
            return [_reason(runs, size, name, part, alone, batch_norm) for name, part in wrong.items()]
    return [
        "The cut is not the whole batch, but cut in two each term of the loss adds up. Try another micro_batch_size."
    ]


def _reason(runs: Runs, size: int, name: str, part: Parts, alone: bool, batch_norm: str | None) -> str:
    shown = "The loss" if alone else f"The term {name!r} of the loss"
    for words, written, weights in candidates(runs, size):
        if part.is_given_by(weights):
            given = written if alone else f'{{"{name}": {written}}}'
            return f"{shown} is a mean over {words}, but {_declared(runs, part)}: give weight={given}."
    added, together = part.denominators()
    if part.kind == "ratio" and abs(added - together) > part.tolerance * abs(together):
        return (
            f"{shown} is a bb.Ratio whose denominators do not add up: those of the micro-batches are {added:g} "
            f"together, that of the whole batch is {together:g}. Return a plain sum or count as the denominator, and "
            f"no mean, clamp or constant."
        )
    if part.is_given_by([1.0] * len(part.pieces)):
        return (
            f"{shown} is a sum over the samples, or divides by a fixed number itself (the number of micro-batches, the "
            f"size of the whole batch), but {_declared(runs, part)}: return bb.Sum(loss)."
        )
    if _is_counted_each_time(runs, name, part, batch_norm):
        return (
            f"{shown} has a part that does not depend on the samples, such as a weight penalty, and that is counted "
            f"once for each micro-batch: return that part by itself, as bb.Constant(penalty)."
        )
    weights = part.solved()
    if weights is not None or not part.can_be_solved:
        return _over_something_else(runs, shown, part, weights)
    layer = first_layer_across_samples(runs, part.pieces[0].micro_batch, part.tolerance, batch_norm)
    if layer is not None:
        return _coupled_by(runs, layer)
    return (
        f"{shown} couples samples: it compares or pools them (contrastive, pairwise, Dice, a root of a mean), so no "
        f"weights of the micro-batches make it up: give {_WHOLE_BATCH_LOSS}. If it adds up means over different "
        f"things, return them by name in a dict, each with its weight."
    )


_WHOLE_BATCH_LOSS = (
    "loss_fn=bb.WholeBatchLoss(forward, loss), where forward(model, micro_batch) returns what the loss looks at and "
    "loss(outputs, batch) sees that of all samples (docs/whole-batch.md)"
)


def _coupled_by(runs: Runs, layer: str) -> str:
    return (
        f"The model couples samples: {layer} gives a sample other outputs when it comes in another micro-batch. "
        f"Such a model cannot be cut: {_at_once(runs)}."
    )


def _outputs_that_depend_on_the_cut(runs: Runs, size: int, tolerance: float, batch_norm: str | None) -> str:
    """Why a ``WholeBatchLoss`` is not that of the whole batch."""
    pieces = runs.pieces(size, runs.options.weight)
    layer = first_layer_across_samples(runs, pieces[0].micro_batch, tolerance, batch_norm)
    if layer is not None:
        return _coupled_by(runs, layer)
    together = runs.outputs(batch_norm=batch_norm)
    added = joined_leaves([runs.outputs(piece.micro_batch, batch_norm=batch_norm) for piece in pieces])
    for (path, whole), leaf in zip(together, added, strict=True):
        tensor = opened(whole)
        if isinstance(tensor, torch.Tensor) and relative_differences({"": leaf}, {"": tensor})[""] > tolerance:
            if isinstance(whole, Sum):
                return (
                    f"{shown(path)} of forward is a bb.Sum, but those of the micro-batches do not add up to that of "
                    f"the whole batch: return a plain sum, and no mean, maximum or root."
                )
            return (
                f"{shown(path)} of forward has rows that depend on the samples beside them: let forward do what is "
                f"done sample by sample, and loss what looks across samples."
            )
    return (
        "The outputs of forward are the same in any cut, but their gradients are not: something in forward is not the "
        "same when it runs a second time (a counter, a cache, a generator of its own), or has a backward of its own "
        "that looks across samples."
    )


def _over_something_else(runs: Runs, shown: str, part: Parts, weights: list[float] | None) -> str:
    if weights is None:
        return (
            f"{shown} is no mean over samples or tokens, and no sum, but {_declared(runs, part)}; the model has too "
            f"few parameters to tell more. Return bb.Ratio(numerator, denominator) if it is a mean over something "
            f"else; if it compares or pools samples, give {_WHOLE_BATCH_LOSS}."
        )
    sizes = f"of {', '.join(str(piece.num_samples) for piece in part.pieces)} samples " if runs.num_samples else ""
    counts = ", ".join(f"{weight:.3g}" for weight in weights)
    return (
        f"{shown} is a mean over something that is neither samples nor tokens (micro-batches {sizes}"
        f"count {counts}), but {_declared(runs, part)}: return bb.Ratio(numerator, denominator), or give a "
        f"function as weight."
    )


def _is_counted_each_time(runs: Runs, name: str, part: Parts, batch_norm: str | None) -> bool:
    """Whether what is too much grows with the number of micro-batches less one, as what is in each of them does."""
    if runs.num_samples < 3:
        return False
    size = -(-runs.num_samples // 3)
    other = parts_of(runs, size, batch_norm, part.tolerance)[name]
    times = len(other.pieces) - 1
    first, second = part.excess(part.declared()) / (len(part.pieces) - 1), other.excess(other.declared())
    difference = float((second - times * first).norm())
    return times > len(part.pieces) - 1 and difference <= part.tolerance * float(second.norm())


def _declared(runs: Runs, part: Parts) -> str:
    """What the term was taken for."""
    weight = runs.options.weight
    if part.kind == "mean":
        by = weight if isinstance(weight, str) else "samples" if weight is None else "the weight= that was given"
        return f"was weighed by {by}"
    return f"was returned as a bb.{part.kind.capitalize()}"


def _in_two(runs: Runs) -> list[int]:
    """The size of an uneven cut into two, where there are enough samples for one, and they can be counted."""
    return [min(runs.num_samples // 2 + 1, runs.num_samples - 1)] if runs.num_samples else []


def _at_once(runs: Runs) -> str:
    return (
        "run the batch at once, with modules recomputed where memory is short: bb.plan(model, loss_fn, batch, "
        f"memory_budget=..., micro_batch_size={runs.num_samples or '...'})"
    )


def _s(verb: str, names: Collection[str]) -> str:
    return f"{verb}s" if len(names) == 1 else verb


def _layers(names: list[str]) -> str:
    return f"the layer{'s' if len(names) > 1 else ''} {format_names(names, most=6)}"


def first_layer_across_samples(runs: Runs, first: Any, tolerance: float, batch_norm: str | None) -> str | None:
    """The first layer whose output for the samples of the first micro-batch depends on the samples beside them."""
    model = inside(runs.model)
    alone: list[tuple[str, torch.Tensor]] = []
    with _Listening(model, lambda name, output: alone.append((name, output.clone()))):
        runs.forward(first, batch_norm=batch_norm)
    expected, different = iter(alone), []

    def compare(name: str, output: torch.Tensor) -> None:
        found = next(expected, None)
        if found is not None and found[0] == name and _differ(found[1], output, tolerance):
            different.append(name)

    with _Listening(model, compare):
        runs.forward(batch_norm=batch_norm)
    if not different:
        return None
    return f"{different[0]!r}, a {type(model.get_submodule(different[0])).__name__}," if different[0] else "it"


def _differ(alone: torch.Tensor, together: torch.Tensor, tolerance: float) -> bool:
    """Whether the first rows are others; False where rows are not those of samples."""
    if alone.dim() == 0 or alone.shape[1:] != together.shape[1:] or alone.shape[0] >= together.shape[0]:
        return False
    return relative_differences({"": together[: len(alone)]}, {"": alone})[""] > tolerance


class _Listening:
    """Within it, a function gets the name of a layer and each tensor that the layer returns."""

    def __init__(self, model: nn.Module, tell: Any):
        self._model = model
        self._tell = tell
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    self._tell(name, leaf.detach())

        return hook
