"""Functions that run side by side in one thread: each in a greenlet of its own, and one of them at a time.

A function pauses where it needs something of all the others (``meet``); when all are there, it is made of what they
brought, and they go on. What torch keeps for each thread is handed from one to the next, and so are the random numbers,
so that each function finds what it would find if it ran alone: modes, autocast, grad mode, the stream.

One thread and not many: each thread has memory of its own in the C library, and does not take what another has let go.

Nobody waits in backward. The graphs hang together through what was made at the meetings, so that the engine, which
waits for all gradients of a node, meets there by itself. It takes the node that was made last first, so that between
two meetings it finishes one function before the next.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch.utils._python_dispatch import _disable_current_modes

from bigbatch.stepping.generators import Generators
from bigbatch.stepping.normalization.thread_state import ThreadState


def this_worker() -> Worker | None:
    """The worker that runs now, also where its function has greenlets of its own; None elsewhere."""
    current: greenlet | None = getcurrent()
    while current is not None and not isinstance(current, Worker):
        current = current.parent
    return current


class Meeting(Protocol):
    """What workers meet for."""

    def meet(self, requests: list[Any]) -> Any:
        """What all of them get, made of what each has brought. In none of them."""
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


class Worker(greenlet):
    """A function that runs only when it is told to.

    Args:
        number: From 0.
        function: What it runs.
        device: That it computes on.
        around: What torch keeps for the thread while none of them runs.

    Attributes:
        request: What it brought to the meeting where it waits.
        returned: What the function returned.
        failure: What it raised.
        random: The state of the random number generators when it paused; None before it began.
        began: The same, when it began.
        paused: What ``Meeting.pause`` returned when it stopped.
    """

    def __init__(self, number: int, function: Callable[[], Any], device: torch.device, around: ThreadState):
        super().__init__(self._live)
        self.gr_context = contextvars.copy_context()  # else it begins with none
        self.number = number
        self.request: Any = None
        self.returned: Any = None
        self.failure: BaseException | None = None
        self.random: Generators | None = None
        self.began: Generators | None = None
        self.paused: Any = None
        self._device, self._around = device, around
        self._state: ThreadState | None = None
        self._inner: greenlet | None = None  # of the function's own, if it waits in one
        self._is_stopped = False
        self._function: Callable[[], Any] | None = function

    @property
    def is_done(self) -> bool:
        """Whether it has returned or failed."""
        return self.dead

    @property
    def has_not_paused(self) -> bool:
        """Whether nobody else has run since it began."""
        return self.random is None

    def run_on(self, reply: Any) -> None:
        """Let it run until it pauses or ends.

        Args:
            reply: What it gets from the meeting where it waits.
        """
        self.request = None
        self._change_to((self._inner or self).switch, reply)

    def meet(self, request: Any) -> Any:
        """Pause until all workers are there. Called in the function itself, with no frame of pybind11 in between."""
        if self._is_stopped:
            raise GreenletExit
        current = getcurrent()
        self.request, self._inner = request, None if current is self else current
        assert self.parent is not None
        # When it ends, it puts back all that autograd keeps for this thread.
        with torch.inference_mode(mode=False):
            return self.parent.switch()

    def _live(self, _: Any) -> None:
        """The life of the greenlet."""
        function, self._function = self._function, None
        assert function is not None
        try:
            self.returned = function()
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        """End it wherever it is; no ``except Exception`` of the user's stops that."""
        self._is_stopped = True
        if self:  # it has begun and is not at its end
            self._change_to((self._inner or self).throw, GreenletExit)
        self._inner = None
        self._function = self.request = self.failure = self.returned = None

    def _change_to(self, switch: Callable[[Any], Any], value: Any) -> None:
        try:
            if self._state is not None:
                self._state.put()
            switch(value)
            self._state = ThreadState(self._device) if self else None
        finally:
            self._around.put()


class Lockstep:
    """Runs functions side by side.

    Args:
        device: That they compute on.
        meeting: What they meet for.

    Attributes:
        is_running: Some function is not at its end.
        failed: Number of the function that has raised; None when it was none of them.
    """

    def __init__(self, device: torch.device, meeting: Meeting):
        self._device = device
        self._meeting = meeting
        self.is_running = False
        self.failed: int | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each function returned. If one raises, all are ended and it is raised here.

        Random numbers: the first function goes on where the generators are, the others have streams of their own, that
        follow from where they are. Afterwards the generators are where the first that drew numbers has left them.
        """
        start, around = Generators(self._device), ThreadState(self._device)
        workers = [Worker(number, function, self._device, around) for number, function in enumerate(functions)]
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
            for worker in workers:
                self._meeting.go_on(worker.paused)
                worker.paused = None  # it may hold what the worker will let go
                _random_numbers_of(worker, start, self._device)
                worker.run_on(reply)
                worker.random = Generators(self._device)
                if worker.failure is not None:
                    self._raise(worker)
                worker.paused = None if worker.is_done else self._meeting.pause(worker.request)
            if all(worker.is_done for worker in workers):
                break
            reply = self._met(workers)
        _leave_random_numbers(workers, start)

    def _raise(self, worker: Worker) -> None:
        self.failed = worker.number
        error, worker.failure = worker.failure, None
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
