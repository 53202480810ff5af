"""How near one gradient is to another: the cosine between them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from bigbatch.errors import BigBatchError
from bigbatch.memory.out_of_memory import is_out_of_memory

MOST_MICRO_BATCHES = 4
"""Of which the gradient is compared with that of their samples at once: enough to tell, and it needs little memory."""


def cosine(found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> float:
    """Between two gradients by the same names, each as one vector; 0 where one is zero or not finite."""
    both = [(a, expected[name]) for name, a in found.items()]
    product = sum(float((wide(a) * wide(b)).sum()) for a, b in both if a is not None and b is not None)
    norms = (math.sqrt(sum(norm_of(value) ** 2 for value in values)) for values in zip(*both, strict=True))
    size = math.prod(norms)
    return product / size if size > 0 and math.isfinite(product) and math.isfinite(size) else 0.0


def norm_of(value: torch.Tensor | None) -> float:
    """2-norm in float64; 0 where there is no gradient."""
    return 0.0 if value is None else float(wide(value).norm())


def wide(value: torch.Tensor) -> torch.Tensor:
    """The gradient in float64, dense."""
    value = value.detach()
    return (value.to_dense() if value.is_sparse else value).double()


def why_not_measured(error: Exception) -> str:
    """What an error in a measurement says, in one line; others are raised again."""
    if not isinstance(error, BigBatchError | TypeError | RuntimeError) and not is_out_of_memory(error):
        raise error
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
