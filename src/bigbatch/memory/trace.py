"""Record a step: which module runs, what it saves for backward, and how many bytes are alive or how much time passes.

The record is a list of events. What they mean for a plan is read from them in ``planning/slots.py``.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bigbatch.memory.events import Event, Storage
from bigbatch.memory.fake_kernels import as_the_kernel_returns
from bigbatch.memory.kernels import Workspaces
from bigbatch.memory.measure import LiveBytes, storage_of
from bigbatch.memory.selective import words_that_keep

Price = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]
"""Seconds that an operation takes, from ``(func, args, kwargs, result)``."""

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


class Recorder:
    """Notes when modules are entered and left, and when tensors are saved for backward and loaded again.

    This one notes the time that really passes.

    Args:
        model: Whose modules are watched.
        static: Storages that are there all the time (parameters, the batch), by ``_cdata``; saving one costs nothing.
        device: Of the model.
    """

    def __init__(self, model: nn.Module, static: frozenset[int], device: torch.device | None = None):
        self.events: list[Event] = []
        self._model = model
        self._static = static
        self._device = device
        self._indices: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._num_saves = 0
        self._num_storages = 0
        self._num_inside = 0  # of modules that were entered and not left
        self._last_output: weakref.ref[torch.Tensor] | None = None
        self._last_time = time.perf_counter()

    def mark(self, label: str) -> None:
        """Note that something begins or ends; see ``Event.what``."""
        self._note("mark", label)
        if label == "micro-batch":
            self._indices.clear()
            self._num_saves = self._num_storages = 0

    @contextlib.contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Within the block, modules that are called are noted."""
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._on_enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._on_exit(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def watching_saves(self) -> contextlib.AbstractContextManager[Any]:
        """Within the block, tensors that are saved for backward are noted, and later when they are loaded."""
        return torch.autograd.graph.saved_tensors_hooks(self._save, self._load)

    def strictly(self) -> contextlib.AbstractContextManager[Any]:
        """Within the block, nothing may be answered that a real step would read; a real one may read all."""
        return contextlib.nullcontext()

    def _reading(self) -> tuple[float, float, float]:
        """Most bytes alive since the last event, bytes alive now, and seconds since the last event."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        passed, self._last_time = now - self._last_time, now
        return 0.0, 0.0, passed

    def _on_enter(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = args[0] if args else None
            last = self._last_output and self._last_output()
            inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            others = tuple(map(_comparable, tree_leaves((args[1:], kwargs))))
            self._num_inside += 1
            self._note("enter", name, inputs, follows=last is not None and last is given, others=others)

        return enter

    def _on_exit(self, name: str) -> Callable[..., None]:
        def leave(_: nn.Module, args: Any, output: Any) -> None:
            self._last_output = weakref.ref(output) if isinstance(output, torch.Tensor) else None
            self._num_inside -= 1
            self._note("exit", name)

        return leave

    def _save(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        number = self._num_saves
        self._num_saves += 1
        self._note("save", number, [tensor])
        return tensor, number

    def _load(self, packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, number = packed
        self._note("load", number)
        return tensor

    def _note(self, kind: Any, what: Any, tensors: list[torch.Tensor] | None = None, **more: Any) -> None:
        found = dict.fromkeys(storage for tensor in tensors or () if (storage := self._storage_of(tensor)) is not None)
        self.events.append(Event(kind, what, tuple(found), *self._reading(), **more))

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes that it takes."""
        return storage.nbytes()

    def _storage_of(self, tensor: torch.Tensor) -> Storage | None:
        """Its storage by number, in the order in which they are met; None for one that costs nothing."""
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._static:
            return None
        key = storage._cdata
        known = self._indices.get(key)
        if known is None or known[0]() is not storage:
            known = self._indices[key] = (weakref.ref(storage), self._num_storages)
            self._num_storages += 1
        return Storage(known[1], self.size_of(storage))


class FakeRecorder(Recorder, LiveBytes):
    """Notes the bytes alive in a step of fake tensors, and the time that it would take.

    Fake tensors have no numbers, so what reads one is answered as in a steady step: a number with 1000, because the
    step looks whether its gradient norm is finite and an optimizer at its step counter; a question with no, because an
    average asks whether it is the first time. Inside ``strictly`` nothing is answered, and a read raises.

    Args:
        model: Whose modules are watched; of fake tensors.
        static: See ``Recorder``.
        price: What an operation takes; None: no time is noted.
        block_bytes: The size of a storage is rounded up to a multiple of this.

    Attributes:
        workspaces: What kernels need while they run, as far as it is known.
        most_in_kernels: The most bytes that were alive in an operation, with its workspace; 0 where none is known.
        most_before_update: The same, up to the update.
        moments: Bytes that were alive each time that a storage came into being. Steps that run the same operations on
            tensors of other sizes have as many of them.
    """

    def __init__(self, model: nn.Module, static: frozenset[int], price: Price | None = None, *, block_bytes: int = 1):
        LiveBytes.__init__(self, block_bytes)
        Recorder.__init__(self, model, static)
        self.moments: list[int] = []
        self._price = price
        self._seconds = 0.0
        self._strict = False
        self.workspaces = Workspaces()
        self.most_in_kernels = self.most_before_update = 0.0
        self._without_gradient: list[torch.Tensor] = []
        self._gradients: dict[int, int] = {}

    def mark(self, label: str) -> None:
        """Note that something begins or ends; see ``Event.what``."""
        super().mark(label)
        if label == "update":
            self.most_before_update = self.most_in_kernels

    def watch_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note with each event how many bytes the gradients of these take. They are there until the step is over."""
        self._without_gradient = list(parameters)

    def _note(self, kind: Any, what: Any, tensors: list[torch.Tensor] | None = None, **more: Any) -> None:
        if kind in ("load", "mark"):  # In a forward none comes into being.
            for p in self._without_gradient:
                if p.grad is not None:
                    storage = p.grad.untyped_storage()
                    self._gradients[storage._cdata] = self.size_of(storage)
            self._without_gradient = [p for p in self._without_gradient if p.grad is None]
        super()._note(kind, what, tensors, gradient_bytes=float(sum(self._gradients.values())), **more)

    def _has_grown(self, current_bytes: int) -> None:
        self.moments.append(current_bytes)

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes that it takes, rounded up."""
        return LiveBytes.size_of(self, storage)

    @contextlib.contextmanager
    def strictly(self) -> Iterator[None]:
        """Within the block, reading a number of a fake tensor is an error: memory may depend on it."""
        self._strict = True
        try:
            yield
        finally:
            self._strict = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not self._strict:
            self._see(args)
            return True if func is _READS[1] else _answer(args[0].dtype)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        corrected = as_the_kernel_returns(func, args, result)
        if corrected is not result:
            result = corrected
            self._see(result)
        if self.workspaces:
            self._settle()
            now = self._current.get("cpu", 0) + self.workspaces.of(func, args, kwargs or {})
            self.most_in_kernels = max(self.most_in_kernels, now)
        took = 0.0 if self._price is None else self._price(func, args, kwargs or {}, result)
        self._seconds += took
        if self._num_inside and (words := words_that_keep(func)):
            self._note("made", (words, took), [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)])
        return result

    def _reading(self) -> tuple[float, float, float]:
        self._settle()
        now = self._current.get("cpu", 0)
        peak, self._peak["cpu"] = max(self._peak.get("cpu", 0), now), now
        passed, self._seconds = self._seconds, 0.0
        return peak, now, passed


def _answer(dtype: torch.dtype) -> complex | float | int | bool:
    if dtype == torch.bool:
        return False
    return 1000.0 if dtype.is_floating_point else 1000 if not dtype.is_complex else 1000 + 0j


def _comparable(value: Any) -> Any:
    plain = isinstance(value, bool | int | float | str | type(None))
    return (type(value).__name__, value) if plain else id(value)
