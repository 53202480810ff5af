"""The weight of a micro-batch: what its mean loss was divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bigbatch.batch.structure import children, joined
from bigbatch.errors import BatchError, LossError, OptionError

IGNORED = -100
"""The label that ``cross_entropy`` and the field leave out of the mean."""

Weights = dict[str | None, float]
"""Weight of a micro-batch by term of the loss; None is the key of every term that has no weight of its own."""

_Weigh = Callable[[Any, int], Any]


class Weigher:
    """Weighs micro-batches as the option ``weight`` says.

    Args:
        weight: See ``StepOptions``.

    Raises:
        OptionError: It is none of the weights there are.
    """

    def __init__(self, weight: Any):
        by_term = weight if isinstance(weight, Mapping) else {None: weight}
        if not by_term:
            raise OptionError("weight={} names no term; give a weight for each term of the loss.")
        self.by_term: dict[str | None, _Weigh] = {term: _weigh(term, spec) for term, spec in by_term.items()}
        self.counts_samples = all(spec in (None, "samples") for spec in by_term.values())
        self.is_default = weight is None
        self.has_callable = any(callable(spec) for spec in by_term.values())

    def weigh(self, micro_batches: Sequence[tuple[Any, int]]) -> list[Weights]:
        """Weights of micro-batches, given with their numbers of samples.

        Raises:
            LossError: A weight is negative, not finite, or no number.
            BatchError: ``"tokens"`` finds no leaf named ``labels``, or several.
        """
        if self.counts_samples:  # needs no look at the micro-batches
            return [dict.fromkeys(self.by_term, n) for _, n in micro_batches]
        found = [[weigh(micro_batch, n) for weigh in self.by_term.values()] for micro_batch, n in micro_batches]
        return [
            {term: _checked(number, term) for term, number in zip(self.by_term, row, strict=True)}
            for row in _on_host(found)
        ]


def _weigh(term: str | None, spec: Any) -> _Weigh:
    if spec is None or spec == "samples":
        return lambda micro_batch, num_samples: num_samples
    if spec == "tokens":
        return lambda micro_batch, num_samples: (labels_of(micro_batch) != IGNORED).sum()
    if spec == "next_tokens":
        return lambda micro_batch, num_samples: (_next_labels_of(micro_batch) != IGNORED).sum()
    if callable(spec):
        return lambda micro_batch, num_samples: spec(micro_batch)
    raise OptionError(
        f'weight{for_term(term)} is {spec!r}; it is "samples", "tokens", "next_tokens", a function weight(micro_batch) '
        f"or a dict with one of these for each term of the loss."
    )


def _on_host(rows: list[list[Any]]) -> list[list[Any]]:
    """The same rows with tensors read, all in one go: each separate read would make the host wait for the device."""
    tensors = [number for row in rows for number in row if isinstance(number, torch.Tensor)]
    for tensor in tensors:
        if tensor.numel() != 1 or tensor.is_complex():
            what = str(tensor) if tensor.numel() == 1 else f"a tensor of shape {tuple(tensor.shape)}"
            raise LossError(f"weight returned {what}; it is one number per micro-batch.")
    if not tensors:
        return rows
    read = iter(torch.stack([tensor.detach().reshape(()).double() for tensor in tensors]).tolist())
    return [[next(read) if isinstance(number, torch.Tensor) else number for number in row] for row in rows]


def _checked(number: Any, term: str | None) -> float:
    return checked_weight(number, f"weight returned {{}}{for_term(term)}")


def for_term(term: str | None) -> str:
    """Which weight it is, for a message; nothing when there is one for all terms."""
    return "" if term is None else f" for the term {term!r}"


def checked_weight(number: Any, found: str) -> float:
    """The number as a weight.

    Args:
        number: What should be one.
        found: What to say of it, with braces in the place of the number.

    Raises:
        LossError: It is no number, negative or not finite.
    """
    try:
        weight = number if type(number) in (int, float) else float(number)
    except (TypeError, ValueError):
        weight = None
    if weight is None or isinstance(number, str):
        kind = f"{number!r} ({type(number).__name__})"
        raise LossError(f"{found.format(kind)}; it is one number per micro-batch.")
    if not math.isfinite(weight) or weight < 0:
        raise LossError(f"{found.format(weight)}; a weight is finite and not negative.")
    return weight


def labels_of(micro_batch: Any) -> torch.Tensor:
    """The one leaf named ``labels``, shape ``(N, ...)``.

    Raises:
        BatchError: There is none, or there are several.
    """
    found = _labels(micro_batch, "")
    if len(found) != 1 or not isinstance(next(iter(found.values())), torch.Tensor):
        raise BatchError(
            f'weight="tokens" and "next_tokens" count the entries that are not {IGNORED} in the one tensor named '
            f"'labels', but the batch has {_kinds(found)}. Name the targets 'labels' in a dict, namedtuple "
            f"or dataclass, or give a function: weight=lambda micro_batch: (micro_batch[1] != {IGNORED}).sum()."
        )
    return next(iter(found.values()))


def _kinds(found: dict[str, Any]) -> str:
    if len(found) == 1:
        return ", ".join(f"{path!r}, a {type(value).__name__}" for path, value in found.items())
    return str(sorted(found)) if found else "none"


def _next_labels_of(micro_batch: Any) -> torch.Tensor:
    labels = labels_of(micro_batch)
    if labels.dim() < 2:
        raise BatchError(
            f'weight="next_tokens" counts labels[:, 1:], but labels has shape {tuple(labels.shape)}; it is (samples, '
            f'tokens). For labels that are not shifted inside the model write weight="tokens".'
        )
    return labels[:, 1:]


def _labels(value: Any, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, inner in (None if isinstance(value, torch.Tensor) else children(value)) or ():
        if name == "labels":
            found[joined(path, name)] = inner
        else:
            found.update(_labels(inner, joined(path, name)))
    return found


def has_ignored_labels(micro_batch: Any) -> bool:
    """Whether a tensor of whole numbers on the host holds -100, whatever it is called."""
    if not isinstance(micro_batch, torch.Tensor):
        return any(has_ignored_labels(inner) for _, inner in children(micro_batch) or ())
    whole = not micro_batch.is_floating_point() and not micro_batch.is_complex()
    return whole and micro_batch.device.type == "cpu" and bool((micro_batch == IGNORED).any())
