r"""Whether a loss adds up: are there weights of the micro-batches that make its gradient that of the whole batch?

With the gradient $G$ of the whole batch and $g_k$ of micro-batch $k$ alone, a loss that is a mean over something has
$G = \sum_k c_k g_k$ with $c_k$ the share of that something. So the weights that it may be declared with are tried one
after the other, and when none fits the $c_k$ are found by least squares. A loss that couples samples has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bigbatch.batch.logical import Piece
from bigbatch.batch.structure import children, joined
from bigbatch.batch.weighing import IGNORED
from bigbatch.errors import BigBatchError
from bigbatch.stepping.losses import Term
from bigbatch.verification.runs import Runs

_SPARE_ENTRIES = 2
"""Of the gradient, beside one for each weight that is solved for; with fewer, any gradient is a sum of the others."""


@dataclass(frozen=True)
class Parts:
    """A term of the loss of the whole batch, and of each micro-batch of a cut.

    Attributes:
        pieces: The micro-batches.
        terms: The term in each.
        together: The term of the whole batch.
        whole: Its gradient over the whole batch, as one vector.
        alone: Its gradient over each micro-batch alone.
        tolerance: Relative to the gradient: what is up to it is rounding.
    """

    pieces: Sequence[Piece]
    terms: Sequence[Term]
    together: Term
    whole: torch.Tensor
    alone: Sequence[torch.Tensor]
    tolerance: float

    @property
    def kind(self) -> str:
        """Of the term."""
        return self.terms[0].kind

    def declared(self) -> list[float]:
        """What each micro-batch counts in a step."""
        if self.kind == "mean":
            key = None if None in self.pieces[0].weights else self.terms[0].name
            return shares([piece.weights[key] for piece in self.pieces])
        if self.kind == "ratio":
            return shares([float(term.denominator) for term in self.terms])
        if self.kind == "constant":
            return [1.0] + [0.0] * (len(self.pieces) - 1)
        return [1.0] * len(self.pieces)

    def excess(self, weights: Sequence[float]) -> torch.Tensor:
        """The gradient that these weights give, less the true one."""
        # A mean over nothing is NaN, and is left out of a step.
        return sum((c * g for c, g in zip(weights, self.alone, strict=True) if c), start=-self.whole)

    def is_given_by(self, weights: Sequence[float]) -> bool:
        """Whether these weights give the true gradient."""
        sizes = [abs(c) * float(g.norm()) for c, g in zip(weights, self.alone, strict=True) if c]
        # Where the parts cancel, what is left is rounding of the parts.
        scale = max(float(self.whole.norm()), 1e-3 * max(sizes, default=0.0))
        return float(self.excess(weights).norm()) <= self.tolerance * scale

    @property
    def can_be_solved(self) -> bool:
        """Whether the gradient has entries enough to tell that there are no weights."""
        return int(self._columns().abs().amax(1).count_nonzero()) >= len(self.pieces) + _SPARE_ENTRIES

    def _columns(self) -> torch.Tensor:
        """The gradients of the micro-batches side by side; zeros for a mean over nothing, which is NaN."""
        return torch.stack([g if bool(g.isfinite().all()) else torch.zeros_like(g) for g in self.alone], dim=1)

    def solved(self) -> list[float] | None:
        """The weights that give the true gradient and add up to 1; None when there are none."""
        # The driver that takes columns of zeros exists on the host only.
        weights = torch.linalg.lstsq(self._columns().cpu(), self.whole.cpu()[:, None], driver="gelsd").solution
        weights = weights[:, 0].tolist()
        # Those of a root of a mean exist too, but depend on the values and do not add up to 1.
        is_mean = abs(sum(weights) - 1) <= 1e3 * self.tolerance and min(weights) >= -self.tolerance
        return weights if is_mean and self.is_given_by([c if c > self.tolerance else 0.0 for c in weights]) else None

    def denominators(self) -> tuple[float, float]:
        """Of a ratio: those of the micro-batches added up, and that of the whole batch."""
        return sum(float(term.denominator) for term in self.terms), float(self.together.denominator)


def shares(weights: Sequence[float]) -> list[float]:
    """The weights over their sum."""
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def parts_of(runs: Runs, micro_batch_size: int, batch_norm: str | None, tolerance: float) -> dict[str, Parts]:
    """The terms of the loss by name, for a cut."""
    pieces = runs.pieces(micro_batch_size, runs.options.weight)
    whole = runs.terms(batch_norm=batch_norm)
    found = [runs.terms(piece.micro_batch, batch_norm=batch_norm) for piece in pieces]
    return {
        name: Parts(
            pieces,
            [terms[name][0] for terms in found],
            together,
            gradient,
            [terms[name][1] for terms in found],
            tolerance,
        )
        for name, (together, gradient) in whole.items()
    }


def candidates(runs: Runs, micro_batch_size: int) -> Iterator[tuple[str, str, list[float]]]:
    """Weights that a mean may have been over: in words, as it is written, and what each micro-batch counts."""
    for spec, words in (
        ("tokens", "tokens (labels that are not -100)"),
        ("next_tokens", "next tokens (labels[:, 1:] that are not -100)"),
        ("samples", "samples"),
    ):
        try:
            pieces = runs.pieces(micro_batch_size, spec)
        except BigBatchError:
            continue  # no leaf named labels
        yield words, f'"{spec}"', shares([piece.weights[None] for piece in pieces])
    plain = runs.pieces(micro_batch_size, runs.options.weight)
    ignoring = {path for piece in plain for path, leaf in _whole_numbers(piece.micro_batch) if (leaf == IGNORED).any()}
    for path in sorted(ignoring):
        for words, written, count in _COUNTS:
            counts = [float(count(dict(_whole_numbers(piece.micro_batch))[path])) for piece in plain]
            yield words, f"lambda batch: ({_indexed(path)}{written}).sum()", shares(counts)


_COUNTS = (
    ("tokens (labels that are not -100)", " != -100", lambda leaf: (leaf != IGNORED).sum()),
    (
        "next tokens (labels[:, 1:] that are not -100)",
        "[:, 1:] != -100",
        lambda leaf: (leaf[:, 1:] != IGNORED).sum() if leaf.dim() > 1 else 0,
    ),
)


def _whole_numbers(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of whole numbers in a micro-batch, by path."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() and not value.is_complex() and value.dim():
            yield path, value
        return
    for name, inner in children(value) or ():
        yield from _whole_numbers(inner, joined(path, name))


def _indexed(path: str) -> str:
    """How a leaf is written: ``batch[1]`` or ``batch["y"]``."""
    names = path.split(".") if path else []
    return "batch" + "".join(f"[{name}]" if name.isdigit() else f'["{name}"]' for name in names)
