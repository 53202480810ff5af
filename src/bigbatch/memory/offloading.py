"""Inputs of a recomputed call that lie in host memory between forward and backward.

The copies run on a stream of their own, beside the computation. To the host they begin when the call begins, and what
follows the call waits for them: so the input may be freed or changed right after it. Back they begin one call ahead:
when the inputs of a call are asked for, those of the call before it in the forward set out.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from bigbatch.errors import RecomputeError, warn


class Host(Protocol):
    """Where tensors are put, and how they get there and back."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy to the host."""
        ...

    def to_device(self, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Begin to copy back what ``to_host`` returned."""
        ...

    def fill(self, stored: torch.Tensor, tensor: torch.Tensor) -> None:
        """Begin to copy back into memory that is there."""
        ...

    def wait(self, device: torch.device) -> None:
        """Let the work that is queued on the device from now on wait for all copies begun so far."""
        ...


class PinnedHost:
    """Pinned host memory, reached by a stream of its own: for CUDA, and for XPU which has the same interface."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy to pinned memory. The tensor must stay alive until ``wait``."""
        streams, stream = _streams(tensor.device)
        stream.wait_stream(streams.current_stream(tensor.device))
        with streams.stream(stream):
            stored = torch.empty_like(tensor, device="cpu", pin_memory=True)
            stored.copy_(tensor, non_blocking=True)
        return stored

    def to_device(self, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Begin to copy back, into memory of the stream that computes."""
        streams, stream = _streams(device)
        back = torch.empty_like(stored, device=device)
        # What lay in this memory before may still be in use by the work that is queued.
        stream.wait_stream(streams.current_stream(device))
        with streams.stream(stream):
            back.copy_(stored, non_blocking=True)
        back.record_stream(stream)  # If nobody takes it, its memory is not given away in the middle of the copy.
        return back

    def fill(self, stored: torch.Tensor, tensor: torch.Tensor) -> None:
        """Begin to copy back, after the work that is queued. The tensor must stay alive until ``wait``."""
        streams, stream = _streams(tensor.device)
        stream.wait_stream(streams.current_stream(tensor.device))
        with streams.stream(stream):
            tensor.copy_(stored, non_blocking=True)

    def wait(self, device: torch.device) -> None:
        """Let the stream that computes wait for the copies begun so far."""
        streams, stream = _streams(device)
        streams.current_stream(device).wait_stream(stream)


class CountedHost:
    """Keeps sizes and no numbers: to count, on fake tensors, what a card and its host would hold.

    What lies here is a tensor on ``meta``, so ``LiveBytes`` counts it there and not as memory of the device.
    """

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same size without numbers."""
        return torch.empty_like(tensor, device="meta")

    def to_device(self, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The same size on the device; its numbers are not those that were there."""
        return torch.empty_like(stored, device=device)

    def fill(self, stored: torch.Tensor, tensor: torch.Tensor) -> None:
        """Its numbers are not known."""

    def wait(self, device: torch.device) -> None:
        """Nothing is under way."""


class MeteredHost:
    """Keeps numbers in this process and counts them, out of sight of ``LiveBytes``: a CPU then stands for a card.

    Attributes:
        moved_bytes: Copied there and back, together.
        most_bytes: The most that lay here at once.
    """

    def __init__(self) -> None:
        self.moved_bytes = self.most_bytes = self._bytes = 0

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        with _disable_current_modes():
            stored = tensor.detach().clone()
        self.moved_bytes += stored.nbytes
        self._bytes += stored.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)
        weakref.finalize(stored, self._forget, stored.nbytes)
        return stored

    def _forget(self, num_bytes: int) -> None:
        self._bytes -= num_bytes

    def to_device(self, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of the copy."""
        # Not empty_like, an operation on what is to be out of sight.
        back = torch.empty_strided(stored.shape, stored.stride(), dtype=stored.dtype, device=device)
        self.fill(stored, back)
        return back

    def fill(self, stored: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy it into memory that is there."""
        self.moved_bytes += tensor.nbytes
        with _disable_current_modes():
            tensor.copy_(stored)

    def wait(self, device: torch.device) -> None:
        """Nothing is under way."""


_pretended: ContextVar[Host | None] = ContextVar("bigbatch_pretended_host", default=None)


@contextlib.contextmanager
def pretend_host(host: Host) -> Iterator[None]:
    """In the block, offload from any device to this host: fake CPU tensors stand for a card when a plan is made.

    Tensors go back from the host they were put in, also when backward runs outside of the block.
    """
    token = _pretended.set(host)
    try:
        yield
    finally:
        _pretended.reset(token)


@contextlib.contextmanager
def inputs_on_host(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What autograd saves of these tensors in the block lies in host memory; other tensors are saved as always.

    Only those that need a gradient go, and no parameters. What needs none (a mask, positions) is mostly given to all
    modules alike, or is part of the batch: there is little to free.

    Raises:
        RecomputeError: One of them was changed in place in the block.
    """
    hosts = {tensor: host for tensor in tensors if (host := _host_for(tensor)) is not None}
    if not hosts:
        yield
        return
    versions = {tensor: tensor._version for tensor in hosts}
    group = _Group({_key(tensor): host for tensor, host in hosts.items()})
    with torch.autograd.graph.saved_tensors_hooks(group.pack, _unpack):
        yield
    group.arrive()
    for tensor, version in versions.items():
        if tensor._version != version:
            raise RecomputeError(
                f"A module whose input is kept in host memory changed that input in place (shape "
                f"{tuple(tensor.shape)}). Backward would run it again from the changed values: recompute a part of it "
                f"that does not do that, or change its first line to x = x.clone()."
            )


class _Group:
    """The inputs of one call."""

    def __init__(self, hosts: dict[Any, Host]):
        self._hosts = hosts
        self._members: list[weakref.ref[_Parked]] = []
        # Not kept alive from here: it dies with its graph.
        self._before: weakref.ref[_Group] | None = getattr(_last, "group", None)
        _last.group = weakref.ref(self)

    def pack(self, tensor: torch.Tensor) -> _Parked | torch.Tensor:
        """Called by autograd with what it wants to save."""
        host = self._hosts.get(_key(tensor))
        if host is None:
            return tensor
        parked = _Parked(tensor, host, self)
        self._members.append(weakref.ref(parked))
        return parked

    def arrive(self) -> None:
        """What follows waits until the inputs are on the host."""
        self._hosts.clear()
        for parked in self.members():
            parked.host.wait(parked.device)

    def members(self) -> list[_Parked]:
        """Those that autograd has not dropped."""
        return [parked for ref in self._members if (parked := ref()) is not None]

    def set_out(self, *, again: bool) -> None:
        """Begin to bring back all of it, also what has been on the device and was given away if ``again``."""
        for parked in self.members():
            if parked.back is None and (again or not parked.was_given):
                parked.back = parked.host.to_device(parked.stored, parked.device)

    def set_out_before(self) -> None:
        """The inputs of the call before this one are the next that backward asks for."""
        before = None if self._before is None else self._before()
        if before is not None:
            before.set_out(again=False)


_last = threading.local()


class _Parked:
    """A tensor in host memory, and on its way back."""

    def __init__(self, tensor: torch.Tensor, host: Host, group: _Group):
        self.host, self.device, self.group = host, tensor.device, group
        dense, self._strides = _dense(tensor)
        self._shape = tensor.shape
        self.stored = host.to_host(dense)
        self.back: torch.Tensor | None = None
        self.was_given = False

    def give(self) -> torch.Tensor:
        """The tensor on its device, for work that is queued from now on."""
        if self.back is None:
            self.group.set_out(again=False)  # All inputs of a call are asked for together.
        if self.back is None:
            self.back = self.host.to_device(self.stored, self.device)
        self.host.wait(self.device)
        back, self.back, self.was_given = self.back, None, True
        if all(parked.back is None for parked in self.group.members()):
            # Not before the last of this call, which would have to wait for them.
            self.group.set_out_before()
        return back if self._strides is None else back.as_strided(self._shape, self._strides)


def _unpack(packed: _Parked | torch.Tensor) -> torch.Tensor:
    return packed.give() if isinstance(packed, _Parked) else packed


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """What to copy of a tensor, and the strides to read the copy with; None where they are those of the copy.

    An expanded tensor is copied as the few numbers that it is, and a slice as its own numbers without those between.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0 or span > tensor.numel():
        return tensor, None
    return tensor.as_strided((span,), (1,), tensor.storage_offset()), tensor.stride()


def _host_for(tensor: torch.Tensor) -> Host | None:
    """Where it goes; None if it stays."""
    is_plain = type(tensor) in (torch.Tensor, FakeTensor) and tensor.layout == torch.strided and not tensor.is_nested
    if not is_plain or not tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
        return None
    host = host_of(tensor.device)
    if host is None:
        _warn_no_effect(tensor.device.type)
    return host


def host_of(device: torch.device) -> Host | None:
    """Where tensors of this device go; None where they are in host memory already."""
    pretended = _pretended.get()
    if pretended is None and device.type in ("cuda", "xpu"):
        return _PINNED
    return pretended


_PINNED = PinnedHost()


@functools.cache
def _warn_no_effect(device_type: str) -> None:
    """Once in a process for each kind of device: a step would say it in every micro-batch."""
    warn(
        f"offload= has no effect on tensors on {device_type!r}: they are in host memory already, or there is no way "
        f"to copy them beside the computation. Leave it out of the plan, or move the model to a card."
    )


def _key(tensor: torch.Tensor) -> Any:
    """What a tensor and the alias of it that autograd saves have in common."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def _streams(device: torch.device) -> tuple[Any, Any]:
    return torch.get_device_module(device), _copy_stream(device)
