"""Runs whose every saved number is the step, so that one look tells whether a checkpoint is whole and of one step."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import bigbatch as bb
from bigbatch.training import weights
from bigbatch.training.loop import Run
from tests.training.tiny import Points, loss_fn


def marked_run(megabytes: float) -> Run:
    """A run that has made a step, of so many MB of weights, averages and moments of AdamW."""
    width = max(1, int(megabytes * 1e6 / (4 * 4 * 5)))
    task = bb.Task(
        model=lambda: nn.Sequential(nn.Linear(2, width), nn.Linear(width, 3)),
        train_data=lambda: Points(4),
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        ema=lambda model: torch.optim.swa_utils.AveragedModel(model),
        batch_size=4,
        name="marked",
    )
    run = Run(task)
    for record in run.steps():
        run.progress.add(record)
    return run


def mark(run: Run, step: int) -> None:
    """Put the number of the step into every tensor that is saved, and into the progress."""
    with torch.no_grad():
        for tensor in [*run.parts.model.state_dict().values(), *run.parts.options.ema.state_dict().values()]:
            tensor.fill_(step)
        for state in run.step.optimizers[0].state.values():
            for tensor in state.values():
                tensor.fill_(step)
    run.progress.num_steps = run.step.num_steps = step


def marks_in(path: Path) -> set[int]:
    """All numbers in the files of a checkpoint; one number, if it is of one step."""
    state = torch.load(path / "state.pt", weights_only=True)
    tensors = [*weights.read(path / "model.safetensors").values(), *weights.read(path / "ema.safetensors").values()]
    tensors += [tensor for one in state["optimizers"][0]["state"].values() for tensor in one.values()]
    found = {state["progress"]["num_steps"], state["step"]["num_steps"]}
    return found.union(*({int(tensor.min()), int(tensor.max())} for tensor in tensors))


class Child:
    """A process forked from this one, which has loaded torch; what it prints is lost, what it tells is heard.

    Args:
        work: Called in it with a function that tells a number.
    """

    def __init__(self, work: Callable[[Callable[[int], None]], object]):
        self._heard, tells = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = 1
            try:
                code = int(work(lambda number: os.write(tells, b"%d\n" % number)) or 0)
            finally:
                os._exit(code)
        os.close(tells)

    def wait_until_it_tells(self) -> None:
        """Return when the child has told its first number, or has ended."""
        select.select([self._heard], [], [])

    def kill_after(self, seconds: float) -> tuple[int | None, list[int]]:
        """Kill -9 after that time; the exit code if it ended before, and the numbers that it told."""
        deadline = time.monotonic() + seconds
        code = None
        while code is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))
            code = self._ended()
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            code = None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        os.set_blocking(self._heard, False)  # its own children may hold the other end a little longer
        with os.fdopen(self._heard, "rb") as heard:
            return code, [int(line) for line in (heard.read() or b"").split(b"\n")[:-1]]

    def _ended(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
