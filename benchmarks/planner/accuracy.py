"""Peak bytes that are predicted, against peak bytes that are measured.

``python -m benchmarks.planner.accuracy --write docs/accuracy.md`` measures everything; README.md says what is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bigbatch as bb
from benchmarks.planner import accuracy_report
from benchmarks.planner.meter import peak_of, process_peak
from benchmarks.planner.models import Model, Size, models
from bigbatch.memory.measure import count_peak_bytes
from bigbatch.planning.search import MARGIN
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.stepping.fitting.workspace import find_workspace

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
}
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
RECOMPUTE = ("none", "every block", "every second block", "planned")
DEPENDS_ON_DATA = "mixture of experts, by index"  # its memory is not known before it runs
HAS_BATCH_NORM = ("resnet50-like", "unet")
GIB = 2**30
LARGEST_BYTES = 3 * GIB
NUM_LARGE = 5
"""Configurations of 1 GiB or more, of each model."""
NUM_PROCESSES_MINILM = 2
"""Of the small model; others are lost among what a process holds anyway."""


class Configuration(NamedTuple):
    """What a step is: model, optimizer, batch, and how it is cut and recomputed."""

    size: Size
    model: str
    optimizer: str
    micro_batch_size: int
    recompute: str
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration, predicted and measured; all in bytes.

    Attributes:
        predicted_bytes: Peak of tensors, traced.
        predicted_with_workspace_bytes: With what kernels need beside tensors, measured in small micro-batches.
        counted_bytes: Peak of real tensors in the real step.
        allocated_bytes: Peak of all that torch's allocator gave out, by the meter.
        process_bytes: Peak of a fresh process beyond what it held before; None: not measured.
    """

    configuration: Configuration
    predicted_bytes: int
    predicted_with_workspace_bytes: int
    counted_bytes: int
    allocated_bytes: int
    process_bytes: int | None = None


class Bench:
    """One model with one optimizer, traced once."""

    def __init__(self, size: Size, name: str, optimizer: str):
        torch.manual_seed(0)
        self.spec: Model = models(size)[name]
        self.model = self.spec.make_model()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        step = bb.Step(self.model, self.spec.loss_fn, self.optimizer)
        self.planner = Planner(step, self.spec.batch(2))
        self.smallest = step.accumulator.smallest_micro_batch
        # The optimizer makes its state, so that every step that is measured is a steady one.
        step(self.spec.batch(self.smallest))
        # As in ``Planner.timed``, but nothing is timed.
        traced, shadow = self.planner.traced, self.planner.shadow
        find_workspace(step, self.planner.batch, shadow, traced, max(MICRO_BATCH_SIZES), lambda size, all_blocks: True)

    def plan(self, configuration: Configuration) -> bb.Plan:
        """What is run."""
        micro_batch_size, blocks = configuration.micro_batch_size, self.spec.block_names(self.model)
        plain = bb.Plan(micro_batch_size=micro_batch_size)
        if configuration.recompute == "planned":
            return self._half_way(plain, configuration.batch_size)
        chosen = {"none": (), "every block": blocks, "every second block": blocks[::2]}[configuration.recompute]
        return dataclasses.replace(plain, recompute=chosen)

    def _half_way(self, plain: bb.Plan, num_samples: int) -> bb.Plan:
        """A plan for the budget half way between the smallest that works and what needs no recompute."""
        size, costs = plain.micro_batch_size, self.planner.traced
        try:
            return self.planner.plan(costs, num_samples, 1, micro_batch_size=size)
        except bb.BudgetError as error:
            smallest = error.smallest_bytes or 0
            direct = self.planner.peak_bytes(plain, num_samples) / (1 - MARGIN)
            budget = int(smallest + max(0, direct - smallest) / 2)
            return self.planner.plan(costs, num_samples, budget, micro_batch_size=size)

    def measure(self, plan: bb.Plan, num_samples: int) -> tuple[int, int]:
        """Peak of real tensors and of the allocator, in one real step."""
        step = bb.Step(self.model, self.spec.loss_fn, self.optimizer, plan=plan)
        batch = self.spec.batch(num_samples)
        counted: list[int] = []

        def run() -> None:
            with count_peak_bytes("cpu", track=[self.model, self.optimizer, batch]) as found:
                step(batch)
            counted.append(found.peak_bytes)

        try:
            allocated = peak_of(run, self.model, self.optimizer, batch, warm_up=0).peak_bytes
        finally:
            bb.apply(bb.Plan(micro_batch_size=1), self.model)
        return counted[0], allocated

    def row(self, configuration: Configuration, *, in_process: bool = False) -> Row:
        """Predict and measure."""
        plan, num_samples = self.plan(configuration), configuration.batch_size
        predicted, measured = self.planner.peaks(plan, num_samples), self.measure(plan, num_samples)
        process_bytes = process_bytes_of(configuration, plan) if in_process else None
        return Row(configuration, *predicted, *measured, process_bytes)


def process_bytes_of(configuration: Configuration, plan: bb.Plan) -> int:
    """Peak of a steady step in a fresh process."""
    return process_peak(
        partial(_built, configuration, plan.to_json()),
        warm=partial(_warm, configuration),
        touch_all=configuration.model == "lstm",  # oneDNN keeps far more for it than it writes to
    ).peak_bytes


def _built(configuration: Configuration, plan: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    spec = models(configuration.size)[configuration.model]
    model = spec.make_model()
    optimizer = OPTIMIZERS[configuration.optimizer](model.parameters())
    step = bb.Step(model, spec.loss_fn, optimizer, plan=bb.Plan.from_json(plan))
    batch = spec.batch(configuration.batch_size)
    return lambda: step(batch)


def _warm(configuration: Configuration) -> None:
    """A step of the small model, so that libraries are loaded and hold what they keep."""
    small = list(models("small"))[list(models("large")).index(configuration.model)]
    name = small if configuration.size == "large" else configuration.model
    plan = bb.Plan(micro_batch_size=2)
    _built(configuration._replace(size="small", model=name, batch_size=4), plan.to_json())()


def small_configurations() -> Iterator[Configuration]:
    """Every model, micro-batch size and choice of recompute; optimizers and batch sizes take turns."""
    optimizers = list(OPTIMIZERS)
    names = [name for name in models("small") if name != DEPENDS_ON_DATA]
    for m, name in enumerate(names):
        for s, size in enumerate(MICRO_BATCH_SIZES):
            for r, recompute in enumerate(RECOMPUTE):
                if name in HAS_BATCH_NORM and size == 1:
                    continue  # The planner never gives it a single sample.
                optimizer = optimizers[(m + s + r) % len(optimizers)]
                uneven = 3 * size - 1 if size > 2 else 3 * size
                yield Configuration("small", name, optimizer, size, recompute, size if (m + r) % 3 == 0 else uneven)


def large_candidates(name: str) -> Iterator[Configuration]:
    """Configurations of a large model that may need 1 GiB, in one micro-batch and in two."""
    optimizer = _optimizer_of(name)
    for recompute in RECOMPUTE:
        yield Configuration("large", name, optimizer, 16, recompute, 16)
    for recompute in RECOMPUTE:
        yield Configuration("large", name, optimizer, 8, recompute, 16)
    for recompute in RECOMPUTE:
        yield Configuration("large", name, optimizer, 16, recompute, 32)


def process_configurations(name: str) -> Iterator[Configuration]:
    """Configurations of a large model that run in a process of their own too."""
    yield Configuration("large", name, _optimizer_of(name), 2, "none", 2)
    yield Configuration("large", name, _optimizer_of(name), 4, "every second block", 4)


def _optimizer_of(name: str) -> str:
    return list(OPTIMIZERS)[list(models("large")).index(name) % len(OPTIMIZERS)]


class Results:
    """Rows that are there, kept in a file of JSON lines, so that a long run may be interrupted."""

    def __init__(self, path: Path | None):
        self.rows: dict[Configuration, Row] = {}
        self._path = path
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                configuration = Configuration(*found.pop("configuration"))
                self.rows[configuration] = Row(configuration, **found)

    def add(self, row: Row) -> None:
        """Keep it, and say so."""
        self.rows[row.configuration] = row
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        print(accuracy_report.line(row), flush=True)


def run_small(results: Results, configurations: Iterable[Configuration]) -> None:
    """Measure these, those of one model and optimizer together."""
    missing = [configuration for configuration in configurations if configuration not in results.rows]
    of_minilm = 0
    for key in dict.fromkeys(configuration[:3] for configuration in missing):
        bench = Bench(*key)
        for configuration in (c for c in missing if c[:3] == key):
            in_process = configuration.model == "minilm" and of_minilm < NUM_PROCESSES_MINILM
            of_minilm += in_process
            results.add(bench.row(configuration, in_process=in_process))


def run_large(results: Results, name: str) -> None:
    """Measure the first that are expected to need 1 GiB, and those that are compared with process memory."""
    wanted = [c for c in process_configurations(name) if c not in results.rows]
    missing = [c for c in large_candidates(name) if c not in results.rows]
    found = sum(
        row.configuration[:2] == ("large", name) and row.predicted_bytes >= GIB for row in results.rows.values()
    )
    if not wanted and found >= NUM_LARGE:
        return
    bench = Bench("large", name, _optimizer_of(name))
    for configuration in wanted:
        results.add(bench.row(configuration, in_process=True))
    for configuration in missing:
        if found >= NUM_LARGE:
            return
        predicted = bench.planner.peak_bytes(bench.plan(configuration), configuration.batch_size)
        if GIB <= predicted <= LARGEST_BYTES:
            results.add(bench.row(configuration))
            found += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures, and write the page; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="every 15th of the small configurations only")
    parser.add_argument("--write", type=Path, help="the page to write the tables to, for example docs/accuracy.md")
    parser.add_argument("--results", type=Path, help="file of JSON lines to keep results in, and to go on from")
    parser.add_argument("--models", help="only these large models, separated by semicolons; an empty text for none")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("bigbatch").setLevel(logging.ERROR)
    results, began = Results(chosen.results), time.perf_counter()
    configurations = list(small_configurations())
    run_small(results, configurations[::15] if chosen.quick else configurations)
    if not chosen.quick:
        names = [name for name in models("large") if name != DEPENDS_ON_DATA]
        for name in names if chosen.models is None else filter(None, chosen.models.split(";")):
            run_large(results, name)
    rows = list(results.rows.values())
    print(accuracy_report.tables(rows))
    print(f"{time.perf_counter() - began:.0f} s")
    if chosen.write is not None:
        chosen.write.write_text(accuracy_report.page(rows))
    return 0 if all(verdict.is_met for verdict in accuracy_report.verdicts(rows)) else 1


if __name__ == "__main__":
    # What goes to a fresh process has to be found there by the name of its module.
    from benchmarks.planner.accuracy import main as main_by_name

    sys.exit(main_by_name())
