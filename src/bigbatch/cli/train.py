"""``bigbatch train``: what can be said on the command line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Norm(StrEnum):
    """Of a built-in task."""

    BATCH = "batch"
    GROUP = "group"
    LAYER = "layer"


class Precision(StrEnum):
    """Of the forward."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def train(
    task: Annotated[str, typer.Argument(metavar="TASK", help="digits, text, or file.py:name of a task of your own.")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in one optimizer step.")] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help='Such as "64MiB". The micro-batch size that fits is found by measuring.')
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples in one forward-backward, instead of measuring.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training data.")] = None,
    eval_batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a batch of the evaluation.")] = None,
    precision: Annotated[Precision | None, typer.Option(help="Of the forward (autocast).")] = None,
    norm: Annotated[Norm | None, typer.Option(help="Normalisation, for digits.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the model and of the order of the data.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it, cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for log and weights; without it, runs/TASK-date-time.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write curves for TensorBoard too.")] = False,
    check: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Only make so many steps, check them, and say go or what is wrong."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="After the run, show how close it comes to the direct big batch.")
    ] = False,
) -> None:
    """Train a task with its big batch inside a memory budget."""
    if check is not None and compare:
        raise typer.BadParameter("--check makes no run that --compare could compare; give one of them.")
    from bigbatch.cli import running

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
        all_is_well = running.train(wanted, run_dir=run_dir, tensorboard=tensorboard, compare=compare)
    raise typer.Exit(0 if all_is_well else 1)
