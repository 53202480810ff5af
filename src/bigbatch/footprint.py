"""What a micro-batch takes, by its samples and its length: pure numbers, and loads nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass

Moment = tuple[float, float, float, float, float, float]
"""Of ``1, length, length**2, samples, samples * length, samples * length**2``: bytes that are alive at a moment."""

_ROUNDING = 0.5
"""Bytes by which coefficients are off: where so many samples take the limit to the byte, they are within it."""


@dataclass(frozen=True)
class Footprint:
    r"""Bytes of a step by the samples $n$ of its micro-batch and their padded length $l$.

    What is alive at one moment of a step is a polynomial: nothing grows faster than attention, with $n l^2$. Which
    moment is the highest depends on $n$ and $l$ (the head where samples are short, attention where they are long), so

    $$ \mathrm{bytes}(n, l) = \max_k \; f_k + d_k l + e_k l^2 + n (a_k + b_k l + c_k l^2). $$

    >>> found = Footprint(((100.0, 0.0, 0.0, 0.0, 8.0, 0.0), (100.0, 0.0, 0.0, 0.0, 0.0, 1.0)), limit_bytes=4100)
    >>> found.bytes_of(4, 5), found.most(4), found.most(8), found.most(20), found.most(100)
    (260.0, 125.0, 62.0, 10.0, 0.0)

    Attributes:
        moments: The coefficients $f, d, e, a, b, c$ of each moment that is the highest for some length.
        limit_bytes: That a step may take.
    """

    moments: tuple[Moment, ...]
    limit_bytes: int

    def bytes_of(self, samples: int, length: int) -> float:
        """Peak of a step with a micro-batch of so many samples of this padded length, beside gradients."""
        return max(fixed + samples * each for fixed, each in self._at(length))

    def most(self, length: int) -> float:
        """Samples of this padded length that are within the limit; infinite where they take nothing."""
        return min(_most(self.limit_bytes - fixed, each) for fixed, each in self._at(length))

    def _at(self, length: int) -> list[tuple[float, float]]:
        return [(f + (d + e * length) * length, a + (b + c * length) * length) for f, d, e, a, b, c in self.moments]


def _most(left: float, each: float) -> float:
    left += _ROUNDING
    if left < 0:
        return 0.0
    return left // each if each > 0 else math.inf
