"""Functions that run side by side in one order: each in a thread of its own, and one of them at a time.

A function pauses where it needs something of all the others (``meet``); when all are there, it is made of what they
brought, and they go on. What torch keeps for each thread or for the process is handed from one to the next, so that
each function finds what it would find if it ran alone: modes, autocast, grad mode, the stream, and random numbers.

No thread waits in backward. The graphs hang together through what was made at the meetings, so that the engine, which
waits for all gradients of a node, meets there by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from bigbatch.stepping.generators import Generators

_here = threading.local()
_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]


class _StoppedError(BaseException):
    """Ends a function that another one's failure has made useless; no ``except Exception`` of the user's stops it."""


def this_worker() -> Worker | None:
    """The worker whose thread this is; None elsewhere."""
    return getattr(_here, "worker", None)


class Meeting(Protocol):
    """What workers meet for."""

    def meet(self, requests: list[Any]) -> Any:
        """What all of them get, made of what each has brought. In the main thread."""
        ...

    def pause(self, request: Any) -> Any:
        """A worker has stopped at a meeting; what is returned is given to ``go_on`` before it runs again."""
        ...

    def go_on(self, paused: Any) -> None:
        """The worker is about to run again."""
        ...

    def differ(self, found: dict[int, Any]) -> Exception:
        """What to raise when workers meet for different things.

        Args:
            found: By number of a worker what it has brought; None where it came to its end.
        """
        ...


class Worker:
    """A function in a thread of its own, which runs only when it is told to.

    Attributes:
        number: From 0.
        is_done: It has returned or failed.
        request: What it brought to the meeting where it waits.
        returned: What the function returned.
        error: What it raised.
        random: The state of the random number generators when it paused; None before it began.
        began: The same, when it began.
        paused: What ``Meeting.pause`` returned when it stopped.
        sequence: Number of the autograd node that it would make next.
    """

    def __init__(self, number: int, function: Callable[[], Any], surroundings: _Surroundings):
        self.number = number
        self.is_done = False
        self.request: Any = None
        self.returned: Any = None
        self.error: BaseException | None = None
        self.random: Generators | None = None
        self.began: Generators | None = None
        self.paused: Any = None
        self.sequence = 0
        self._count_from = 0
        self._reply: Any = None
        self._is_stopped = False
        self._function: Callable[[], Any] | None = function
        self._surroundings = surroundings
        # Queues and not locks: an interrupt may fall between any two lines, and a token too many does no harm.
        self._go: SimpleQueue[None] = SimpleQueue()
        self._back: SimpleQueue[None] = SimpleQueue()
        # A thread does not inherit context variables.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run,), daemon=True, name=f"bigbatch micro-batch {number + 1}"
        )

    def run_on(self, reply: Any, count_from: int) -> None:
        """Let it run until it pauses or ends.

        Args:
            reply: What it gets from the meeting where it waits.
            count_from: Nodes of autograd that it makes are numbered from here at least. The engine takes the highest
                number first, and each thread counts for itself: with rising ranges backward finishes one worker before
                the next, and with the same ones it would go through all of them layer by layer.
        """
        self._reply, self.request, self._count_from = reply, None, count_from
        if self._thread.ident is None:
            self._thread.start()
        self._go.put(None)
        self._back.get()

    def meet(self, request: Any) -> Any:
        """Pause until all workers are there. In the worker's own thread."""
        if not self._is_stopped:
            self.request = request
            self._pause()
        if self._is_stopped:
            raise _StoppedError
        self._count_up()
        reply, self._reply = self._reply, None
        return reply

    def _pause(self) -> None:
        self.sequence = _AUTOGRAD._get_sequence_nr()
        self._back.put(None)
        self._go.get()

    def _run(self) -> None:
        self._go.get()
        try:
            if not self._is_stopped and self._function is not None:
                _here.worker = self
                self._surroundings.adopt()
                self._count_up()
                self.returned = self._function()
        except BaseException as error:
            self.error = error
        self._function = None
        self.is_done = True
        self.sequence = _AUTOGRAD._get_sequence_nr()
        self._back.put(None)

    def _count_up(self) -> None:
        missing = self._count_from - _AUTOGRAD._get_sequence_nr()
        if missing > 0:
            with torch.enable_grad(), _disable_current_modes():
                number = torch.zeros((), requires_grad=True)
                for _ in range(missing):
                    number.view(())

    def stop(self) -> None:
        """End it wherever it is. Afterwards it has no thread."""
        self._is_stopped = True
        if self._thread.ident is not None:
            self._go.put(None)  # for one that pauses now, or is about to
            self._thread.join()
        self._function = self._reply = self.request = self.error = self.returned = None


class _Surroundings:
    """What torch keeps for each thread, as it is in the thread that makes this.

    Args:
        device: That the functions compute on.
    """

    def __init__(self, device: torch.device):
        self._grad = torch.is_grad_enabled()
        types = dict.fromkeys(("cpu", device.type))
        self._autocast = [(t, torch.get_autocast_dtype(t)) for t in types if torch.is_autocast_enabled(t)]
        self._cache = torch.is_autocast_cache_enabled()
        self._dispatch = _get_current_dispatch_mode_stack()
        self._function = _get_current_function_mode_stack()
        self._hooks = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def adopt(self) -> None:
        """Make it so in this thread, for good: the thread ends with its function."""
        torch.set_grad_enabled(self._grad)
        for device_type, dtype in self._autocast:
            torch.set_autocast_enabled(device_type, True)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
            torch.cuda.set_stream(self._stream)
        if self._hooks is not None:
            _AUTOGRAD._push_saved_tensors_default_hooks(*self._hooks)
        # Pushed and not entered: what a mode does when it is entered, the main thread has done.
        for mode in self._function:
            _push_function_mode(mode)
        for mode in self._dispatch:
            _push_dispatch_mode(mode)


class Lockstep:
    """Runs functions side by side.

    Args:
        device: That they compute on.
        meeting: What they meet for.
        depth_first: Let backward finish one function before the next, between two meetings.

    Attributes:
        is_running: Some function is not at its end.
        failed: Number of the function that has raised; None when it was none of them.
    """

    def __init__(self, device: torch.device, meeting: Meeting, *, depth_first: bool = False):
        self._device = device
        self._meeting = meeting
        self._depth_first = depth_first
        self.is_running = False
        self.failed: int | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each function returned. If one raises, all are ended and it is raised here; no thread is left.

        Random numbers: the first function goes on where the generators are, the others have streams of their own, that
        follow from where they are. Afterwards the generators are where the first that drew numbers has left them.
        """
        surroundings, start = _Surroundings(self._device), Generators(self._device)
        workers = [Worker(number, function, surroundings) for number, function in enumerate(functions)]
        self.is_running = True
        try:
            self._until_all_are_done(workers, start)
            return [worker.returned for worker in workers]
        finally:
            self.is_running = False
            for worker in workers:
                self._end(worker)

    def _end(self, worker: Worker) -> None:
        with contextlib.suppress(Exception):  # memory may be short; the worker ends all the same
            if not worker.is_done:
                self._meeting.go_on(worker.paused)
        worker.stop()

    def _until_all_are_done(self, workers: list[Worker], start: Generators) -> None:
        reply: Any = None
        while True:
            count_from = 0
            for worker in workers:
                self._meeting.go_on(worker.paused)
                worker.paused = None  # it may hold what the worker will let go
                _random_numbers_of(worker, start, self._device)
                worker.run_on(reply, count_from)
                worker.random = Generators(self._device)
                if worker.error is not None:
                    self._raise(worker)
                worker.paused = None if worker.is_done else self._meeting.pause(worker.request)
                count_from = worker.sequence if self._depth_first else 0
            if all(worker.is_done for worker in workers):
                break
            reply = self._met(workers)
        _leave_random_numbers(workers, start)

    def _raise(self, worker: Worker) -> None:
        self.failed = worker.number
        error, worker.error = worker.error, None
        try:
            raise error  # pyright: ignore[reportGeneralTypeIssues]
        finally:
            del error  # its traceback holds this frame, and all that the function has computed

    def _met(self, workers: list[Worker]) -> Any:
        requests = [worker.request for worker in workers]
        if any(request is None for request in requests):
            raise self._meeting.differ(dict(enumerate(requests)))
        return self._meeting.meet(requests)


def _random_numbers_of(worker: Worker, start: Generators, device: torch.device) -> None:
    """Set the generators to where the worker has left them, or where it begins."""
    if worker.random is not None:
        worker.random.restore()
        return
    start.restore()
    if worker.number > 0:
        with _disable_current_modes():
            text = bytes(torch.get_rng_state().numpy()) + worker.number.to_bytes(8, "big")
            if device.type == "cuda":
                text += bytes(torch.cuda.get_rng_state(device).numpy())
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
    worker.began = Generators(device)


def _leave_random_numbers(workers: list[Worker], start: Generators) -> None:
    for worker in workers:
        if worker.random is not None and worker.began is not None:
            worker.random.restore()
            if worker.began.were_used():
                return
    start.restore()
