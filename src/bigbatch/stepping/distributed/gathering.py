"""Tensors of all ranks, sent when each rank has what it needs for them and has said so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from bigbatch.stepping.distributed.ranks import Ranks


def gathered(ranks: Ranks, tensors: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The rows of all ranks, in the order of the ranks, bit by bit. A collective for each tensor.

    Args:
        tensors: Dense, in dtype and shape those of the other ranks, but for the number of rows.
        counts: For each tensor, the rows of each rank.
    """
    buffers = [_Rows(tensor, rows, ranks.rank) for tensor, rows in zip(tensors, counts, strict=True)]
    if buffers:
        ranks.meet("rows are sent")
    with ranks.named_failures():
        for buffer in buffers:
            buffer.send(ranks.group)
    return [buffer.joined() for buffer in buffers]


class _Rows:
    """A tensor of this rank, and room for those of all: as bytes, which every backend can send."""

    def __init__(self, tensor: torch.Tensor, counts: Sequence[int], rank: int):
        self._like, self._counts = tensor[:0], counts
        self._row_bytes = tensor.element_size() * tensor[:0].new_empty(tensor.shape[1:], device="meta").numel()
        room = max(counts) * self._row_bytes
        # One row of a column, or none, is contiguous whatever its stride, and reshape would keep that.
        own = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self._all = own.new_empty(len(counts), room)
        if own.numel() < room:
            own = torch.cat([own, own.new_zeros(room - own.numel())])
        self._own = own

    def send(self, group: dist.ProcessGroup | None) -> None:
        if self._own.numel():
            # The second name is deprecated in torch 2.13, and the first one new in it.
            send = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            send(self._all.view(-1), self._own, group=group)

    def joined(self) -> torch.Tensor:
        found = self._all.view(-1)
        if len(set(self._counts)) > 1:
            found = torch.cat([row[: n * self._row_bytes] for row, n in zip(self._all, self._counts, strict=True)])
        return found.view(self._like.dtype).view(sum(self._counts), *self._like.shape[1:])


def added_up(ranks: Ranks, tensors: Sequence[torch.Tensor], at: str) -> Iterator[torch.Tensor]:
    """The sum of each over the ranks, the same bits on all. A collective for each dtype.

    Args:
        tensors: Those of the other ranks have the same dtypes and shapes.
        at: See ``Ranks.agree``.
    """
    plain = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    kinds = {(tensor.device, tensor.dtype): None for tensor in plain}
    flat = {
        kind: torch.cat([tensor.reshape(-1) for tensor in plain if (tensor.device, tensor.dtype) == kind])
        for kind in kinds
    }
    if flat:
        ranks.meet(at)
    with ranks.named_failures():
        for numbers in flat.values():
            dist.all_reduce(numbers, group=ranks.group)
    for tensor, like in zip(tensors, plain, strict=True):
        kind = like.device, like.dtype
        mine, flat[kind] = flat[kind][: like.numel()], flat[kind][like.numel() :]
        found = mine.view(like.shape)
        yield torch.view_as_complex(found) if tensor.is_complex() else found
