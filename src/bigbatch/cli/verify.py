"""``bigbatch verify``: what can be said on the command line."""

from __future__ import annotations

import typer

from bigbatch.cli.train import BatchSize, Device, MicroBatchSize, Norm, Seed, TaskName, Threads


def verify(
    task: TaskName,
    micro_batch_size: MicroBatchSize = None,
    batch_size: BatchSize = None,
    norm: Norm = None,
    seed: Seed = None,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Compare the gradient of the first batch, cut into micro-batches, with that of the whole batch in float64."""
    from bigbatch.cli.run_verify import verify_task  # loads torch
    from bigbatch.cli.wanted import Wanted

    wanted = Wanted(
        task=task,
        variant={} if norm is None else {"norm": norm.value},
        changes={"batch_size": batch_size, "seed": seed},
        micro_batch_size=micro_batch_size,
        device=device,
        threads=threads,
    )
    raise typer.Exit(0 if verify_task(wanted) else 1)
