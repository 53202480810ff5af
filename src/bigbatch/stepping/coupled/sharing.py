r"""A sum over rows of samples that ranks share: each computes its part of the rows, and all have the whole sum.

Every rank runs the loss of the whole batch. What is a sum of $f(x_i, X)$ over the rows need not be computed by all:

$$ S = \sum_r \sum_{i \in R_r} f(x_i, X), \qquad
   \frac{\partial S}{\partial X} = \sum_r \frac{\partial}{\partial X} \sum_{i \in R_r} f(x_i, X), $$

so that the sums of the ranks are added in forward, and their gradients in backward. To all that is around it, it looks
as if the rank had computed it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from bigbatch.stepping.distributed.gathering import added_up
from bigbatch.stepping.distributed.ranks import Ranks

_ranks: ContextVar[Ranks | None] = ContextVar("_ranks", default=None)

OfRows = Callable[..., torch.Tensor]
"""``of_rows(first, stop, *inputs)``: the sum over these rows, of shape ``()`` or a few numbers."""


@contextmanager
def shared_by(ranks: Ranks) -> Iterator[None]:
    """Within the block, which all ranks run alike, they share the rows of ``summed``."""
    token = _ranks.set(ranks)
    try:
        yield
    finally:
        _ranks.reset(token)


def summed(of_rows: OfRows, num_rows: int, *inputs: torch.Tensor | float) -> torch.Tensor:
    """The sum over all rows.

    Args:
        of_rows: Sums over some of them.
        num_rows: How many there are.
        inputs: What it is given, the same on all ranks; gradients flow to the tensors among them.
    """
    ranks = _ranks.get()
    return of_rows(0, num_rows, *inputs) if ranks is None else _Shared.apply(ranks, of_rows, num_rows, *inputs)


class _Shared(torch.autograd.Function):
    """The sum of the ranks; it keeps the graph of its own rows."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, of_rows: OfRows, num_rows: int, *inputs: Any) -> torch.Tensor:
        wanted = zip(inputs, ctx.needs_input_grad[3:], strict=True)
        ctx.ranks = ranks
        ctx.own = [x.detach().requires_grad_(needed) if isinstance(x, torch.Tensor) else x for x, needed in wanted]
        bounds = [num_rows * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1)]
        with torch.enable_grad():
            ctx.total = of_rows(*bounds, *ctx.own)
        own = ctx.total.detach().double().flatten().tolist()
        rows = ranks.meet("sums over rows are added", own)
        sums = [sum(numbers) for numbers in zip(*(row[: len(own)] for row in rows), strict=True)]
        return ctx.total.new_tensor(sums).view(ctx.total.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, start: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = [x for x, needed in zip(ctx.own, ctx.needs_input_grad[3:], strict=True) if needed]
        found = torch.autograd.grad(ctx.total, needed, start, allow_unused=True, materialize_grads=True)
        sums = added_up(ctx.ranks, found, "gradients of rows are added")
        return None, None, None, *(next(sums) if needed else None for needed in ctx.needs_input_grad[3:])
