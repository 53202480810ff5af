"""The batch of all ranks, of which each has a share: what the loss of the whole batch gets, sent as far as it looks.

The loss may want the labels of all samples, and hardly ever their images. So each tensor of the batch is one that finds
its rows on the other ranks when it is first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from bigbatch.batch.cutting import Layout, lay_out
from bigbatch.batch.structure import is_array, mapped
from bigbatch.errors import BatchError, LossError
from bigbatch.stepping.distributed.gathering import gathered
from bigbatch.stepping.distributed.ranks import Ranks
from bigbatch.values import StepOptions


class Elsewhere(torch.Tensor):
    """A tensor whose numbers are found when somebody uses it."""

    _find: Callable[[], torch.Tensor]

    @classmethod
    def found_by(cls, find: Callable[[], torch.Tensor]) -> Elsewhere:
        """The one that ``find`` gives; it is called at each use."""
        tensor = torch.Tensor._make_subclass(cls, torch.empty(0))
        tensor._find = find
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Everything that is done with a tensor comes here, also reading its shape.
        args, kwargs = mapped(_found, (args, kwargs or {}))
        return func(*args, **kwargs)


def _found(value: Any) -> Any:
    return value._find() if isinstance(value, Elsewhere) else value


def layout_of(share: Any, options: StepOptions) -> Layout | None:
    """How the samples lie in what the loss gets as the batch; None where that cannot be told, or there are none."""
    try:
        return None if share is None else lay_out(share, options.batch_dims)
    except BatchError:
        return None


def without_tensors(layout: Layout | None) -> list[Any]:
    """The lists and NumPy arrays with a dimension of samples, which are sent in any case."""
    found: list[Any] = []
    if layout is not None:
        layout.mapped(lambda value, dim: found.append(value) if not isinstance(value, torch.Tensor) else None)
    return found


def of_all_ranks(layout: Layout, lists: Sequence[Sequence[Any]], ranks: Ranks, device: torch.device) -> Any:
    """The batch of all ranks, on the device.

    Args:
        layout: Of the share of this rank.
        lists: What ``without_tensors`` gave, by rank.
    """
    numbers = iter(range(sys.maxsize))
    others = iter(zip(*lists, strict=True))

    def of_all(value: Any, dim: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return _joined(next(others), dim)
        place = f"tensor {next(numbers)} of the batch is sent"
        return Elsewhere.found_by(cache(lambda: _rows_of_all(value.to(device), dim, ranks, place)))

    # What is not cut is the same on all ranks.
    return mapped(lambda leaf: leaf if isinstance(leaf, Elsewhere) else _moved(leaf, device), layout.mapped(of_all))


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


def _joined(parts: Sequence[Any], dim: int) -> Any:
    if is_array(parts[0]):
        return sys.modules["numpy"].concatenate(parts, axis=dim)
    return type(parts[0])(value for part in parts for value in part)


@torch.no_grad()
def _rows_of_all(own: torch.Tensor, dim: int, ranks: Ranks, place: str) -> torch.Tensor:
    rows = own.movedim(dim, 0)
    ranks.meet(place)
    told = ranks.tell_object((len(rows), rows.dtype, rows.shape[1:]))
    if len({(dtype, shape) for _, dtype, shape in told}) > 1:
        found = ", ".join(f"rank {rank} has {tuple(shape)} of {dtype}" for rank, (_, dtype, shape) in enumerate(told))
        raise LossError(
            f"The loss of WholeBatchLoss looks at a tensor of the batch that cannot be put together over the ranks: "
            f"for each sample {found}. Pad it to one length, or return what the loss needs of it from forward."
        )
    (found,) = gathered(ranks, [rows], [[count for count, *_ in told]])
    return found.movedim(0, dim)
