"""What a loss function may return: means, ratios, sums and constants, alone or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from bigbatch.errors import LossError

Kind = Literal["mean", "ratio", "sum", "constant"]


@dataclass(frozen=True)
class Ratio:
    """A sum over the micro-batch divided by a sum over the micro-batch, such as a class-weighted cross-entropy.

    The loss of the batch is the sum of the numerators over the sum of the denominators; the denominators need not be
    known before the forward.

    Attributes:
        numerator: Shape ``()``, with a gradient.
        denominator: Shape ``()`` or a number; not negative, and without a gradient.
    """

    numerator: torch.Tensor
    denominator: torch.Tensor | float


@dataclass(frozen=True)
class Sum:
    """A sum over the micro-batch that is divided by nothing: the loss of the batch is the sum of all.

    Attributes:
        term: Shape ``()``.
    """

    term: torch.Tensor


@dataclass(frozen=True)
class Constant:
    """A term that does not depend on the samples, such as a weight penalty: it counts once in a step.

    Attributes:
        term: Shape ``()``.
    """

    term: torch.Tensor


class Term(NamedTuple):
    """One term of a loss.

    Attributes:
        name: Its key in a dict, its index in a tuple, or ``"loss"``.
        kind: How its micro-batches are put together.
        value: The mean, the numerator, or the term; shape ``()``.
        denominator: Of a ratio.
    """

    name: str
    kind: Kind
    value: torch.Tensor
    denominator: torch.Tensor | float = 1.0


def terms_of(returned: Any) -> list[Term]:
    """The terms of what a loss function returned.

    Raises:
        LossError: Something in it is no loss; the message says what and what to return.
    """
    if isinstance(returned, torch.Tensor):  # by far the most frequent, so it is asked first
        return [Term("loss", "mean", _scalar("loss", returned))]
    if isinstance(returned, Mapping) and hasattr(returned, "loss"):
        raise LossError(f"loss_fn returned a {type(returned).__name__}. It has .loss: return that.")
    if isinstance(returned, Mapping):
        named = [(str(name), value) for name, value in returned.items()]
    elif isinstance(returned, tuple | list):
        named = [(str(i), value) for i, value in enumerate(returned)]
    else:
        named = [("loss", returned)]
    if not named:
        raise LossError("loss_fn returned no term; return a 0-d tensor, or a dict or tuple with at least one.")
    return [_term(name, value) for name, value in named]


def value_of(term: Term) -> torch.Tensor:
    """The term as a loss by itself, shape ``()``, as it is when there are no other micro-batches."""
    return term.value / term.denominator if term.kind == "ratio" else term.value


def plain_loss(returned: Any) -> torch.Tensor:
    """The loss as one tensor, from what a ``loss_fn`` returned for the whole batch.

    Raises:
        LossError: Something in it is no loss.
    """
    values = [value_of(term) for term in terms_of(returned)]
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _term(name: str, value: Any) -> Term:
    if isinstance(value, torch.Tensor):
        return Term(name, "mean", _scalar(name, value))
    if isinstance(value, Ratio):
        return Term(name, "ratio", _scalar(name, value.numerator), _denominator(name, value.denominator))
    if isinstance(value, Sum):
        return Term(name, "sum", _scalar(name, value.term))
    if isinstance(value, Constant):
        return Term(name, "constant", _scalar(name, value.term))
    raise LossError(
        f"loss_fn returned a {type(value).__name__} for the term {name!r}{_looks_like_a_model_output(value)}; return "
        f"a 0-d tensor (a mean), Ratio(numerator, denominator), Sum(term), Constant(term), or a dict or tuple of these."
    )


def _looks_like_a_model_output(value: Any) -> str:
    return ". It has .loss: return that" if hasattr(value, "loss") else ""


def _scalar(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise LossError(f"The term {name!r} of the loss is a {type(value).__name__}, {value!r}; it is a 0-d tensor.")
    if value.dim() != 0:
        raise LossError(
            f"The term {name!r} of the loss has shape {tuple(value.shape)}; a loss is a 0-d tensor. "
            f"Write .mean() for the mean over the samples, or Sum(loss.sum()) for their sum."
        )
    if not value.is_floating_point():
        raise LossError(
            f"The term {name!r} of the loss has dtype {value.dtype}; it is a real floating point number. A count has "
            f"no gradient: return the loss that was to be minimised."
        )
    return value


def _denominator(name: str, denominator: Any) -> torch.Tensor | float:
    if isinstance(denominator, torch.Tensor):
        if denominator.requires_grad:
            raise LossError(
                f"The denominator of the term {name!r} needs a gradient, so the loss is not a sum over micro-batches. "
                "Take denominator.detach() if it is a count; where the gradient must flow through it, give "
                "loss_fn=bb.WholeBatchLoss(forward, loss)."
            )
        if denominator.dim() != 0:
            raise LossError(f"The denominator of the term {name!r} has shape {tuple(denominator.shape)}, not ().")
        if denominator.is_complex():
            raise LossError(f"The denominator of the term {name!r} is {denominator}; it is a real number.")
        return denominator
    if isinstance(denominator, bool) or not isinstance(denominator, int | float):
        raise LossError(f"The denominator of the term {name!r} is {denominator!r}; it is a number or a 0-d tensor.")
    return float(denominator)
