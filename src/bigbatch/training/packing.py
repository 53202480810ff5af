"""Samples that come from a worker in one piece: each tensor by itself is a file handed over, and a wait for it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_Where = tuple[torch.dtype, int, tuple[int, ...]]
"""Of a tensor: its dtype, where it begins in the piece of that dtype, and its shape."""


class PackedList(list[Any]):
    """A list that goes from process to process with its plain tensors of one dtype in one; what arrives is a list."""

    def __reduce__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What the queue of a worker sends."""
        written = io.BytesIO()
        pickler = _Pickler(written, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dump(list(self))
        return _unpacked, (written.getvalue(), {dtype: torch.cat(parts) for dtype, parts in pickler.parts.items()})


class _Pickler(pickle.Pickler):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.parts: dict[torch.dtype, list[torch.Tensor]] = {}
        self._ends: dict[torch.dtype, int] = {}

    def persistent_id(self, obj: Any) -> _Where | None:
        """Puts a plain tensor aside; all else is pickled as it is."""
        if not _is_plain(obj):
            return None
        start = self._ends.get(obj.dtype, 0)
        self._ends[obj.dtype] = start + obj.numel()
        self.parts.setdefault(obj.dtype, []).append(obj.reshape(-1))
        return obj.dtype, start, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, read: io.BytesIO, pieces: dict[torch.dtype, torch.Tensor]):
        super().__init__(read)
        self._pieces = pieces

    def persistent_load(self, pid: _Where) -> torch.Tensor:
        """A copy, so that a sample that is kept does not keep the others."""
        dtype, start, shape = pid
        return self._pieces[dtype].narrow(0, start, torch.Size(shape).numel()).view(shape).clone()


def _unpacked(written: bytes, pieces: dict[torch.dtype, torch.Tensor]) -> list[Any]:
    return _Unpickler(io.BytesIO(written), pieces).load()


def _is_plain(value: Any) -> bool:
    """Whether it is nothing but its numbers, on the host."""
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_nested or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
    )
