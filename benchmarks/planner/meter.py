"""Two meters of the real peak of a step, which share nothing with ``bigbatch.memory`` or with each other.

``peak_of`` replays what torch's CPU allocator did, as ``torch.profiler`` records it: every block with its address, also
those that a kernel needs only while it runs. ``process_peak`` asks the operating system what a fresh process held.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

Step = Callable[[], Any]

_MEASURED = "benchmarks.planner.meter: the measured step"
# Every larger block becomes a mapping of its own, which goes back to the system when it is freed.
_GIVE_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """What a step held at most, in bytes.

    Attributes:
        peak_bytes: All three below together.
        resident_bytes: Storages found in what was given, when the step began.
        unseen_bytes: Blocks that a step before had allocated and that were still there, but not found in what was
            given: what the step keeps to itself, or caches of libraries.
        above_bytes: The most that the step held beyond what was there when it began.
        largest_block: The largest that it allocated.
    """

    peak_bytes: int
    resident_bytes: int
    unseen_bytes: int
    above_bytes: int
    largest_block: int


class _Event(NamedTuple):
    """A block came (``num_bytes`` > 0) or went, at a time in nanoseconds since 1970."""

    time: int
    address: int
    num_bytes: int


def peak_of(step: Step, *resident: Any, warm_up: int = 1) -> Peak:
    """The peak of a steady step on CPU, from the events of torch's allocator.

    >>> held = torch.zeros(1000)
    >>> peak_of(lambda: held + 1, held).peak_bytes
    8000

    Args:
        step: Runs one step; it is called ``warm_up`` times before it is measured.
        resident: What is there when a step begins: tensors (and their gradients), containers, models, optimizers
            and other objects (their attributes).

    The recorder says nothing of a block that goes if it did not see it come. So it watches the steps before, too, and
    what is older is watched by weak references.
    """
    freed: list[_Event] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(warm_up):
            step()
        gc.collect()
        storages = {storage.data_ptr(): storage for storage in storages_in(*resident)}
        sizes = {address: storage.nbytes() for address, storage in storages.items()}
        references = [_watched(storage, freed) for storage in storages.values()]
        del storages
        with record_function(_MEASURED):
            step()
    references.clear()  # From here on nothing of it is of interest.
    return _replayed(profiler, sizes, freed)


def held_by(make: Callable[[], Any]) -> tuple[Any, int]:
    """What a function makes, and the bytes that it has allocated and not given back, in C++ too.

    >>> held_by(lambda: torch.zeros(1000))[1]
    4000
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function(_MEASURED):
        made = make()
    alive: dict[int, int] = {}
    _changes(sorted(_recorded(profiler)[0]), alive)
    return made, sum(alive.values())


def _watched(storage: torch.UntypedStorage, freed: list[_Event]) -> weakref.ref[torch.UntypedStorage]:
    address, num_bytes = storage.data_ptr(), storage.nbytes()
    return weakref.ref(storage, lambda _: freed.append(_Event(time.time_ns(), address, -num_bytes)))


def _replayed(profiler: profile, resident: Mapping[int, int], freed: list[_Event]) -> Peak:
    """The running sum over all events of the measured step."""
    events, (start, end) = _recorded(profiler)
    alive: dict[int, int] = {}
    _changes([event for event in sorted(events) if event.time < start], alive)
    events = sorted([*events, *(event for event in freed if event.address not in alive)])
    unseen = sum(num_bytes for address, num_bytes in alive.items() if address not in resident)
    alive |= resident
    changes = _changes([event for event in events if start <= event.time <= end], alive)
    above, total = max(itertools.accumulate(changes, initial=0)), sum(resident.values())
    return Peak(total + unseen + above, total, unseen, above, max(changes, default=0))


def _changes(events: list[_Event], alive: dict[int, int]) -> list[int]:
    """By how many bytes each event changes the sum; ``alive``, bytes by address, is kept up to date.

    What is not alive cannot go. The recorder may know the address of an older block from an earlier recording, and then
    says the size of that time, after a weak reference has said that the block goes.
    """
    changes = []
    for event in events:
        if event.num_bytes > 0:
            alive[event.address] = event.num_bytes
            changes.append(event.num_bytes)
        else:
            changes.append(-alive.pop(event.address, 0))
    return changes


def _recorded(profiler: profile) -> tuple[list[_Event], tuple[int, int]]:
    """All blocks that came and went, in any order, and when the measured step began and ended."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events, span = [], None
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.tag == _EventType.Allocation:
            fields: Any = node.extra_fields  # of this kind of event
            if fields.device.type == "cpu":
                events.append(_Event(node.start_time_ns, fields.ptr, fields.alloc_size))
        elif node.name == _MEASURED:
            span = node.start_time_ns, node.end_time_ns
    assert span is not None
    return events, span


def storages_in(*values: Any) -> list[torch.UntypedStorage]:
    """Every storage on CPU that is reached from these, once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors_in(values, {}):
        if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes():
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    return list(found.values())


def _tensors_in(value: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, str | bytes | int | float | type | None):
        return
    seen[id(value)] = value  # Kept, so that its id is not given to another one meanwhile.
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _tensors_in(inner, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, ModuleType | FunctionType):
        yield from _tensors_in(vars(value), seen)  # Of a module or an optimizer, too


@dataclasses.dataclass(frozen=True)
class ProcessPeak:
    """What a process held at most while it built and ran a step, in bytes of physical memory.

    Attributes:
        peak_bytes: Beyond ``baseline_bytes``.
        baseline_bytes: Held before anything was built: the interpreter and the libraries, after a first use.
        was_reset: The system let us begin the peak again, so it is that of the last step; else of all steps.
    """

    peak_bytes: int
    baseline_bytes: int
    was_reset: bool


def process_peak(
    build: Callable[[], Step], *, warm: Callable[[], Any] | None = None, touch_all: bool = False
) -> ProcessPeak:
    """The peak of a steady step, in a fresh process.

    The system gives a page when it is first written to, so what is allocated and never used is not held. oneDNN's LSTM
    asks for far more than it writes, and there the two meters agree only with ``touch_all``.

    Args:
        build: Makes everything and returns the step, which is called twice. It is sent by pickle, so it is a function
            of a module (not of the script that runs), or a ``functools.partial`` of one.
        warm: Uses the libraries before anything is counted, so that what they keep is not counted; None: build, and
            run one step.
        touch_all: Let the C library (glibc) write to every block that it hands out.

    Raises:
        RuntimeError: The process failed; with what it wrote.
    """
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    # Blocks are filled with this byte, inverted: with zeros.
    touch = {"MALLOC_PERTURB_": "255"} if touch_all else {}
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks.planner import meter; meter._measure_this_process()"],
        input=pickle.dumps((build, warm)),
        capture_output=True,
        env={**os.environ, **_GIVE_BACK, **touch, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"The measured process ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")
    return ProcessPeak(**json.loads(done.stdout.splitlines()[-1]))


def _measure_this_process() -> None:
    """What runs in the fresh process: read the functions, run them, print the result as JSON."""
    torch.set_num_threads(1)
    build, warm = pickle.load(sys.stdin.buffer)
    if warm is None:
        build()()
    else:
        warm()
    _give_back()
    baseline = _status_bytes("VmRSS")
    step = build()
    step()
    _give_back()
    was_reset = _reset_high_water_mark()
    step()
    peak = _status_bytes("VmHWM")
    print(json.dumps(dataclasses.asdict(ProcessPeak(peak - baseline, baseline, was_reset))))


def _give_back() -> None:
    """Return to the system what is free."""
    import ctypes

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}.")
