"""``bigbatch train``: what can be said on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bigbatch.errors import RunStopped


class NormName(StrEnum):
    """Of a built-in task."""

    BATCH = "batch"
    GROUP = "group"
    LAYER = "layer"


class PrecisionName(StrEnum):
    """Of the forward."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="digits, text, contrastive, or file.py:name of a task of your own.")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples in one optimizer step.")]
MemoryBudget = Annotated[str | None, typer.Option(help='Such as "64MiB". The fastest plan that fits is run.')]
MicroBatchSize = Annotated[
    int | None, typer.Option(min=1, help="Samples in one forward-backward; with a budget, the only size that is tried.")
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the training data.")]
EvalBatchSize = Annotated[int | None, typer.Option(min=1, help="Samples in a batch of the evaluation.")]
Precision = Annotated[PrecisionName | None, typer.Option(help="Of the forward (autocast).")]
Norm = Annotated[
    NormName | None, typer.Option(help="Normalisation: of digits, or of a function of yours with an argument norm.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Of the model and of the order of the data.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; without it, cuda where there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the CPU.")]
RunDir = Annotated[Path | None, typer.Option(help="Folder for log and weights; without it, runs/TASK-date-time.")]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="auto|PATH",
        help="auto: from the newest good checkpoint in --run-dir, or begin when there is none. PATH: from that one.",
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(min=1, metavar="STEPS", help="Save the run every so many steps; without it, every ten minutes."),
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write curves for TensorBoard too.")]
Check = Annotated[
    int | None,
    typer.Option(metavar="STEPS", min=1, help="Only make so many steps (10 or more), and say go or what is wrong."),
]
Compare = Annotated[
    bool, typer.Option("--compare", help="After the run, show how close it comes to the direct big batch.")
]


def train(
    task: TaskName,
    batch_size: BatchSize = None,
    memory_budget: MemoryBudget = None,
    micro_batch_size: MicroBatchSize = None,
    epochs: Epochs = None,
    eval_batch_size: EvalBatchSize = None,
    precision: Precision = None,
    norm: Norm = None,
    seed: Seed = None,
    device: Device = None,
    threads: Threads = None,
    run_dir: RunDir = None,
    resume: Resume = None,
    checkpoint_every: CheckpointEvery = None,
    tensorboard: TensorBoard = False,
    check: Check = None,
    compare: Compare = False,
) -> None:
    """Train a task with its big batch inside a memory budget."""
    if check is not None and compare:
        raise typer.BadParameter("--check makes no run that --compare could compare; give one of them.")
    if check is not None and (resume is not None or checkpoint_every is not None):
        raise typer.BadParameter("--check keeps nothing; leave --resume and --checkpoint-every out.")
    if resume == "auto" and run_dir is None:
        raise typer.BadParameter("--resume auto needs --run-dir, the folder of the run that is to go on.")
    from bigbatch.cli import running  # loads torch

    wanted = running.Wanted(
        task=task,
        variant={} if norm is None else {"norm": norm.value},
        changes={
            "batch_size": batch_size,
            "epochs": epochs,
            "eval_batch_size": eval_batch_size,
            "precision": precision and precision.value,
            "seed": seed,
        },
        memory_budget=memory_budget,
        micro_batch_size=micro_batch_size,
        device=device,
        threads=threads,
    )
    if check is not None:
        all_is_well = running.check(wanted, num_steps=check)
    else:
        place = running.Place(run_dir, resume, checkpoint_every)
        with _exit_when_stopped():
            all_is_well = running.train(wanted, place, tensorboard=tensorboard, compare=compare)
    raise typer.Exit(0 if all_is_well else 1)


@contextmanager
def _exit_when_stopped() -> Iterator[None]:
    """Say that the run was stopped, and exit as a shell says it of a process that a signal ended: 143 or 130."""
    try:
        yield
    except RunStopped as stopped:
        print(f"bigbatch: {stopped} To go on, give --run-dir {stopped.path.parents[1]} --resume auto.", flush=True)
        raise typer.Exit(128 + stopped.signal_number) from None
