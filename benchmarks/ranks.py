"""Steps of several ranks: their time beside a loop by hand with DDP and ``no_sync``, and their bytes beside the plan's.

``python -m benchmarks.ranks`` and ``python -m benchmarks.ranks --memory`` print tables; README.md beside this file says
what is in them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bigbatch as bb
from benchmarks.planner.models import models
from bigbatch.training.sharding import shard

FEATURES, CLASSES, WIDTH = 64, 10, 1024
NUM_RESAMPLES = 2000
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
OneStep = Callable[[], None]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Setup:
    """What one contender trains; the same weights for all, and the same batch at every call."""

    def __init__(self, micro: int, num_micro_batches: int):
        torch.manual_seed(0)
        widths = [FEATURES, WIDTH, WIDTH, WIDTH]
        hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.model = DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.micro = micro
        draw = torch.Generator().manual_seed(dist.get_rank())
        n = micro * num_micro_batches
        self.batch = torch.randn(n, FEATURES, generator=draw), torch.randint(0, CLASSES, (n,), generator=draw)


def by_hand(setup: Setup) -> OneStep:
    """What people write: the shares of the ranks and micro-batches are known to be equal."""

    def step() -> None:
        pieces = list(zip(setup.batch[0].split(setup.micro), setup.batch[1].split(setup.micro), strict=True))
        losses = []
        for k, piece in enumerate(pieces, 1):
            with setup.model.no_sync() if k < len(pieces) else nullcontext():
                loss = loss_fn(setup.model, piece)
                (loss / len(pieces)).backward()
                losses.append(loss.detach())
        loss = torch.stack(losses).mean()
        dist.all_reduce(loss)
        norm = nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
        if not math.isfinite(float(norm + loss)):
            raise FloatingPointError("The loss or a gradient is not finite.")
        setup.optimizer.step()
        setup.optimizer.zero_grad()

    return step


def ours(reduce: str) -> Callable[[Setup], OneStep]:
    def make(setup: Setup) -> OneStep:
        step = bb.Step(
            setup.model, loss_fn, setup.optimizer, micro_batch_size=setup.micro, max_grad_norm=1.0, reduce=reduce
        )
        return lambda: step(setup.batch) and None

    return make


CONTENDERS: dict[str, Callable[[Setup], OneStep]] = {
    "by hand": by_hand,
    "by hand, again": by_hand,
    'bigbatch, reduce="after"': ours("after"),
    'bigbatch, reduce="overlap"': ours("overlap"),
}


def work(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    setups = {name: Setup(arguments.micro, arguments.num_micro_batches) for name in CONTENDERS}
    steps = {name: make(setups[name]) for name, make in CONTENDERS.items()}
    for _ in range(3):
        for step in steps.values():
            step()
    first, *others = setups.values()
    for other in others:
        for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-5), "the contenders do other work"
    seconds = {clock: {name: [] for name in steps} for clock in CLOCKS}
    shuffled, names = random.Random(0), list(steps)  # the same order on both ranks
    for _ in range(arguments.pairs):
        shuffled.shuffle(names)
        for name in names:
            dist.barrier()
            before = {clock: now() for clock, now in CLOCKS.items()}
            steps[name]()
            for clock, now in CLOCKS.items():
                seconds[clock][name].append(now() - before[clock])
    if rank == 0:
        report(seconds, arguments)
    dist.barrier()
    dist.destroy_process_group()


def report(seconds: dict[str, dict[str, list[float]]], arguments: argparse.Namespace) -> None:
    reference = next(iter(CONTENDERS))
    print(f"2 ranks, {arguments.num_micro_batches} micro-batches of {arguments.micro}, {arguments.pairs} pairs")
    print("| clock | contender | ms/micro-step | ratio | 95 % |\n|---|---|---|---|---|")
    for clock, by_name in seconds.items():
        for name, own in by_name.items():
            ratios = torch.tensor([a / b for a, b in zip(own, by_name[reference], strict=True)], dtype=torch.float64)
            draws = torch.randint(len(ratios), (NUM_RESAMPLES, len(ratios)), generator=torch.Generator().manual_seed(0))
            low, high = (float(ratios[draws].median(1).values.quantile(q)) for q in (0.025, 0.975))
            ms = 1e3 * statistics.median(own) / arguments.num_micro_batches
            print(f"| {clock} | {name} | {ms:.1f} | {float(ratios.median()):.3f} | {low:.3f} to {high:.3f} |")


MEMORY = [
    (name, way, size, micro, num_micro_batches, recompute)
    for name in ("gpt2-like", "llama-like, tied head")
    for way in ("after", "each")
    for size in (2, 4)
    for micro, num_micro_batches in ((2, 3), (8, 1), (16, 2))
    for recompute in ("none", "all")
]


def measure(rank: int, store: str, size: int) -> None:
    """Peaks of steps with FSDP2, planned and counted."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # FSDP2 warns of models that return a view
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    of_name = models("small")
    for name, way, _, micro, num_micro_batches, recompute in [row for row in MEMORY if row[2] == size]:
        torch.manual_seed(0)
        made, batch = of_name[name], of_name[name].batch(micro * num_micro_batches)
        model = made.make_model()
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        how: dict[str, Any] = {"reduce": way}
        held = {"micro_batch_size": micro, "recompute": recompute, "calibrate": False}
        plan = bb.plan(model, made.loss_fn, batch, optimizer=optimizer, **how, **held)
        step = bb.Step(model, made.loss_fn, optimizer, plan=plan, **how)
        rows: list[Any] = [None] * size
        dist.all_gather_object(rows, step.measure(batch, micro))
        if rank == 0:
            cut = f"{micro} × {num_micro_batches}"
            error = (plan.peak_bytes or 0) / max(rows) - 1
            print(
                f"{name} | {way} | {size} | {cut} | {recompute} | {plan.peak_bytes} | {max(rows)} | {error:.2%}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--micro", type=int, default=512)
    parser.add_argument("--num-micro-batches", type=int, default=4)
    parser.add_argument("--memory", action="store_true", help="count bytes, and time nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.memory:
            print("model | reduce | ranks | micro-batches | recompute | planned | counted | error")
            for size in (2, 4):
                torch.multiprocessing.spawn(measure, (f"{folder}/store {size}", size), nprocs=size)
            return
        torch.multiprocessing.spawn(work, (f"{folder}/store", arguments), nprocs=2)


if __name__ == "__main__":
    main()
