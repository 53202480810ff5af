"""Bring micro-batches to the device: one at a time, the next one while this one computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from bigbatch.batch.logical import Piece
from bigbatch.batch.structure import leaves, mapped


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return mapped(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def on_device(pieces: Iterable[Piece], device: torch.device | None) -> Iterator[Piece]:
    """The same pieces with their tensors on ``device``.

    On CUDA the next micro-batch is copied, from pinned memory and on a stream of its own, while the one before it
    computes; so two of them lie on the device, and never the whole batch.

    Args:
        pieces: From the host or from the device already.
        device: Where the model is; None leaves everything where it is.
    """
    if device is None or device.type == "cpu":
        return iter(pieces)
    return _one_ahead(pieces, _Mover(device))


def _one_ahead(pieces: Iterable[Piece], mover: _Mover) -> Iterator[Piece]:
    ready: Piece | None = None
    for piece in pieces:
        following = piece._replace(micro_batch=mover.send(piece.micro_batch))
        if ready is not None:
            yield ready
        mover.wait_for(following.micro_batch)
        ready = following
    if ready is not None:
        yield ready


class _Mover:
    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, micro_batch: Any) -> Any:
        """Begin to copy; the host does not wait."""
        if self.stream is None:
            return mapped(self._moved, micro_batch)
        with torch.cuda.stream(self.stream):
            return mapped(self._moved, micro_batch)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            # What a split of the user's makes, such as a PackedSequence, knows how to move.
            can_move = callable(getattr(value, "to", None)) and not isinstance(value, torch.nn.Module | type)
            return value.to(self.device, non_blocking=True) if can_move else value
        if value.device == self.device:
            return value
        # Only a copy from pinned memory runs beside the host and the kernels.
        pinned = value.pin_memory() if self.stream is not None and not value.is_pinned() else value
        return pinned.to(self.device, non_blocking=True)

    def wait_for(self, micro_batch: Any) -> None:
        """Let the computing stream wait until the copy is there, and keep its memory until that stream is done."""
        if self.stream is None:
            return
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self.stream)
        for value in leaves(micro_batch):
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(computing)


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """That of the first parameter; ``model.parameters()`` takes much longer to find it."""
    found = (p for module in modules for p in module._parameters.values() if p is not None)
    first = next(found, None)
    return torch.device("cpu") if first is None else first.device
