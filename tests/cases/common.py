"""What the cases share: cutting a dict batch, and the comparison that decides each of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class FakeOutOfMemory(torch.OutOfMemoryError):
    """Raised by a case where a device would have run out of memory."""


def spans(num_samples: int, micro_batch_size: int) -> list[tuple[int, int]]:
    """Start and stop of each micro-batch: full ones and a rest."""
    return [(start, min(start + micro_batch_size, num_samples)) for start in range(0, num_samples, micro_batch_size)]


def same(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], tolerance: float = 1e-5) -> None:
    """Raise ``AssertionError`` unless the gradients agree: the names, which are None, and each one's values."""
    assert set(got) == set(want), "different parameter names"
    for name, wanted in want.items():
        found = got[name]
        assert (found is None) == (wanted is None), f"{name}: got {found} where {wanted} was wanted"
        if found is None or wanted is None:
            continue
        assert torch.isfinite(found).all(), f"{name}: not finite"
        error = (found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-12)
        assert error < tolerance, f"{name}: relative gradient error {error:.3g}"
