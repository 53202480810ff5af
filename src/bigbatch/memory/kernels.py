"""What kernels need only while they run: room that belongs to no tensor, by operation and by shape.

A convolution or an LSTM of oneDNN asks the allocator for such room, its *workspace*. No trace of tensors sees it, so it
is noted while a step really runs, for micro-batches of two sizes, and read off for every other size.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MARK = "bigbatch: kernel "
_Kind = tuple[str, str, tuple[int, ...]]
_SAME = 0.05
"""Sizes of one kernel grow together, but for what is rounded up, such as the bytes that oneDNN's LSTM keeps."""


class Kernel(NamedTuple):
    """One call of an operation.

    Attributes:
        func: Its name.
        options: What it was given beside tensors, in words.
        dimensions: All sizes of the tensors that it was given, one after the other.
        ranks: Of those tensors.
    """

    func: str
    options: str
    ranks: tuple[int, ...]
    dimensions: tuple[int, ...]

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> Kernel:
        """The call ``func(*args, **kwargs)``."""
        found = tree_leaves((args, kwargs))
        shapes = [value.shape for value in found if isinstance(value, torch.Tensor)]
        options = ",".join(str(value) for value in found if not isinstance(value, torch.Tensor))
        return cls(str(func), options, tuple(map(len, shapes)), tuple(size for shape in shapes for size in shape))


class _Seen(NamedTuple):
    """A kernel as it was called with micro-batches of two sizes, and its workspace in each, in bytes."""

    kernels: tuple[Kernel, Kernel]
    num_bytes: tuple[float, float]

    def at(self, kernel: Kernel) -> float:
        """Workspace of this call; zero when it is another kernel."""
        (small, large), (low, high) = self.kernels, self.num_bytes
        shares = set()
        for one, other, size in zip(small.dimensions, large.dimensions, kernel.dimensions, strict=True):
            if one != other:
                shares.add((size - one) / (other - one))
            elif size != one:
                return 0.0
        if not shares:
            return max(low, high)
        if max(shares) - min(shares) > _SAME * max(1.0, max(shares)):
            return 0.0
        # What gets less from one size to the next is rounding or another algorithm: no line.
        return max(low, high) if high <= low else max(0.0, low + (high - low) * min(shares))


class Workspaces:
    """Workspace of kernels by their shapes, as they were seen in micro-batches of two sizes.

    Args:
        small: Calls of a step and the workspace of each, in order.
        large: The same with larger micro-batches, or the same again.
    """

    def __init__(self, small: Sequence[tuple[Kernel, float]] = (), large: Sequence[tuple[Kernel, float]] = ()):
        self._seen: dict[_Kind, list[_Seen]] = {}
        self._known: dict[Kernel, float] = {}
        of_small, of_large = _by_kind(small), _by_kind(large)
        for kind, calls in of_large.items():
            others = of_small.get(kind, [])
            pairs = zip(others if len(others) == len(calls) else calls, calls, strict=True)
            most: dict[tuple[Kernel, Kernel], tuple[float, float]] = {}
            for (one, low), (other, high) in pairs:
                before = most.get((one, other), (0.0, 0.0))
                most[one, other] = max(low, before[0]), max(high, before[1])
            seen = [_Seen(both, num_bytes) for both, num_bytes in most.items() if max(num_bytes) > 0]
            if seen:
                self._seen[kind] = seen

    def __bool__(self) -> bool:
        return bool(self._seen)

    def of(self, func: Any, args: Any, kwargs: Any) -> float:
        """Bytes that this call needs beside tensors."""
        kernel = Kernel.of(func, args, kwargs)
        if kernel not in self._known:
            alike = self._seen.get(kernel[:3], ())
            self._known[kernel] = max((seen.at(kernel) for seen in alike), default=0.0)
        return self._known[kernel]


def _by_kind(calls: Sequence[tuple[Kernel, float]]) -> dict[_Kind, list[tuple[Kernel, float]]]:
    """Calls that differ in nothing but dimensions, in order."""
    found: dict[_Kind, list[tuple[Kernel, float]]] = {}
    for kernel, num_bytes in calls:
        found.setdefault(kernel[:3], []).append((kernel, num_bytes))
    return found


class _Asks(TorchDispatchMode):
    """Asks the allocator of a device about each operation."""

    def __init__(self, found: list[tuple[Kernel, float]], device: torch.device) -> None:
        super().__init__()
        self._found = found
        self._device = device
        self._allocator = getattr(torch, device.type)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._allocator.reset_peak_memory_stats(self._device)
        result = func(*args, **(kwargs or {}))
        most, now = self._allocator.max_memory_allocated(self._device), self._allocator.memory_allocated(self._device)
        self._found.append((Kernel.of(func, args, kwargs or {}), float(most - now)))
        return result


class _Marks(TorchDispatchMode):
    """Marks each operation in the record of the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels.append(Kernel.of(func, args, kwargs or {}))
        with record_function(f"{_MARK}{len(self.kernels) - 1}"):
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watching_kernels(device: torch.device) -> Iterator[list[tuple[Kernel, float]]]:
    """Within the block, operations are watched; at its end the list has each with its workspace in bytes."""
    found: list[tuple[Kernel, float]] = []
    if device.type != "cpu":
        with _Asks(found, device):
            yield found
        return
    marks = _Marks()
    with _quietly(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, marks:
        yield found
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    num_bytes = _workspaces(seen.profiler.kineto_results.events())
    found.extend((kernel, num_bytes.get(number, 0.0)) for number, kernel in enumerate(marks.kernels))


def _workspaces(events: Sequence[Any]) -> dict[int, float]:
    """By the number of a mark: the most that was allocated in it, beyond what was at its end."""
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    marks = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), int(event.name().removeprefix(_MARK)))
        for event in events
        if event.name().startswith(_MARK)
    )
    found, position = {}, 0
    for start, end, number in marks:
        while position < len(changes) and changes[position][0] < start:
            position += 1
        first = position
        while position < len(changes) and changes[position][0] <= end:
            position += 1
        if position > first:
            sums = list(itertools.accumulate(num_bytes for _, num_bytes in changes[first:position]))
            found[number] = max(0, *sums) - sums[-1]
    return found


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the profiler from printing that it begins, and that blocks go which it did not see come.

    The first is asked of its environment, the second is written by C++ straight to the standard error of the process.
    """
    name = "KINETO_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "99")
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        if not is_set:
            del os.environ[name]
