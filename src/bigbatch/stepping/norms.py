"""Norm, clipping and the finite check: one pass over the gradients, one number for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bigbatch.stepping.gradients import by_device, is_sharded, multiply
from bigbatch.stepping.precision import at_least_float32

foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


def total_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """2-norm of all gradients together, shape ``()``, on ``device``; at least float32.

    Of gradients that are sharded over ranks all shards count, which takes one more collective.
    """
    return _over_shards(gradients, device, _norm)


def overflow_free_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The same for gradients whose squares overflow: divided by the largest entry first."""
    return _over_shards(gradients, device, _overflow_free_norm)


def _norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    norms = [torch.stack(foreach_norm(group)) for group in by_device(gradients)]
    if not norms:
        return torch.zeros((), device=device)
    wide = [n.to(device=device, dtype=at_least_float32(n.dtype)) for n in norms]
    return torch.linalg.vector_norm(torch.cat(wide) if len(wide) > 1 else wide[0])


def _overflow_free_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    wide = [g.detach().double() for group in by_device(gradients) for g in group]
    largest = max((float(g.abs().max()) for g in wide if g.numel()), default=0.0) or 1.0
    return _norm([g / largest for g in wide], device) * largest


def _over_shards(
    gradients: Sequence[Any], device: torch.device, norm_of: Callable[[Sequence[Any], torch.device], torch.Tensor]
) -> torch.Tensor:
    """The norm over all shards, from that of the shards of this rank."""
    by_shards: dict[Any, list[Any]] = {}
    for gradient in gradients:
        placements = gradient.placements if is_sharded(gradient) else ()
        dims = tuple(dim for dim, placement in enumerate(placements) if placement.is_shard())
        by_shards.setdefault((gradient.device_mesh, dims) if dims else None, []).append(gradient)
    if set(by_shards) <= {None}:
        return norm_of(gradients, device)
    groups = [[shards[0].get_group(dim) for dim in shards[1]] if shards else [] for shards in by_shards]
    norms = [norm_of(found, device) for found in by_shards.values()]
    largest = norms[0].new_ones(())
    if norm_of is _overflow_free_norm:
        largest = torch.stack(_reduced(norms, groups, torch.distributed.ReduceOp.MAX)).max().clamp(min=1.0)
    squares = [(norm / largest).square() for norm in norms]
    return torch.stack(_reduced(squares, groups, torch.distributed.ReduceOp.SUM)).sum().sqrt() * largest


def _reduced(numbers: Sequence[torch.Tensor], groups: Sequence[Sequence[Any]], op: Any) -> list[torch.Tensor]:
    """Each number over its groups of ranks."""
    found = [number.clone() for number in numbers]
    for number, over in zip(found, groups, strict=True):
        for group in over:
            torch.distributed.all_reduce(number, op=op, group=group)
    return found


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients down in place to ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    multiply(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
