"""How far gradients are from those of the true big batch: per parameter, relative, worst first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from bigbatch.stepping.cosine import norm_of, wide
from bigbatch.units import format_count
from bigbatch.values import Json

DType = Literal["float64", "float32"]

MAX_DIFFERENCE: dict[str, float] = {"float64": 1e-10, "float32": 1e-4}
"""By the dtype of the comparison: relative differences up to it are rounding."""

_MOST_ROWS = 10


@dataclass(frozen=True)
class Comparison(Json):
    """The gradient of a batch that was cut, beside that of the whole batch at once.

    Attributes:
        differences: By name of the parameter, worst first: the largest over the cuts of the norm of the difference
            over the norm of the true gradient; for a parameter whose gradient is near zero, over a thousandth of the
            root mean square norm of all. Infinite where the cut gave NaN.
        loss_difference: The largest over the cuts, over the loss of the whole batch or 1, whichever is more.
        cuts: Samples in the micro-batches of each cut that was tried.
        dtype: Of model, batch and gradients.
        deterministic: Whether the whole batch gave the same gradient twice.
        findings: What does not add up, in words, each with its remedy; also layers that never get a gradient.
        notes: What was done otherwise than in a step, such as dropout that was switched off.
        cosine: The smallest over the cuts, between the gradient of the cut and that of the whole batch, over all
            parameters; 1: the same direction.
    """

    differences: dict[str, float]
    loss_difference: float
    cuts: tuple[tuple[int, ...], ...]
    dtype: str = "float64"
    deterministic: bool = True
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cosine: float = 1.0

    @property
    def worst(self) -> tuple[str, float]:
        """Name of the parameter that is farthest off, and how far."""
        return next(iter(self.differences.items()))

    @property
    def equal(self) -> bool:
        """Whether each cut gave the gradient and the loss of the whole batch, up to rounding."""
        bound = MAX_DIFFERENCE[self.dtype]
        return self.deterministic and self.worst[1] <= bound and self.loss_difference <= bound

    def __str__(self) -> str:
        """The verdict, the cuts, and ``described``."""
        verdict = "equal up to rounding" if self.equal else "NOT equal"
        cuts = [f"  cut: {len(s)} micro-batches, at most {format_count(max(s), 'sample')} each" for s in self.cuts]
        first = f"The cut batch and the whole batch at once, in {self.dtype}: {verdict}"
        return "\n".join([first, *cuts, *described(self)])


def described(found: Comparison) -> list[str]:
    """Lines with the parameters that are farthest off, the loss, and what was found."""
    rows = list(found.differences.items())[:_MOST_ROWS]
    width = max(len("parameter"), *(len(parameter) for parameter, _ in rows))
    lines = ["", f"  {'parameter':{width}}  relative difference of the gradient"]
    lines += [f"  {parameter:{width}}  {difference:.1e}" for parameter, difference in rows]
    if len(found.differences) > len(rows):
        lines.append(f"  and {len(found.differences) - len(rows)} more, which are closer")
    lines.append(f"  {'(the loss)':{width}}  {found.loss_difference:.1e}")
    lines.append(f"  allowed: {MAX_DIFFERENCE[found.dtype]:.0e}")
    if not found.equal:
        lines.append(f"  cosine of the two gradients: {found.cosine:.3f}")
    for title, texts in (("Found", found.findings), ("Done otherwise than in a step", found.notes)):
        lines += ["", f"{title}:", *(f"  - {text}" for text in texts)] if texts else []
    return lines


def relative_differences(
    found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]
) -> dict[str, float]:
    r"""By name $\lVert\Delta_p\rVert / \max(\lVert e_p\rVert, 10^{-3} \lVert e\rVert / \sqrt{P})$, worst first.

    The floor is for what is zero in truth, where any rounding error would be infinitely large.

    Args:
        found: By the names of ``expected``. None, here and there, is taken for zeros: whether a parameter that nothing
            counts for has a gradient may depend on the cut.
        expected: At least one.
    """
    norms = {name: norm_of(value) for name, value in expected.items()}
    floor = 1e-3 * math.sqrt(sum(norm**2 for norm in norms.values()) / len(norms))
    differences = {
        name: _ratio(_distance(found[name], value), max(norms[name], floor)) for name, value in expected.items()
    }
    return dict(sorted(differences.items(), key=lambda item: -item[1]))


def _distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if found is None or expected is None:
        return norm_of(expected if found is None else found)
    return float((wide(found) - wide(expected)).norm())


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and math.isfinite(difference) else math.inf
