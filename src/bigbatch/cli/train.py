"""``bigbatch train``: what can be said on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bigbatch.tasks.names import TASK_HELP
from bigbatch.training.rank import Rank


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


class ParallelName(StrEnum):
    """How several ranks train one model."""

    DDP = "ddp"
    FSDP2 = "fsdp2"


TaskName = Annotated[str, typer.Argument(metavar="TASK", help=TASK_HELP)]
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
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that load the data.")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile: the first steps take longer.")]
ChannelsLast = Annotated[
    bool, typer.Option("--channels-last", help="Weights of convolutions lie channels last in memory.")
]
CudnnBenchmark = Annotated[
    bool, typer.Option("--cudnn-benchmark", help="cuDNN tries its algorithms at each new shape.")
]
Tf32 = Annotated[bool, typer.Option("--tf32", help="On CUDA, products in float32 round their inputs to 10 bits.")]
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
NumRanks = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node",
        min=1,
        metavar="RANKS",
        help="Processes that share each batch: one for each card, or on CPU.",
    ),
]
ParallelKind = Annotated[
    ParallelName,
    typer.Option("--parallel", help="ddp: each rank has all weights; fsdp2: they are spread over the ranks."),
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
    context: typer.Context,
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
    nproc_per_node: NumRanks = None,
    parallel: ParallelKind = ParallelName.DDP,
    workers: Workers = None,
    compile: Compile = False,
    channels_last: ChannelsLast = False,
    cudnn_benchmark: CudnnBenchmark = False,
    tf32: Tf32 = False,
    run_dir: RunDir = None,
    resume: Resume = None,
    checkpoint_every: CheckpointEvery = None,
    tensorboard: TensorBoard = False,
    check: Check = None,
    compare: Compare = False,
) -> None:
    """Train a task with its big batch inside a memory budget."""
    _check_goes_together(check, compare, resume, checkpoint_every, run_dir)
    _start_ranks(context.obj, nproc_per_node, device)
    from bigbatch.cli import run_train  # loads torch
    from bigbatch.cli.wanted import Wanted

    changes = dict(batch_size=batch_size, epochs=epochs, eval_batch_size=eval_batch_size, seed=seed)
    wanted = Wanted(
        task=task,
        variant={} if norm is None else {"norm": norm.value},
        changes={**changes, "num_workers": workers, "precision": precision and precision.value},
        memory_budget=memory_budget,
        micro_batch_size=micro_batch_size,
        device=device,
        threads=threads,
        parallel=parallel.value,
        switches={"compile": compile, "channels_last": channels_last, "cudnn_benchmark": cudnn_benchmark, "tf32": tf32},
    )
    if check is not None:
        raise typer.Exit(0 if run_train.check(wanted, num_steps=check) else 1)
    place = run_train.Place(run_dir, resume, checkpoint_every)
    raise typer.Exit(0 if run_train.train(wanted, place, tensorboard=tensorboard, compare=compare) else 1)


def _check_goes_together(
    check: int | None, compare: bool, resume: str | None, checkpoint_every: int | None, run_dir: Path | None
) -> None:
    if check is not None and compare:
        raise typer.BadParameter("--check makes no run that --compare could compare; give one of them.")
    if check is not None and (resume is not None or checkpoint_every is not None):
        raise typer.BadParameter("--check keeps nothing; leave --resume and --checkpoint-every out.")
    if resume == "auto" and run_dir is None:
        raise typer.BadParameter("--resume auto needs --run-dir, the folder of the run that is to go on.")


def _start_ranks(arguments: Sequence[str], wanted: int | None, device: str | None) -> None:
    """Run the same command on several ranks, if that is wanted and this is none of them, and exit with them."""
    num_ranks = Rank.of().to_start(wanted)
    if num_ranks:
        from bigbatch.cli.devices import device_named  # loads torch
        from bigbatch.cli.launching import launch

        if device is not None:
            device_named(device)  # told once, and not by each rank
        raise typer.Exit(launch(arguments, num_ranks))
