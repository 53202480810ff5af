"""Tokens per second of a step that groups samples by length, beside one that does not and a loop of Accelerate.

See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.tasks.text import text

BATCH_SIZE, MICRO_BATCH_SIZE, MAX_GRAD_NORM = 256, 16, 1.0
BAR = 1.8
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
GROUPED, PLAIN, ACCELERATE = "Step, grouped", "Step, not grouped", "Accelerate, padded"

Batch = list[Tensor]
TASK = text()


def loss_fn(model: Any, batch: Any) -> Tensor:
    return TASK.loss_fn(model, batch)


def collate(samples: Batch) -> Any:
    return TASK.collate(samples)  # pyright: ignore[reportOptionalCall]


def num_tokens(sample: Tensor) -> int:
    return TASK.length(sample)  # pyright: ignore[reportOptionalCall]


def batches(data: Any, seed: int) -> Iterator[Batch]:
    """Batches of 256 random paragraphs, for ever."""
    draw = random.Random(seed)
    while True:
        yield [data[i] for i in draw.sample(range(len(data)), BATCH_SIZE)]


def make_step(model: nn.Module, *, grouped: bool) -> bb.Step:
    return bb.Step(
        model,
        loss_fn,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        micro_batch_size=MICRO_BATCH_SIZE,
        max_grad_norm=MAX_GRAD_NORM,
        weight=TASK.weight,
        collate=TASK.collate,
        length=TASK.length if grouped else None,
    )


def accelerated(model: nn.Module) -> Callable[[Batch], Any]:
    """Its documented loop: micro-batches of 16 in the order of the data, padded to their longest."""
    from accelerate import Accelerator

    num = BATCH_SIZE // MICRO_BATCH_SIZE
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def step(batch: Batch) -> None:
        for start in range(0, BATCH_SIZE, MICRO_BATCH_SIZE):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_fn(prepared, collate(batch[start : start + MICRO_BATCH_SIZE])))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return step


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        tokens_per_second: Real tokens, without padding, over all steps.
        ratio: How many times as fast the grouped step is, by the median over the rounds.
        low, high: The middle half of the rounds.
        padding: Share of padded tokens that stand for nothing.
        peak_bytes: Of a steady step; None where it is not ours to measure.
    """

    contender: str
    tokens_per_second: float
    ratio: float
    low: float
    high: float
    padding: float
    peak_bytes: int | None


def time_in_rounds(
    steps: dict[str, Callable[[Batch], Any]], data: Any, num_rounds: int
) -> tuple[dict[str, list[float]], list[int]]:
    """Seconds of each contender and real tokens, by round: all step the same batch, in random order."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    tokens, names, draw = [], list(steps), random.Random(0)
    for number, batch in zip(range(num_rounds + 1), batches(data, 0), strict=False):
        draw.shuffle(names)
        for name in names:
            before = time.perf_counter()
            steps[name](batch)
            if number:  # the first round is for the caches and the optimizer state
                seconds[name].append(time.perf_counter() - before)
        if number:
            tokens.append(sum(map(num_tokens, batch)))
    return seconds, tokens


def compare(num_rounds: int) -> list[Row]:
    """Time all contenders on one model, each with its own copy."""
    torch.manual_seed(0)
    data, model = TASK.train_data(), TASK.model()
    ours = {name: make_step(copied(model), grouped=name == GROUPED) for name in (GROUPED, PLAIN)}
    steps: dict[str, Callable[[Batch], Any]] = dict(ours)
    if importlib.util.find_spec("accelerate"):
        steps[ACCELERATE] = accelerated(copied(model))
    batch = next(batches(data, 1))
    peaks = {name: step.measure(batch, MICRO_BATCH_SIZE) for name, step in ours.items()}
    seconds, tokens = time_in_rounds(steps, data, num_rounds)
    before, after = ours[GROUPED](batch).padding or (0.0, 0.0)
    rows = []
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds[GROUPED], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        padding = after if name == GROUPED else before
        rows.append(Row(name, sum(tokens) / sum(found), middle, low, high, padding, peaks.get(name)))
    return rows


def copied(model: nn.Module) -> nn.Module:
    copy = TASK.model()
    copy.load_state_dict(model.state_dict())
    return copy


def gradient_difference(dtype: torch.dtype) -> float:
    """The largest relative difference of a parameter's gradient between the grouped and the ungrouped step."""
    torch.manual_seed(0)
    model = TASK.model().to(dtype)
    batch, found = next(batches(TASK.train_data(), 2)), []
    for length in (None, TASK.length):
        model.zero_grad()
        bb.accumulate(
            model,
            loss_fn,
            batch,
            micro_batch_size=MICRO_BATCH_SIZE,
            weight=TASK.weight,
            collate=TASK.collate,
            length=length,
        )
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, grouped = found
    return max(float((grouped[name] - g).norm() / g.norm()) for name, g in plain.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="steps of each contender that are timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print an object instead of the table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    differences = {
        str(dtype).removeprefix("torch."): gradient_difference(dtype) for dtype in (torch.float32, torch.float64)
    }
    rows = compare(options.rounds)
    if options.json:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows], "gradient_difference": differences}))
        return
    print(
        f"text task, batch {BATCH_SIZE}, micro-batches of {MICRO_BATCH_SIZE} or as many tokens, {options.rounds} rounds"
    )
    print(f"{'':20} {'tokens/s':>9} {'grouped is':>11} {'middle half':>15} {'padding':>8} {'peak':>11}")
    for row in rows:
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f} MiB"
        verdict = "" if row.contender == GROUPED else f">= {BAR}: {'inside' if row.ratio >= BAR else 'MISSED'}"
        interval = f"{row.low:.2f} to {row.high:.2f}"
        print(
            f"{row.contender:20} {row.tokens_per_second:9,.0f} {row.ratio:9.2f} x {interval:>15} "
            f"{row.padding:7.1%} {peak:>11} {verdict}"
        )
    for name, difference in differences.items():
        verdict = "inside" if difference <= TOLERANCE[name] else "MISSED"
        print(f"gradient, {name}: largest difference {difference:.1e}, allowed {TOLERANCE[name]:.0e}: {verdict}")


if __name__ == "__main__":
    main()
