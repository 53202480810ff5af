"""``bigbatch bench``: what can be said on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigbatch.cli.train import Device, Norm, Precision, Seed, TaskName, Threads

BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples in a big batch; without it, the task's.")]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        help='Such as "8GiB". Plans are made for it; on CUDA what needs more fails, on CPU it is marked. Without it, '
        "plans have room for half of the activations of the big batch."
    ),
]
MicroBatchSizes = Annotated[
    str | None,
    typer.Option(metavar="SIZES", help='Of the big batch, such as "32,16,8"; without it, a quarter and an eighth.'),
]
SmallerBatches = Annotated[
    str | None, typer.Option(metavar="SIZES", help="Batches to compare with, each at once; without it, the half.")
]
Recompute = Annotated[str, typer.Option(metavar="POLICIES", help="What is recomputed: some of none,all,planned.")]
Rounds = Annotated[int, typer.Option(min=1, help="Big batches that each way trains on, at most.")]
Minutes = Annotated[float, typer.Option(min=0.0, help="No round is begun that would end later than this.")]
TargetLoss = Annotated[
    float | None, typer.Option(help="Tell the time to this loss; without it, to the lowest that all ways reach.")
]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Pixels on each side of the images of resnet50.")]
ImageFolder = Annotated[
    Path | None,
    typer.Option("--images", help="Folder with a folder of images for each class; without it, images are made."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; without it, runs/bench-TASK-date-time.")]
Pictures = Annotated[bool, typer.Option(help="Draw memory.png and loss.png, where matplotlib is installed.")]


def bench(
    task: TaskName,
    batch_size: BatchSize = None,
    memory_budget: MemoryBudget = None,
    micro_batch_sizes: MicroBatchSizes = None,
    smaller_batches: SmallerBatches = None,
    recompute: Recompute = "none,all,planned",
    rounds: Rounds = 40,
    minutes: Minutes = 8.0,
    target_loss: TargetLoss = None,
    image_size: ImageSize = None,
    images: ImageFolder = None,
    norm: Norm = None,
    precision: Precision = None,
    seed: Seed = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    pictures: Pictures = True,
) -> None:
    """Measure the ways to make a big batch's step side by side: speed, memory, gradient, loss."""
    from bigbatch.cli import run_bench  # loads torch
    from bigbatch.cli.wanted import Wanted

    variant = {
        "norm": norm and norm.value,
        "image_size": image_size,
        "images": None if images is None else str(images),
    }
    wanted = Wanted(
        task=task,
        variant={name: value for name, value in variant.items() if value is not None},
        changes={"batch_size": batch_size, "precision": precision and precision.value, "seed": seed},
        memory_budget=memory_budget,
        device=device,
        threads=threads,
    )
    run_bench.run(
        wanted,
        folder=out,
        pictures=pictures,
        num_rounds=rounds,
        seconds=60 * minutes,
        target_loss=target_loss,
        micro_batch_sizes=_sizes("--micro-batch-sizes", micro_batch_sizes),
        smaller_batch_sizes=_sizes("--smaller-batches", smaller_batches),
        policies=tuple(map(str.strip, recompute.split(","))),
    )


def _sizes(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{option} {text}: these are whole numbers with commas between, such as 32,16."
        ) from None
