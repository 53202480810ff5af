"""All that autograd saves lies in host memory, each storage once, and comes back when backward asks for it.

``offloading`` does that for the inputs of recomputed calls; here nothing runs a second time. What a paused forward
still holds of it (the input of the layer that it waits in, a residual) is given up until it goes on, for the host has
the same numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from bigbatch.memory.measure import notice, storage_of
from bigbatch.memory.offloading import Host

_LEAST_BYTES = 2048
"""Smaller ones stay where they are: a copy takes longer than they are worth."""


class Parcel:
    """Numbers in host memory, and the way back.

    Args:
        tensor: What goes; a dense one.
        host: Where to.
    """

    def __init__(self, tensor: torch.Tensor, host: Host):
        self.stored = host.to_host(tensor)
        # What computes waits for the copy, because the tensor may be changed in place by the very next operation.
        host.wait(tensor.device)
        self._host, self._device = host, tensor.device
        self._back: weakref.ref[torch.Tensor] | None = None

    def get(self) -> torch.Tensor:
        """The tensor on its device; the same one as long as somebody holds it."""
        back = self._back and self._back()
        if back is None:
            back = self._host.to_device(self.stored, self._device)
            self._host.wait(self._device)
            self._back = weakref.ref(back)
        return back

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy it into memory that is there."""
        self._host.fill(self.stored, tensor)
        self._host.wait(self._device)


class _Kept(NamedTuple):
    """A tensor that stayed. Autograd leaves it to whoever packs to see whether it was changed in place."""

    tensor: torch.Tensor
    version: int

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"One of the variables needed for gradient computation has been modified by an inplace operation: "
                f"shape {tuple(self.tensor.shape)}, version {self.tensor._version} instead of {self.version}."
            )
        return self.tensor


class _Part(NamedTuple):
    """A tensor as a part of a storage that is in host memory."""

    parcel: Parcel
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def get(self) -> torch.Tensor:
        back = self.parcel.get()
        back = back if back.dtype == self.dtype else back.view(self.dtype)
        return back.as_strided(self.shape, self.strides, self.offset)


class _Known(NamedTuple):
    """A storage that was sent, as it was then; nothing of it is kept alive from here."""

    tensor: weakref.ref[torch.Tensor]
    storage: weakref.ref[torch.UntypedStorage]
    version: int
    parcel: weakref.ref[Parcel]


class SavedOnHost:
    """Keeps in host memory what autograd saves within ``listening``.

    Args:
        host: Where to.
        stay: Tensors that are there all the time, such as parameters, buffers and the batch.
    """

    def __init__(self, host: Host, stay: Iterable[torch.Tensor]):
        self._host = host
        self._stay = {storage._cdata for tensor in stay if (storage := storage_of(tensor)) is not None}
        self._known: dict[int, _Known] = {}

    def listening(self) -> AbstractContextManager[Any]:
        """Within the block."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Part:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._stay or not _can_go(tensor, storage):
            return _Kept(tensor.detach(), tensor._version)  # an output that held itself would never be freed
        known = self._known.get(storage._cdata)
        parcel = None
        if known is not None and known.storage() is storage and known.version == tensor._version:
            parcel = known.parcel()
        if parcel is None:
            parcel = Parcel(_whole(tensor, storage.nbytes()), self._host)
            self._known[storage._cdata] = _Known(
                weakref.ref(tensor), weakref.ref(storage), tensor._version, weakref.ref(parcel)
            )
        return _Part(parcel, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def give_up(self, like: torch.Tensor) -> list[Returned]:
        """Free the device memory of activations whose numbers the host has, until ``come_back``.

        Nobody may touch them meanwhile. That is so for what the forward of a micro-batch has computed from its samples;
        to be told from weights in another dtype, which other forwards share, by having their samples and dimensions.

        Args:
            like: The input of the layer where the forward waits.
        """
        found = []
        for key, known in list(self._known.items()):
            tensor, storage, parcel = known.tensor(), known.storage(), known.parcel()
            if storage is None:
                del self._known[key]
            if tensor is None or storage is None or parcel is None or storage.nbytes() == 0:
                continue
            if tensor._version == known.version and _is_activation(tensor, like):
                found.append(Returned(tensor, storage, storage.nbytes(), parcel))
        for returned in found:
            returned.leave()
        return found


class Returned:
    """An activation whose memory was given up, as long as it is away."""

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, num_bytes: int, parcel: Parcel):
        self._tensor, self._storage, self._num_bytes, self._parcel = tensor, storage, num_bytes, parcel

    def leave(self) -> None:
        """Free its memory."""
        self._resize(0)

    def come_back(self) -> None:
        """Give it memory, and its numbers."""
        self._resize(self._num_bytes)
        # Through .data, so that autograd does not take it for changed.
        self._parcel.fill(_whole(self._tensor.data, self._num_bytes))

    def _resize(self, num_bytes: int) -> None:
        self._storage.resize_(num_bytes)
        notice(self._tensor)


def _unpack(packed: _Kept | _Part) -> torch.Tensor:
    return packed.get()


def _can_go(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    if type(tensor) not in (torch.Tensor, FakeTensor) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    is_plain = not tensor.is_conj() and not tensor.is_neg()
    return is_plain and storage.nbytes() >= _LEAST_BYTES and storage.nbytes() % tensor.element_size() == 0


def _whole(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """All of its storage, in one dimension."""
    return tensor.detach().as_strided((num_bytes // tensor.element_size(),), (1,), 0)


def _is_activation(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    made_by = tensor.grad_fn
    if made_by is None or tensor.dim() != like.dim() or len(tensor) != len(like):
        return False
    # The node of a leaf has its variable: a weight in another dtype is made of nothing but a leaf.
    return not all(hasattr(before, "variable") for before, _ in made_by.next_functions)
