"""A hard limit on memory, so that a budget can be tried for real: what goes beyond it fails, on CPU too.

Without one, Linux promises more memory than it has, and ends a process that uses it, which nobody can catch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bigbatch.errors import OptionError, warn
from bigbatch.units import format_bytes, parse_bytes

_GRAIN_SIZE = 32768
"""Numbers that one thread takes at least, in torch's ``at::internal::GRAIN_SIZE``."""


class MemoryLimit:
    """A limit in force; a context manager that lifts it.

    Attributes:
        limit_bytes: The most that may be used: by the process, or on CUDA by torch's allocator.
        used_bytes: Of these, what was used already when the limit was set.
    """

    def __init__(self, limit_bytes: int, used_bytes: int, set_back: Callable[[], None]):
        self.limit_bytes = limit_bytes
        self.used_bytes = used_bytes
        self._set_back: Callable[[], None] | None = set_back

    def remove(self) -> None:
        """Go back to the limit from before, or to none. A second time, nothing happens."""
        set_back, self._set_back = self._set_back, None
        if set_back is not None:
            set_back()

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def limit_memory(amount: int | str, *, device: torch.device | str | None = None) -> MemoryLimit:
    """Let allocations fail that go beyond ``amount`` **more** than is used now.

    The amount does not hold what is there when the limit is set: the interpreter, its libraries, and every tensor made
    before. Set before the model is made, it is what ``memory_budget`` counts (parameters, gradients, optimizer state,
    activations) plus what that does not see: workspaces of kernels, and what the allocator rounds up or keeps.

    On CPU it is the limit of the process on its data (``RLIMIT_DATA``): a tensor too many raises the ``RuntimeError``
    of torch's allocator. Everything in the process counts, and a library that does not check may end the process:
    torch's threads do so when they start, and are therefore started first. On CUDA it is
    ``torch.cuda.set_per_process_memory_fraction``, which knows torch's own allocations only.

    >>> with limit_memory("1GiB", device="cpu"):
    ...     try:
    ...         torch.empty(2**33, dtype=torch.uint8)
    ...     except RuntimeError as error:
    ...         print(str(error).split(": ")[1])
    can't allocate memory

    Args:
        amount: Bytes, or a text such as ``"512MiB"``.
        device: Whose memory; None: the current CUDA device where there is one, else the CPU.

    Returns:
        A handle with ``remove()``, which is a context manager too.

    Raises:
        OptionError: The amount is no amount, or this system or device has no such limit.
    """
    num_bytes = parse_bytes(amount)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        return _limit_cuda(num_bytes, device)
    if device.type == "cpu" and sys.platform == "linux":
        return _limit_process(num_bytes)
    where = f"on {device.type}" if device.type != "cpu" else f"on {sys.platform}"
    raise OptionError(
        f"limit_memory(..., device={str(device)!r}): there is no hard limit {where}; it is there on CUDA, and for "
        f"the CPU on Linux. A memory_budget= holds everywhere."
    )


def _limit_cuda(num_bytes: int, device: torch.device) -> MemoryLimit:
    torch.cuda.init()
    torch.cuda.empty_cache()  # what is cached and free would come on top
    total = torch.cuda.get_device_properties(device).total_memory
    used, before = torch.cuda.memory_reserved(device), torch.cuda.get_per_process_memory_fraction(device)
    limit = min(used + num_bytes, total)
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    return MemoryLimit(limit, used, lambda: torch.cuda.set_per_process_memory_fraction(before, device))


def _limit_process(num_bytes: int) -> MemoryLimit:
    import resource

    _start_threads()
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    free = _free_bytes()  # is given out again without asking the system, so it is part of the amount
    if free > num_bytes:
        warn(
            f"The C library holds {format_bytes(free)} that are free and gives them out again, more than the limit of "
            f"{format_bytes(num_bytes)}. Set the limit before anything large is made."
        )
    used = data_bytes() - free
    limit = used + num_bytes if most == resource.RLIM_INFINITY else min(used + num_bytes, most)
    if limit <= used:
        raise OptionError(
            f"The process uses {format_bytes(used)}, and the system allows it {format_bytes(most)}, so there is "
            "nothing left to limit."
        )
    # Only the soft limit: the hard one could not be raised again.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    return MemoryLimit(limit, used, lambda: resource.setrlimit(resource.RLIMIT_DATA, (before, most)))


def data_bytes() -> int:
    """What Linux holds against ``RLIMIT_DATA``: private memory that this process may write to, touched or not."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


def _start_threads() -> None:
    """Let torch start its threads and take their buffers: one that cannot be started ends the process."""
    size = 2 * _GRAIN_SIZE * torch.get_num_threads()
    torch.ones(size).mul_(2.0)
    square = torch.ones(256, 256, requires_grad=True)
    (square @ square).sum().backward()  # of the matrix product and of autograd


_MALLOC_INFO_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of GNU's C library."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLOC_INFO_FIELDS)


def _free_bytes() -> int:
    """What the C library holds and does not use, after giving back what it can; 0 where it does not say."""
    gc.collect()
    library: Any = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library than GNU's, or one before 2.33
        library.malloc_trim(0)
        library.mallinfo2.restype = _MallocInfo
        return library.mallinfo2().fordblks
    return 0
