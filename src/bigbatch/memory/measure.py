"""How many bytes are alive: exactly, for plans and tests, and roughly, for a person who watches a run.

On an accelerator the allocator keeps the books. On CPU nobody does, so ``LiveBytes`` watches every operation and
counts the storages that are alive. Process memory is shown to people only: it holds the interpreter and whatever the
C library has not yet given back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class _Entry(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    device_type: str
    num_bytes: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every tensor storage that is alive, each storage once, by device type.

    A storage is counted from the first operation that returns or takes it until it is freed; ``track`` counts what
    exists already. Views cost nothing, and a storage that grows or shrinks is counted with its new size when it is
    next seen. Not seen is what never passes through an operation: what one kernel needs only while it runs (its
    workspace), and states of random generators (5 kB for each recomputed region). ``torch.compile`` steps back while
    such a mode is active, so a compiled model is counted as it runs without the compiler.

    >>> with LiveBytes() as live:
    ...     x = torch.zeros(1000, dtype=torch.float64)
    ...     y = (x + 1).sum()
    >>> live.peak_bytes(), live.current_bytes()
    (16008, 8008)

    It sees the operations of the thread that entered it; on CPU backward runs in that same thread.

    Args:
        block_bytes: The size of a storage is rounded up to a multiple of this, as allocators of devices do.
        resized: Ask every storage for its size before each operation: FSDP2 empties them and fills them again.
    """

    def __init__(self, block_bytes: int = 1, *, resized: bool = False) -> None:
        super().__init__()
        self._resized = resized
        self._block_bytes = block_bytes
        self._live: dict[int, _Entry] = {}
        self._current: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        # A storage may be freed between any two lines of ours (by the garbage collector), so its callback only leaves
        # a note here, and the books are changed where nothing else is half done.
        self._freed: deque[tuple[int, weakref.ref[torch.UntypedStorage]]] = deque()

    def track(self, *existing: Any) -> None:
        """Count what exists already.

        Args:
            existing: Tensors in any nesting of containers and dataclasses; modules (parameters, their gradients,
                buffers, tensors kept as plain attributes); optimizers (their state and parameters); other objects
                (the same among their attributes, for example an EMA's list of tensors).
        """
        seen: dict[int, Any] = {}
        for value in existing:
            _visit(value, self._see_tensor, seen, look_inside=True)

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes that a storage counts for."""
        return -(-storage.nbytes() // self._block_bytes) * self._block_bytes

    def current_bytes(self, device_type: str = "cpu") -> int:
        """Bytes alive now on devices of this type."""
        for key in list(self._live):
            entry = self._live.get(key)
            storage = entry and entry.storage()
            if entry is not None and storage is not None:
                self._enter(storage, entry.device_type)
        self._settle()
        return self._current.get(device_type, 0)

    def peak_bytes(self, device_type: str = "cpu") -> int:
        """The most bytes that were alive at once, since the start or since ``reset_peak``."""
        return max(self._peak.get(device_type, 0), self.current_bytes(device_type))

    def reset_peak(self) -> None:
        """Let the peak begin again at what is alive now."""
        self.current_bytes()
        self._peak = dict(self._current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor or a jagged tensor turns its operation into others on the tensors inside it. Those are the ones to
        # count, so it goes first and we see what it calls.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if self._resized:
            self.current_bytes()
        self._see(args)
        if kwargs:
            self._see(tuple(kwargs.values()))
        result = func(*args, **(kwargs or {}))
        self._see(result)
        return result

    def _see(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._see_tensor(value)
        elif isinstance(value, list | tuple):
            for inner in value:
                self._see(inner)

    def _see_tensor(self, tensor: torch.Tensor) -> None:
        for plain in _plain_tensors(tensor):
            storage = storage_of(plain)
            if storage is not None:
                self._enter(storage, plain.device.type)

    def _enter(self, storage: torch.UntypedStorage, device_type: str) -> None:
        self._settle()
        key, num_bytes = storage._cdata, self.size_of(storage)
        known = self._live.get(key)
        if known is not None:
            if known.storage() is storage and known.num_bytes == num_bytes:
                return
            # Its address now belongs to another storage, or it was resized.
            self._current[known.device_type] -= known.num_bytes
        ref = weakref.ref(storage, partial(_note, self._freed, key))
        self._live[key] = _Entry(ref, device_type, num_bytes)
        current = self._current[device_type] = self._current.get(device_type, 0) + num_bytes
        self._peak[device_type] = max(current, self._peak.get(device_type, 0))
        self._has_grown(current)

    def _has_grown(self, current_bytes: int) -> None:
        """A storage has come into being, or was seen for the first time; so many bytes are alive now."""

    def _settle(self) -> None:
        while self._freed:
            key, ref = self._freed.popleft()
            entry = self._live.get(key)
            if entry is not None and entry.storage is ref:
                del self._live[key]
                self._current[entry.device_type] -= entry.num_bytes


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Where its numbers are; None where there is nothing to ask: sparse, MKL-DNN's layout, a wrapper of functorch."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def notice(tensor: torch.Tensor) -> None:
    """Let every ``LiveBytes`` that is active see that a tensor's storage has another size now.

    Not by an operation on it: on tensors without numbers that would give the storage its old size again.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, LiveBytes):
            mode._see_tensor(tensor)


def _note(
    freed: deque[tuple[int, weakref.ref[torch.UntypedStorage]]], key: int, ref: weakref.ref[torch.UntypedStorage]
) -> None:
    # Uses nothing global: it may run while the interpreter shuts down.
    freed.append((key, ref))


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes of ``tensor``: itself, or what is inside a subclass or a sparse tensor."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, torch.Tensor):  # A DTensor also names its device mesh.
                yield from _plain_tensors(inner)
    elif tensor.layout in _SPARSE_PARTS:
        for name in _SPARSE_PARTS[tensor.layout]:
            yield getattr(tensor.detach(), name)()
    else:
        yield tensor


def _visit(value: Any, see: Callable[[torch.Tensor], None], seen: dict[int, Any], *, look_inside: bool) -> None:
    if id(value) in seen or isinstance(value, str | bytes | int | float | type | None):
        return
    seen[id(value)] = value  # Kept alive, so that its id is not given to another value meanwhile.
    if isinstance(value, torch.Tensor):
        see(value)
        if value.is_leaf and value.grad is not None:
            see(value.grad)
        return
    for inner in _parts(value, look_inside):
        _visit(inner, see, seen, look_inside=look_inside and isinstance(value, Mapping | list | tuple))


def _parts(value: Any, look_inside: bool) -> list[Any]:
    """What is inside a value; inside an object of unknown kind only when ``look_inside``."""
    if isinstance(value, torch.nn.Module):
        plain = [inner for module in value.modules() for inner in vars(module).values()]
        return [*value.parameters(), *value.buffers(), *(t for t in plain if isinstance(t, torch.Tensor))]
    if isinstance(value, torch.optim.Optimizer):
        return [dict(value.state), value.param_groups]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(vars(value).values()) if look_inside and hasattr(value, "__dict__") else []


@dataclasses.dataclass
class PeakBytes:
    """What ``count_peak_bytes`` found.

    Attributes:
        peak_bytes: The most bytes that were alive at once on the device; 0 until the block is left.
    """

    peak_bytes: int = 0


@contextlib.contextmanager
def count_peak_bytes(device: torch.device | str, track: Any = (), *, resized: bool = False) -> Iterator[PeakBytes]:
    """Measure the peak of a block: ``.peak_bytes`` of the yielded value holds it afterwards, also after an error.

    On CUDA and XPU the allocator is asked, and its peak statistics begin again: they count everything that lives on
    the device. On other devices ``LiveBytes`` counts what the block touches and what ``track`` holds.

    >>> x = torch.zeros(1000, dtype=torch.float64)
    >>> with count_peak_bytes("cpu", track=[x]) as peak:
    ...     y = (x + 1).sum()
    >>> peak.peak_bytes
    16008

    Args:
        device: Where to count.
        track: What exists already; see ``LiveBytes.track``.
        resized: See ``LiveBytes``.
    """
    device = torch.device(device)
    found, allocator = PeakBytes(), _allocator(device)
    if allocator is not None:
        allocator.reset_peak_memory_stats(device)
        try:
            yield found
        finally:
            found.peak_bytes = allocator.max_memory_allocated(device)
        return
    live = LiveBytes(resized=resized)
    live.track(track)
    try:
        with live:
            yield found
    finally:
        found.peak_bytes = live.peak_bytes(device.type)


def _allocator(device: torch.device) -> Any:
    return getattr(torch, device.type) if device.type in ("cuda", "xpu") else None


def bytes_in_use(device: torch.device | str) -> int:
    """Memory in use on a device now, for display: the allocator's on CUDA and XPU, else that of this process."""
    device = torch.device(device)
    allocator = _allocator(device)
    if allocator is not None:
        return allocator.memory_allocated(device)
    import psutil  # Here, because only a run that shows its memory needs it.

    return psutil.Process().memory_info().rss
