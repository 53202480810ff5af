"""How fast a planned step is, against what people do by hand with the same memory.

``python -m benchmarks.planner.quality`` prints a table for each model; ``benchmarks/README.md`` says what is in it.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import bigbatch as bb
from benchmarks.planner.models import Model
from bigbatch.batch.sizes import part_sizes
from bigbatch.planning.search import MARGIN, frontier
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.tasks.shapes.gpt2 import Gpt2
from bigbatch.tasks.shapes.resnet import ResNet
from bigbatch.tasks.shapes.shape import class_loss, images, pixel_loss, tokens
from bigbatch.tasks.shapes.unet import UNet
from bigbatch.units import format_bytes

NUM_BUDGETS = 5
NUM_PAIRS = 30
NUM_RIVALS = 2
NUM_RESAMPLES = 2000
SLOWER_BAR, FASTER_BAR = 0.02, 0.10
PLANNED, CONTROL, USUAL = "planned", "planned, again", "all, halved"

Names = tuple[str | tuple[str, ...], ...]


@dataclass(frozen=True)
class Contest:
    """A model, its batch, and the modules that people would recompute.

    Attributes:
        feed_forward: Names of the feed-forward part of each block; empty where there is none.
    """

    model: Model
    batch_size: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    feed_forward: tuple[str, ...] = ()


def contests() -> list[Contest]:
    """The three models, each with steps of less than a second on one core."""
    length, vocabulary, layers = 128, 1024, 9
    gpt2 = partial(Gpt2, num_layers=layers, width=160, num_heads=5, vocabulary=vocabulary, length=length)
    text = partial(tokens, length=length, vocabulary=vocabulary)
    pictures = partial(images, size=64, num_classes=100)
    return [
        Contest(
            Model("gpt2-like", gpt2, class_loss, text),
            16,
            adamw,
            tuple(f"blocks.{index}.mlp" for index in range(layers)),
        ),
        Contest(Model("resnet50", partial(ResNet, num_classes=100), class_loss, pictures), 16, momentum),
        Contest(Model("unet", partial(UNet, 4, 12), pixel_loss, _masks, ("down", "up")), 16, adamw),
    ]


def _masks(num_samples: int) -> Any:
    return images(num_samples, 64, 64, 64, num_classes=2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as people use it on CPU."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def policies(blocks: Sequence[str], feed_forward: tuple[str, ...], chains: Sequence[Sequence[str]]) -> dict[str, Names]:
    """What people recompute without looking at where the bytes are.

    Args:
        chains: Runs of blocks that may be grouped.
    """
    found: dict[str, Names] = {"none": (), "all": tuple(blocks)}
    found |= {f"every {k}.": tuple(blocks[::k]) for k in (2, 3, 4)}
    found["deepest third"] = tuple(blocks[-math.ceil(len(blocks) / 3) :])
    length = math.ceil(math.sqrt(len(blocks)))
    found["sqrt segments"] = tuple(_grouped(chains, length))
    if feed_forward:
        found["feed-forward"] = feed_forward
    return found


def _grouped(chains: Sequence[Sequence[str]], length: int) -> Iterator[str | tuple[str, ...]]:
    for chain in chains:
        for start in range(0, len(chain), length):
            group = chain[start : start + length]
            yield tuple(group) if len(group) > 1 else group[0]


@dataclass(frozen=True)
class Contender:
    """A plan that is run by a copy of the model of its own."""

    name: str
    plan: bb.Plan
    run: Callable[[], Any]


@dataclass
class Row:
    """One budget.

    Attributes:
        best: The uniform policy that was fastest, with its micro-batch size.
        ratio, low, high: Time of the planned step over that of ``best``: median, and its 95 % interval.
        usual: The same over what people do, where that fits.
        control: The same of a second copy of the planned step.
    """

    budget_bytes: int
    plan: str
    best: str
    ratio: float
    low: float
    high: float
    control: float
    usual: float | None
    usual_plan: str


class Arena:
    """Plans, times and compares for one model."""

    def __init__(self, contest: Contest, *, num_pairs: int):
        torch.manual_seed(0)
        self.contest = contest
        self.num_pairs = num_pairs
        self.model = contest.model.make_model()
        self.batch = contest.model.batch(contest.batch_size)
        step = bb.Step(self.model, contest.model.loss_fn, contest.optimizer(self.model))
        self.planner = Planner(step, self.batch)
        self.profile = self.planner.timed(contest.batch_size, None)
        self.sizes = [
            *part_sizes(contest.batch_size, self.profile.smallest_micro_batch),
            contest.batch_size,
        ]
        blocks = contest.model.block_names(self.model)
        chains = [
            [name for name in blocks if name.startswith(f"{container}.")] for container in contest.model.containers
        ]
        if not all(
            isinstance(self.model.get_submodule(c), nn.Sequential | nn.ModuleList) for c in contest.model.containers
        ):
            raise TypeError("Blocks that are to be grouped lie in lists of modules.")
        self.policies = policies(blocks, contest.feed_forward, [c for c in chains if self._is_chain(c)] or [])
        if not self.policies["sqrt segments"]:
            del self.policies["sqrt segments"]
        self._budgets: dict[bb.Plan, float] = {}

    def _is_chain(self, names: Sequence[str]) -> bool:
        follows = {slot.name: slot.follows for slot in self.profile.slots}
        return all(follows.get(name, False) for name in names[1:])

    def budget_for(self, plan: bb.Plan) -> float:
        """The budget in which a step fits, by the same count for all: traced, with workspace, and the margin free."""
        if plan not in self._budgets:
            _, needed = self.planner.peaks(plan, self.contest.batch_size)
            self._budgets[plan] = needed / (1 - MARGIN)
        return self._budgets[plan]

    def contender(self, name: str, plan: bb.Plan) -> Contender:
        """A step of a copy of the model under a plan."""
        model = copy.deepcopy(self.model)
        step = bb.Step(model, self.contest.model.loss_fn, self.contest.optimizer(model), plan=plan)
        return Contender(name, plan, partial(step, self.batch))

    def uniform(self) -> list[tuple[str, bb.Plan]]:
        """Each policy at each micro-batch size."""
        return [
            (f"{name}, {size}", bb.Plan(micro_batch_size=size, recompute=names))
            for name, names in self.policies.items()
            for size in self.sizes
        ]

    def usual(self, budget: float) -> bb.Plan | None:
        """All blocks recomputed, the batch halved until it fits."""
        size = self.contest.batch_size
        while size >= self.profile.smallest_micro_batch:
            plan = bb.Plan(micro_batch_size=size, recompute=self.policies["all"])
            if self.budget_for(plan) <= budget:
                return plan
            size //= 2
        return None

    def budgets(self) -> list[int]:
        """Geometric from 1.1 x the smallest feasible to the peak of the direct batch."""
        low = 1.1 * self._smallest()
        high = self.budget_for(bb.Plan(micro_batch_size=self.contest.batch_size))
        return [round(low * (high / low) ** (index / (NUM_BUDGETS - 1))) for index in range(NUM_BUDGETS)]

    def _smallest(self) -> int:
        try:
            self.planner.plan(self.profile, self.contest.batch_size, 1)
        except bb.BudgetError as error:
            return error.smallest_bytes or 0
        raise ValueError("A plan was found in one byte.")


def roughly_timed(contenders: Sequence[Contender], rounds: int = 3) -> dict[str, float]:
    """The least time of some steps of each, interleaved."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in random.sample(contenders, len(contenders)):
            times[contender.name].append(_seconds(contender.run))
    return {name: min(found) for name, found in times.items()}


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def compete(arena: Arena, report: Callable[[str], None]) -> list[Row]:
    """All budgets of one model."""
    plans = [(name, plan) for name, plan in arena.uniform()]
    budgets = arena.budgets()
    fitting = [(name, plan) for name, plan in plans if arena.budget_for(plan) <= budgets[-1]]
    rough: dict[str, float] = {}
    for name, plan in fitting:  # one copy of the model at a time
        contender = arena.contender(name, plan)
        contender.run()
        rough[name] = min(_seconds(contender.run) for _ in range(3))
    report(f"{len(rough)} uniform configurations timed")
    return [_row(arena, budget, dict(fitting), rough, report) for budget in budgets]


def _row(
    arena: Arena, budget: int, uniform: dict[str, bb.Plan], rough: dict[str, float], report: Callable[[str], None]
) -> Row:
    planned = arena.planner.plan(arena.profile, arena.contest.batch_size, budget)
    fit = sorted((name for name, plan in uniform.items() if arena.budget_for(plan) <= budget), key=lambda n: rough[n])
    usual = arena.usual(budget)
    contenders = [arena.contender(PLANNED, planned), arena.contender(CONTROL, planned)]
    contenders += [arena.contender(name, uniform[name]) for name in fit[:NUM_RIVALS]]
    if usual is not None:
        contenders.append(arena.contender(USUAL, usual))
    for contender in contenders:
        contender.run()
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(arena.num_pairs):
        for contender in random.sample(contenders, len(contenders)):
            times[contender.name].append(_seconds(contender.run))
    rivals = {name: _ratio(times[PLANNED], times[name]) for name in fit[:NUM_RIVALS]}
    best = max(rivals, key=lambda name: rivals[name][0], default="")
    ratio, low, high = rivals.get(best, (math.nan, math.nan, math.nan))
    row = Row(
        budget_bytes=budget,
        plan=_shown(planned),
        best=best,
        ratio=ratio,
        low=low,
        high=high,
        control=_ratio(times[CONTROL], times[PLANNED])[0],
        usual=_ratio(times[PLANNED], times[USUAL])[0] if usual is not None else None,
        usual_plan=_shown(usual) if usual is not None else "does not fit",
    )
    report(f"{row}  expected {planned.step_seconds:.3f} s, took {statistics.median(times[PLANNED]):.3f} s")
    return row


def _ratio(times: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Median of the ratios of the pairs, with a bootstrap interval of 95 %."""
    ratios = [time / other for time, other in zip(times, others, strict=True)]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    return statistics.median(ratios), medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES)]


def _shown(plan: bb.Plan) -> str:
    parts = [f"{len(entry)} as one" if isinstance(entry, tuple) else "1" for entry in plan.recompute]
    return f"{plan.micro_batch_size}: {', '.join(parts) or 'none'}"


def main() -> int:
    """Run the contests that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="one of them; several times for more")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("bigbatch").setLevel(logging.ERROR)  # each copy of a model says that BatchNorm is approximate
    random.seed(0)
    results: dict[str, list[Row]] = {}
    for contest in contests():
        if arguments.model and contest.model.name not in arguments.model:
            continue
        arena = Arena(contest, num_pairs=arguments.pairs)
        seconds = [
            (plan.peak_bytes, plan.step_seconds) for plan in frontier(arena.profile, batch_size=contest.batch_size)
        ]
        assert all(a[1] > b[1] for a, b in pairwise(seconds)), "The frontier is not monotone."  # type: ignore[operator]
        results[contest.model.name] = compete(arena, lambda text: print(text, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in results.items()}))
    else:
        print(*_lines(results), sep="\n")
    return 0


def _lines(results: dict[str, list[Row]]) -> Iterator[str]:
    yield "| model | budget | planned | best uniform | planned / best [95 %] | control | all, halved | planned / that |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, rows in results.items():
        for row in rows:
            usual = "-" if row.usual is None else f"{row.usual:.3f}"
            yield (
                f"| {name} | {format_bytes(row.budget_bytes)} | {row.plan} | {row.best} | "
                f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}] | {row.control:.3f} | {row.usual_plan} | {usual} |"
            )
    for name, rows in results.items():
        worst = max(row.ratio for row in rows)
        usual = [row.usual for row in rows if row.usual is not None]
        faster = 1 - statistics.geometric_mean(usual) if usual else math.nan
        yield (
            f"{name}: at worst {worst:.3f} x the best uniform policy (bar {1 + SLOWER_BAR}): "
            f"{'ok' if worst <= 1 + SLOWER_BAR else 'MISSED'}; {faster:.1%} faster than all recomputed and halved "
            f"(bar {FASTER_BAR:.0%}): {'ok' if faster >= FASTER_BAR else 'MISSED'}"
        )


if __name__ == "__main__":
    sys.exit(main())
