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
from bigbatch.training import resuming, sharded_files
from bigbatch.training.checkpoint import Checkpoints, paths_in
from bigbatch.values import check_positive

if TYPE_CHECKING:
    from bigbatch.training.loop import Run
    from bigbatch.training.notices import Notices

SECONDS_BETWEEN = 600.0
SECONDS_OF_AN_ECHO = 5.0
"""Whoever ends a job of several ranks often tells both the processes and their launcher, which tells them again."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Saver:
    """Saves a run between two steps. On several ranks all of them have one, and do it after the same step.

    Args:
        checkpoints: Where to; None on all ranks but the first. Under FSDP2 they write to its folder too.
        every: Steps from one checkpoint to the next; None: ten minutes. With it, or when there is a checkpoint
            already, the end of the run is saved too.
        seconds_between: Instead of the ten minutes.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, *, every: int | None = None, seconds_between: float = SECONDS_BETWEEN
    ):
        if every is not None:
            check_positive("every", every)
        self.checkpoints = checkpoints
        self.every = every
        self.seconds_between = seconds_between
        self._last = time.monotonic()
        self._stop: int | None = None
        self._notices: Notices | None = None
        self._seconds_of_an_echo = 0.0
        self._heard_at = 0.0

    @contextmanager
    def at_work(self, run: Run) -> Iterator[None]:
        """Listen for SIGTERM and Ctrl-C. The first one waits for the end of the step, a second one stops at once.

        Signals can only be heard in the main thread; in another one they are left as they are.

        Raises:
            CheckpointError: The state of the run cannot be saved.
        """
        resuming.check_can_be_saved(run)
        self._seconds_of_an_echo = SECONDS_OF_AN_ECHO if run.group.world_size > 1 else 0.0
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
        if self._stop is None:
            self._stop, self._heard_at = number, time.monotonic()
            if self._seconds_of_an_echo:
                return
        elif time.monotonic() - self._heard_at < self._seconds_of_an_echo:
            return
        for other in _SIGNALS:
            if signal.getsignal(other) == self._heard:
                signal.signal(other, signal.SIG_DFL)
        if self._seconds_of_an_echo:
            signal.raise_signal(number)

    def after_step(self, run: Run) -> None:
        """Save the run if it is time.

        Raises:
            CheckpointError: It cannot be saved.
            RunStopped: It was told to stop, and is saved.
        """
        step, total = run.progress.num_steps, run.parts.total_steps
        due = self._due(run, step)
        if "stop" in due and step < total:
            path = self._save(run)
            raise RunStopped(
                f"Stopped by {signal.Signals(due['stop']).name} after step {step} of {total}, and saved in {path}.",
                signal_number=due["stop"],
                path=path,
            )
        by_number = self.every is not None and step % self.every == 0
        if by_number or "save" in due or (step == total and self._saves_the_end(run)):
            self._save(run)

    def _due(self, run: Run, step: int) -> dict[str, int]:
        notices = self._notices = self._notices or run.group.notices()
        if self._stop is not None:
            notices.tell("stop", self._stop, step=step)
        is_late = self.every is None and time.monotonic() - self._last >= self.seconds_between
        # The clock of one rank is enough: with those of several, some would save and some would not.
        if is_late and run.group.is_first:
            notices.tell("save", step=step)
        return notices.due(step=step)

    def _saves_the_end(self, run: Run) -> bool:
        return self.every is not None or run.group.from_first(lambda: bool(paths_in(self._writer.folder)))

    def _save(self, run: Run) -> Path:
        run.bring_up_to_date()
        step, parts, about = run.progress.num_steps, resuming.parts_of(run), resuming.about(run)
        if run.group.is_sharded:
            folder = run.group.from_first(lambda: self._writer.begin(step, parts))
            by_ranks = sharded_files.write(resuming.spread_of(run), folder, run.group)
            path = run.group.from_first(
                lambda: self._writer.finish(folder, step, parts, about=about, by_ranks=by_ranks)
            )
        else:
            path = run.group.from_first(lambda: self._writer.save(step, parts, about=about))
        self._last = time.monotonic()
        return path

    @property
    def _writer(self) -> Checkpoints:
        assert self.checkpoints is not None, "Only rank 0 writes."
        return self.checkpoints
