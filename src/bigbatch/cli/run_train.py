"""What ``bigbatch train`` does: find the task, run it, print. This loads torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from bigbatch.cli.speaking import print_now, sayer, speaking
from bigbatch.cli.wanted import Wanted
from bigbatch.memory.measure import bytes_in_use
from bigbatch.reporting.comparison_text import peaks_text, runs_text, steps_text
from bigbatch.reporting.panel import LivePanel, PlainLines
from bigbatch.reporting.text import closing, preflight_text
from bigbatch.tasks.finding import has_variant
from bigbatch.training.checkpoint import Checkpoints, Found, newest, verified
from bigbatch.training.comparison import StepsComparison, compare_runs, compare_steps, direct_peak_bytes
from bigbatch.training.events import Listener, RunResult
from bigbatch.training.group import Group, joined
from bigbatch.training.log import JsonLog, TensorBoardLog, make_run_dir, save_result
from bigbatch.training.loop import Run
from bigbatch.training.preflight import preflight
from bigbatch.training.rank import Rank
from bigbatch.training.resuming import resume
from bigbatch.training.saving import Saver
from bigbatch.training.sharding import take_part
from bigbatch.training.switches import Switches
from bigbatch.training.task import Task

_CHECKPOINTS = "checkpoints"


def check(wanted: Wanted, *, num_steps: int) -> bool:
    """Make a pre-flight and print what it found."""
    rank = Rank.of()
    device = wanted.prepare(rank)
    with speaking(joined(rank, device, parallel=wanted.parallel)) as group:
        say = sayer(group)
        found = preflight(
            wanted.found(),
            num_steps=num_steps,
            device=device,
            memory_budget=wanted.memory_budget,
            micro_batch_size=wanted.micro_batch_size,
            listeners=_displays(group, device),
            group=group,
            switches=Switches(**wanted.switches),
        )
        say(preflight_text(found))
    return found.go or not group.is_first


@dataclass(frozen=True)
class Place:
    """Where a run is kept, as on the command line: ``--run-dir``, ``--resume``, ``--checkpoint-every``."""

    run_dir: Path | None = None
    resume: str | None = None
    checkpoint_every: int | None = None

    def folder(self, name: str) -> Path:
        """The folder of the run, which is made when it is not there.

        Args:
            name: Of the task.

        Raises:
            CheckpointError: There is no good checkpoint at the path that was given.
            TaskError: The folder holds another run, or cannot be made.
        """
        if self.resume is None or self.resume == "auto":
            return make_run_dir(self.run_dir, name, goes_on=self.resume is not None)
        checkpoint = verified(self.resume).path.absolute()
        of_run = checkpoint.parents[1]
        folder = self.run_dir or (of_run if checkpoint.parent.name == _CHECKPOINTS else None)
        return make_run_dir(folder, name, goes_on=folder is not None and folder.absolute() == of_run)

    def checkpoint(self, checkpoints: Checkpoints) -> Found | None:
        """What the run goes on from, if anything; called when nobody else can write there.

        Raises:
            CheckpointError: There are some, and none can be used.
        """
        if self.resume is None:
            return None
        return newest(checkpoints.folder) if self.resume == "auto" else verified(self.resume)


def train(wanted: Wanted, place: Place, *, tensorboard: bool, compare: bool) -> bool:
    """Train, save, print, and compare when asked; False when a comparison is out of its bounds."""
    rank = Rank.of()
    device = wanted.prepare(rank)
    with speaking(joined(rank, device, parallel=wanted.parallel)) as group:
        task = wanted.found()
        result = _trained(wanted, task, device, group, place, tensorboard=tensorboard)
    # The ranks have parted: the direct big batch is run by one process.
    return _compare(wanted, task, device, result) if compare and group.is_first else True


def _trained(
    wanted: Wanted, task: Task, device: torch.device, group: Group, place: Place, *, tensorboard: bool
) -> RunResult:
    say = sayer(group)
    run = Run(
        task,
        device=device,
        memory_budget=wanted.memory_budget,
        micro_batch_size=wanted.micro_batch_size,
        group=group,
        switches=Switches(**wanted.switches),
    )
    # Only now that all of it is built: a task that cannot be leaves no empty folder behind.
    folder = group.from_first(lambda: place.folder(task.name))
    with _open(folder / _CHECKPOINTS, group) as checkpoints:
        found = group.from_first(lambda: None if checkpoints is None else place.checkpoint(checkpoints))
        if found is not None:
            for path, why in found.refused:
                say(f"checkpoint {path} cannot be used: {why}")
            resume(run, found)
            say(f"goes on from {found.path}, which is as it was written")
        run.listeners += _displays(group, device)
        if group.is_first:
            run.listeners += _logs(folder, run.info.first_step, tensorboard=tensorboard)
        result = run.train(Saver(checkpoints, every=place.checkpoint_every))
    if group.is_first:
        files = save_result(folder, result, run.parts.model, run.parts.options.ema)
        say()
        for line in closing(result, [str(path) for path in [*files, folder / "log.jsonl"]]):
            say(line)
    elif group.is_sharded:
        take_part(run.parts.model)
    return result


@contextmanager
def _open(folder: Path, group: Group) -> Iterator[Checkpoints | None]:
    """The checkpoints, on the rank that writes them."""
    opened: list[Checkpoints] = []
    group.from_first(lambda: opened.append(Checkpoints(folder)))
    try:
        yield opened[0] if opened else None
    finally:
        for checkpoints in opened:
            checkpoints.close()


def _logs(folder: Path, first_step: int, *, tensorboard: bool) -> Iterator[Listener]:
    if tensorboard:
        yield TensorBoardLog(folder / "tensorboard", first_step=first_step)
    yield JsonLog(folder / "log.jsonl", first_step=first_step)


def _compare(wanted: Wanted, task: Task, device: torch.device, result: RunResult) -> bool:
    print_now("\nHow close to the direct big batch")
    direct_bytes = direct_peak_bytes(task, device=device)
    print_now(peaks_text(result.peak_bytes, direct_bytes, result.budget_bytes))
    all_is_well = result.budget_bytes is None or (result.peak_bytes or 0) <= result.budget_bytes
    steps = _compared_steps(wanted, task, device, result)
    if steps is not None:
        print_now(steps_text(steps))
        all_is_well &= steps.within
    if result.exactness != "exact" and direct_bytes is not None:
        runs = compare_runs(task, result.metrics, micro_batch_size=max(result.micro_batch_sizes), device=device)
        print_now(runs_text(runs, result.exactness))
        all_is_well &= runs.within
    return all_is_well


def _compared_steps(wanted: Wanted, task: Task, device: torch.device, result: RunResult) -> StepsComparison | None:
    """Steps of the task where a cut batch is exact; otherwise of its variant with GroupNorm, if it has one."""

    def compared(task: Task) -> StepsComparison:
        return compare_steps(task, micro_batch_size=max(result.micro_batch_sizes), device=device)

    # A run whose batches were in one piece is exact; the cut that is compared in its place need not be.
    found = compared(task) if result.exactness == "exact" else None
    if (found is not None and found.exactness == "exact") or not has_variant(wanted.task, "norm"):
        return found
    exact = wanted.found(norm="group")
    return compared(dataclasses.replace(exact, name=f"{exact.name} with GroupNorm"))


def _displays(group: Group, device: torch.device) -> list[Listener]:
    if not group.is_first:
        return []
    if sys.stdout.isatty():
        return [LivePanel(Console(), lambda: bytes_in_use(device))]
    return [PlainLines(print_now)]
