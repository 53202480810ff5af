"""When a run is saved: every so many steps, after some minutes, at its end, and when a signal tells it to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.errors import RunStopped
from bigbatch.training import resuming
from bigbatch.training.checkpoint import Checkpoints, paths_in
from bigbatch.values import check_positive

if TYPE_CHECKING:
    from bigbatch.training.loop import Run

SECONDS_BETWEEN = 600.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Saver:
    """Saves a run between two steps.

    Args:
        checkpoints: Where to.
        every: Steps from one checkpoint to the next; None: ten minutes. With it, or when there is a checkpoint
            already, the end of the run is saved too.
        seconds_between: Instead of the ten minutes.
    """

    def __init__(self, checkpoints: Checkpoints, *, every: int | None = None, seconds_between: float = SECONDS_BETWEEN):
        if every is not None:
            check_positive("every", every)
        self.checkpoints = checkpoints
        self.every = every
        self.seconds_between = seconds_between
        self._last = time.monotonic()
        self._stop: int | None = None

    @contextmanager
    def at_work(self, run: Run) -> Iterator[None]:
        """Listen for SIGTERM and Ctrl-C. The first one waits for the end of the step, a second one stops at once.

        Signals can only be heard in the main thread; in another one they are left as they are.

        Raises:
            CheckpointError: The state of the run cannot be saved.
        """
        resuming.check_can_be_saved(run)
        self._last = time.monotonic()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # What is ignored stays so: a shell lets its jobs in the background ignore Ctrl-C.
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._heard) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: it was set by something else than Python, and Python cannot put it back.
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _heard(self, number: int, frame: Any) -> None:
        self._stop = number
        for other in _SIGNALS:
            if signal.getsignal(other) == self._heard:
                signal.signal(other, signal.SIG_DFL)

    def after_step(self, run: Run) -> None:
        """Save the run if it is time.

        Raises:
            CheckpointError: It cannot be saved.
            RunStopped: It was told to stop, and is saved.
        """
        step, total = run.progress.num_steps, run.parts.total_steps
        if self._stop is not None and step < total:
            path = self._save(run)
            name = signal.Signals(self._stop).name
            raise RunStopped(
                f"Stopped by {name} after step {step} of {total}, and saved in {path}.",
                signal_number=self._stop,
                path=path,
            )
        if self._is_due(step) or (step == total and self._saves_the_end()):
            self._save(run)

    def _is_due(self, step: int) -> bool:
        if self.every is not None:
            return step % self.every == 0
        return time.monotonic() - self._last >= self.seconds_between

    def _saves_the_end(self) -> bool:
        return self.every is not None or bool(paths_in(self.checkpoints.folder))

    def _save(self, run: Run) -> Path:
        run.bring_up_to_date()
        path = self.checkpoints.save(run.progress.num_steps, resuming.parts_of(run), about=resuming.about(run))
        self._last = time.monotonic()
        return path
