"""``bigbatch plan``: what can be said on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigbatch.tasks.names import PLAN_HELP

PlanName = Annotated[str, typer.Argument(metavar="TASK", help=PLAN_HELP)]
MemoryBudget = Annotated[str, typer.Option(help='Such as "8GiB".')]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples in one optimizer step; without it, the task's.")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Hold it at this; without it, it is chosen.")]
Recompute = Annotated[
    str | None,
    typer.Option(
        metavar="all|none|NAMES",
        help='Hold it; without it, it is chosen. Names with commas, groups with +: "blocks.0,blocks.1+blocks.2".',
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="cpu|cuda", help="Where it will run; without it, cuda where there is one, for a card and for a shape."
    ),
]
CardName = Annotated[str | None, typer.Option("--card", help="Estimate times for this card, such as rtx4090.")]
DevicePeak = Annotated[
    str | None, typer.Option(metavar="FLOPS,BANDWIDTH", help='Of any other card: "165TFLOPS,1008GB/s".')
]
ModelDevice = Annotated[
    str | None,
    typer.Option(
        metavar="cpu|cuda|meta",
        help="Where to build the model; on meta it takes no memory. A shape is on meta unless told otherwise.",
    ),
]
Size = Annotated[int | None, typer.Option(min=1, help="Of the samples of a shape: tokens, or pixels on each side.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Run nothing: estimate times instead of measuring them.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
FrontierFile = Annotated[
    Path | None,
    typer.Option("--frontier", metavar="PNG|HTML", help="Picture of memory against time, each point a plan."),
]
TimelineFile = Annotated[
    Path | None, typer.Option("--timeline", metavar="PNG", help="Picture of the bytes over one step, by kind.")
]
WorldSize = Annotated[int, typer.Option(min=1, help="Ranks that share the batch; the budget is that of each.")]
ParallelKind = Annotated[
    str | None,
    typer.Option(
        metavar="ddp|fsdp2", help="ddp, the default: each rank has all weights; fsdp2: they are spread over the ranks."
    ),
]


def plan(
    task: PlanName,
    memory_budget: MemoryBudget,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    recompute: Recompute = None,
    device: Device = None,
    card: CardName = None,
    device_peak: DevicePeak = None,
    model_device: ModelDevice = None,
    size: Size = None,
    estimate: Estimate = False,
    world_size: WorldSize = 1,
    parallel: ParallelKind = None,
    json: Json = False,
    frontier: FrontierFile = None,
    timeline: TimelineFile = None,
) -> None:
    """Find the fastest way to run a big batch inside a memory budget, and say where the bytes go."""
    if card is not None and device_peak is not None:
        raise typer.BadParameter("--card and --device-peak both say what the card can do; give one of them.")
    if parallel is not None and world_size == 1:
        raise typer.BadParameter("--parallel is for several ranks: give --world-size too.")
    from bigbatch.cli import run_plan  # loads torch

    wanted = run_plan.Wanted(
        name=task,
        memory_budget=memory_budget,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        recompute=recompute,
        device=device,
        card=card,
        device_peak=device_peak,
        model_device=model_device,
        size=size,
        estimate=estimate,
        world_size=world_size,
        parallel=parallel or "ddp",
    )
    run_plan.run(wanted, as_json=json, frontier_file=frontier, timeline_file=timeline)
