"""What ``DistributedDataParallel`` holds beside the model: a second copy of all gradients, in buckets.

They are allocated in C++ when it is made, and stay. Nothing that watches operations sees them, so they are counted from
the parameters, which is exact: buckets hold their numbers one behind the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.planning.sharding_costs import BUCKET_BYTES
from bigbatch.stepping.gradients import is_sharded


class Buckets(NamedTuple):
    """Bytes that summing gradients needs.

    Attributes:
        held_bytes: Always there.
        moment_bytes: Between the last backward and the update, beside the gradients.
    """

    held_bytes: int = 0
    moment_bytes: int = 0


NO_BUCKETS = Buckets()


def buckets_of(model: nn.Module, *, num_ranks: int, reduce: str) -> Buckets:
    """The buckets of the DDPs in a model; without one, those that there will be when it is wrapped.

    Args:
        num_ranks: That share a batch. One rank sums nothing, and has buckets where it is wrapped all the same.
        reduce: The option of that name.
    """
    if any(is_sharded(p) for p in model.parameters()):
        return NO_BUCKETS
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not wrapped and num_ranks == 1:
        return NO_BUCKETS
    found = [p for ddp in wrapped or [model] for p in _summed(ddp)]
    copied = in_buckets(found) if reduce == "after" and num_ranks > 1 else ()
    return Buckets(
        held_bytes=sum(p.nbytes for p in found),
        moment_bytes=max((_num_bytes(bucket) for bucket in copied if len(bucket) > 1), default=0),
    )


def _summed(module: nn.Module) -> list[torch.Tensor]:
    """The parameters whose gradients are put into buckets; gradients of sparse embeddings are not."""
    ignored: Collection[str] = getattr(module, "parameters_to_ignore", ())
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    sparse = {
        id(p)
        for each in inner.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
        for p in each.parameters()
    }
    named = inner.named_parameters()
    return [p for name, p in named if p.requires_grad and name not in ignored and id(p) not in sparse]


def in_buckets(gradients: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients by device and dtype, so many together that a copy of them is at most 25 MiB; a larger one is alone."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[list[torch.Tensor]]] = {}
    room: dict[tuple[torch.device, torch.dtype], int] = {}
    for gradient in gradients:
        kind = gradient.device, gradient.dtype
        if room.get(kind, 0) < gradient.nbytes:
            by_kind.setdefault(kind, []).append([])
            room[kind] = BUCKET_BYTES
        by_kind[kind][-1].append(gradient)
        room[kind] -= gradient.nbytes
    return [bucket for buckets in by_kind.values() for bucket in buckets]


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
