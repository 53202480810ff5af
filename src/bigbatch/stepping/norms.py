"""Norm, clipping and the finite check: one pass over the gradients, one number for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigbatch.stepping.gradients import by_device, multiply
from bigbatch.stepping.precision import at_least_float32

foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


def total_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """2-norm of all gradients together, shape ``()``, on ``device``; at least float32."""
    norms = [torch.stack(foreach_norm(group)) for group in by_device(gradients)]
    if not norms:
        return torch.zeros((), device=device)
    wide = [n.to(device=device, dtype=at_least_float32(n.dtype)) for n in norms]
    return torch.linalg.vector_norm(torch.cat(wide) if len(wide) > 1 else wide[0])


def overflow_free_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The same for gradients whose squares overflow: divided by the largest entry first."""
    wide = [g.detach().double() for group in by_device(gradients) for g in group]
    largest = max(float(g.abs().max()) for g in wide if g.numel())
    return total_norm([g / largest for g in wide], device) * largest


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients down in place to ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    multiply(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
