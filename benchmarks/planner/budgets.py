"""No planned step exceeds its budget: random models, batches and budgets, planned, run, and counted.

``python -m benchmarks.planner.budgets`` prints a table; README.md says what is drawn and what is counted.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

import bigbatch as bb
from benchmarks.planner.accuracy import OPTIMIZERS
from benchmarks.planner.meter import peak_of
from benchmarks.planner.models import models
from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.search import MARGIN
from bigbatch.planning.space import ABOUT
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.stepping.fitting.timing import tried
from bigbatch.stepping.fitting.workspace import find_workspace

# ResNet takes ten times as long as the others to trace.
WEIGHTS = {
    "gpt2-like": 1.0,
    "llama-like, tied head": 1.0,
    "llama-like, untied head": 1.0,
    "mixture of experts": 1.0,
    "resnet50-like": 0.2,
    "vit": 1.0,
    "unet": 1.0,
    "lstm": 1.0,
}
SMALLEST_BATCH, LARGEST_BATCH = 4, 32
LEAST_USE = 0.85
TIE = 1e-4
"""Choices whose peaks differ by less are the same to the planner, which compares them by lines before it traces one."""
MOST_BLOCKS = 6
"""Of models for which every choice is tried."""
EXHAUSTIVE = (("gpt2-like", 6), ("lstm", 12), ("vit", 6), ("llama-like, untied head", 4))
"""Models and batch sizes."""
WAYS = ("Step(memory_budget=)", "plan(), Step(plan=)")


class Draw(NamedTuple):
    """What is planned for; the budget lies between the smallest that works and the direct peak, in bytes."""

    model: str
    optimizer: str
    batch_size: int
    way: str
    budget_bytes: int
    smallest_bytes: int
    direct_bytes: int


@dataclass(frozen=True)
class Run:
    """A planned step, run; peaks in bytes.

    Attributes:
        fastest_bytes: What the plan needs that is chosen without a budget.
        slower: Time of the step over that of the plan without a budget, tried in turns.
        counted_bytes: Of tensors, by ``Step.measure``.
        allocated_bytes: Of all that torch's allocator gave out, by the independent meter.
    """

    draw: Draw
    plan: bb.Plan
    fastest_bytes: int
    slower: float
    counted_bytes: int
    allocated_bytes: int
    seconds: float

    @property
    def is_fastest_too_large(self) -> bool:
        """Whether the plan without a budget does not fit."""
        return self.fastest_bytes > self.draw.budget_bytes * (1 - MARGIN)

    @property
    def binds(self) -> bool:
        """Whether more memory would make the step faster, by more than what cannot be told apart."""
        return self.is_fastest_too_large and self.slower > ABOUT

    @property
    def use(self) -> float:
        """Share of the budget that is used."""
        return self.counted_bytes / self.draw.budget_bytes


def setup(name: str, optimizer: str) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    """What to train, fresh."""
    spec = models("small")[name]
    model = spec.make_model()
    return spec, model, OPTIMIZERS[optimizer](model.parameters())


@cache
def costs_of(name: str, optimizer: str) -> tuple[Planner, MemoryProfile]:
    """To know between which budgets to draw: the workspace of kernels is measured, nothing is timed."""
    spec, model, made = setup(name, optimizer)
    step = bb.Step(model, spec.loss_fn, made)
    planner = Planner(step, spec.batch(2))
    traced, shadow = planner.traced, planner.shadow
    workspace = find_workspace(step, planner.batch, shadow, traced, LARGEST_BATCH, lambda size, recompute_all: True)
    return planner, replace(traced, workspace=workspace)


def draws(num: int, generator: random.Random) -> Iterator[Draw]:
    """Random ones, with budgets below the direct peak."""
    while num > 0:
        (name,) = generator.choices(list(WEIGHTS), list(WEIGHTS.values()))
        optimizer, way = generator.choice(list(OPTIMIZERS)), generator.choice(WAYS)
        size = round(math.exp(generator.uniform(math.log(SMALLEST_BATCH), math.log(LARGEST_BATCH))))
        direct = costs_of(name, optimizer)[0].peak_bytes(bb.Plan(micro_batch_size=size), size)
        smallest = smallest_budget(name, optimizer, size)
        if smallest < direct:
            budget = round(math.exp(generator.uniform(math.log(smallest), math.log(direct))))
            yield Draw(name, optimizer, size, way, budget, smallest, direct)
            num -= 1


def smallest_budget(name: str, optimizer: str, batch_size: int) -> int:
    """The smallest with which there is a plan, by the error that a smaller one gets."""
    planner, costs = costs_of(name, optimizer)
    try:
        planner.plan(costs, batch_size, 1)
    except bb.BudgetError as error:
        return error.smallest_bytes or 0
    raise AssertionError("A plan for a budget of one byte.")


def run(draw: Draw) -> Run:
    """Plan, run a step, and count."""
    began = time.perf_counter()
    spec, model, optimizer = setup(draw.model, draw.optimizer)
    batch = spec.batch(draw.batch_size)
    if draw.way == WAYS[0]:
        step = bb.Step(model, spec.loss_fn, optimizer, batch_size=draw.batch_size, memory_budget=draw.budget_bytes)
    else:
        plan = bb.plan(model, spec.loss_fn, batch, optimizer=optimizer, memory_budget=draw.budget_bytes)
        step = bb.Step(model, spec.loss_fn, optimizer, plan=plan)
    step(batch)
    assert step.plan is not None
    counted = step.measure(batch, step.micro_batch_size)
    allocated = peak_of(lambda: step(batch), model, optimizer, batch).peak_bytes
    plan = step.plan
    with bb.apply(bb.Plan(micro_batch_size=1), model):
        free = bb.Step(model, spec.loss_fn, optimizer)
        planner = Planner(free, batch)
        fastest = planner.plan(planner.timed(draw.batch_size, None), draw.batch_size, None)
        least = planner.traced.smallest_micro_batch
        cuts = [micro_batch_sizes(draw.batch_size, some.micro_batch_size, least) for some in (plan, fastest)]
        chosen_seconds, fastest_seconds = tried(free, batch, (plan, fastest), cuts)
    pairs = zip(chosen_seconds, fastest_seconds, strict=True)
    slower = statistics.median(mine / theirs for mine, theirs in pairs)
    return Run(draw, plan, fastest.peak_bytes or 0, slower, counted, allocated, time.perf_counter() - began)


@dataclass(frozen=True)
class Search:
    """Every choice for one model and batch, against what the planner calls the smallest budget; in bytes.

    Attributes:
        num_choices: Micro-batch sizes times choices of recompute.
        least_bytes: The smallest peak of all of them.
        smallest_bytes: The smallest budget by the planner, with its margin.

    Peaks are with the workspace of kernels.
    """

    model: str
    batch_size: int
    num_choices: int
    least_bytes: int
    smallest_bytes: int

    @property
    def is_right(self) -> bool:
        """Nothing is under any budget, less its margin, for which the planner has no plan."""
        return self.least_bytes >= math.floor((self.smallest_bytes - 1) * (1 - MARGIN)) * (1 - TIE)


def search_all(name: str, batch_size: int, optimizer: str) -> Search:
    """Trace every choice."""
    planner, _ = costs_of(name, optimizer)
    peaks = []
    for plan in choices(name, planner, batch_size):
        try:
            peaks.append(planner.peaks(plan, batch_size)[1])
        except (bb.RecomputeError, bb.TraceError):
            continue  # not a choice
    return Search(name, batch_size, len(peaks), min(peaks), smallest_budget(name, optimizer, batch_size))


def choices(name: str, planner: Planner, batch_size: int) -> Iterator[bb.Plan]:
    """All cuts, with all subsets of the blocks in all groupings."""
    blocks = models("small")[name].block_names(planner.step.model)
    assert len(blocks) <= MOST_BLOCKS, f"{len(blocks)} blocks are too many to try all choices."
    cuts = {
        tuple(micro_batch_sizes(batch_size, size, planner.traced.smallest_micro_batch)): size
        for size in range(planner.traced.smallest_micro_batch, batch_size + 1)
    }
    for size, recompute in itertools.product(cuts.values(), groupings(blocks)):
        yield bb.Plan(micro_batch_size=size, recompute=recompute)


def groupings(blocks: Sequence[str]) -> Iterator[tuple[str | tuple[str, ...], ...]]:
    """Every way to keep blocks or to recompute them, alone or with those after them.

    >>> list(groupings(["a", "b"]))
    [(), ('b',), ('a',), ('a', 'b'), (('a', 'b'),)]
    """
    if not blocks:
        yield ()
        return
    yield from groupings(blocks[1:])
    for length in range(1, len(blocks) + 1):
        group = blocks[0] if length == 1 else tuple(blocks[:length])
        yield from ((group, *rest) for rest in groupings(blocks[length:]))


def are_refused(search: Search, optimizer: str, generator: random.Random) -> bool:
    """Whether budgets below the smallest are refused, and the smallest is not."""
    planner, costs = costs_of(search.model, optimizer)
    for share in (generator.uniform(0.5, 1.0), 1 - 1 / search.smallest_bytes):
        try:
            planner.plan(costs, search.batch_size, int(search.smallest_bytes * share))
        except bb.BudgetError:
            continue
        return False
    planner.plan(costs, search.batch_size, search.smallest_bytes)
    return True


def line(run: Run) -> str:
    """One run for a person who waits."""
    draw, plan = run.draw, run.plan
    smallest, direct = draw.smallest_bytes / 1e6, draw.direct_bytes / 1e6
    return (
        f"{draw.model:23} {draw.optimizer:14} {draw.batch_size:2} {draw.way:20} "
        f"{draw.budget_bytes / 1e6:7.2f} MB of {smallest:6.2f} to {direct:6.2f}: micro {plan.micro_batch_size:2}, "
        f"{len(plan.recompute)} recomputed, tensors {run.use:6.1%}, "
        f"allocator {run.allocated_bytes / draw.budget_bytes:6.1%}, {run.slower:5.3f} of the fastest"
        f"{', which does not fit' if run.is_fastest_too_large else ''}  {run.seconds:.0f} s"
    )


def summary(runs: Sequence[Run]) -> tuple[str, bool]:
    """Figures of the planned steps in words, and whether they are as asked."""
    over = sum(run.counted_bytes > run.draw.budget_bytes for run in runs)
    over_allocated = sum(run.allocated_bytes > run.draw.budget_bytes for run in runs)
    text = f"{len(runs)} planned steps: {over} over budget by tensors (asked: 0), {over_allocated} by the allocator."
    binding = [run for run in runs if run.binds]
    for what, some in (
        ("all, each with a budget below the direct peak", list(runs)),
        ("those where the plan without a budget does not fit", [run for run in runs if run.is_fastest_too_large]),
        (f"those where that plan is also faster (asked: a mean of {LEAST_USE:.0%})", binding),
    ):
        if some:
            shares = sorted(run.use for run in some)
            text += (
                f"\nUse of the budget by {len(some)}, {what}: mean {statistics.mean(shares):.1%}, "
                f"median {statistics.median(shares):.1%}, least {shares[0]:.1%}."
            )
    is_met = not over and (not binding or statistics.mean(run.use for run in binding) >= LEAST_USE)
    return text, is_met


def verdict(search: Search) -> str:
    """One search in words."""
    planned = search.smallest_bytes * (1 - MARGIN)
    return (
        f"{search.model}, {search.batch_size} samples: the leanest of {search.num_choices} choices needs "
        f"{search.least_bytes:,} bytes, the planner's {planned:,.0f} ({planned / search.least_bytes - 1:+.4%}): "
        f"{'right' if search.is_right else 'WRONG'}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, run, print; 1 when something is not as asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num", type=int, default=100, help="planned steps; 0 for the searches alone")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    logging.getLogger("bigbatch").setLevel(logging.ERROR)
    generator, began, runs = random.Random(chosen.seed), time.perf_counter(), []
    for draw in draws(chosen.num, generator):
        runs.append(run(draw))
        print(line(runs[-1]), flush=True)
    text, is_met = summary(runs)
    print(text)
    for name, batch_size in EXHAUSTIVE:
        optimizer = generator.choice(list(OPTIMIZERS))
        search = search_all(name, batch_size, optimizer)
        is_refused = are_refused(search, optimizer, generator)
        print(verdict(search), "Smaller budgets are", "refused." if is_refused else "NOT REFUSED.", flush=True)
        is_met = is_met and search.is_right and is_refused
    print(f"{time.perf_counter() - began:.0f} s")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
