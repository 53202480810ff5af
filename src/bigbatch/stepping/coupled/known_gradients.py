"""A number whose gradients at some tensors are known already: where the second pass of a loss of outputs begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _WithGradients(torch.autograd.Function):
    """A number whose gradients at some tensors are known: a chain rule that begins there."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, unit: Any, gradients: Sequence[Any], *tensors: torch.Tensor) -> Any:
        ctx.unit, ctx.gradients = unit, gradients
        return number.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, start: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # With a loss scale the gradients have it already, or 16 bits would have lost them; and so has the start.
        factor = start if ctx.unit is None else start / ctx.unit
        wanted = zip(ctx.gradients, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(g * factor.to(g) if needed else None for g, needed in wanted)


def with_gradients(number: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], unit: Any) -> Any:
    """The number, with a graph in which the tensors of the pairs have the gradients of the pairs.

    Args:
        unit: What these gradients were begun with, the loss scale; None: 1.
    """
    return _WithGradients.apply(number, unit, [g for _, g in pairs], *(tensor for tensor, _ in pairs))
