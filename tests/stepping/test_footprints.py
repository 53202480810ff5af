"""Bytes of a micro-batch by its samples and its length: exact where nothing was traced, and a bound that holds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes
from tests.reference import assert_same_gradients, big_batch_gradients

NUM_TOKENS, NUM_SAMPLES, MIB = 30, 64, 2**20


class Attention(nn.Module):
    """With its scores written out, so that memory grows with the square of the length; and a wide head."""

    def __init__(self, width: int = 16, num_heads: int = 2):
        super().__init__()
        self.num_heads = num_heads
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).masked_fill((tokens == 0)[:, None, None], -1e9)
        return self.head(x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    tokens = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    labels = pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=-100)
    return {"tokens": tokens, "labels": labels}


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def make_batch(seed: int, shortest: int = 8, longest: int = 256, num_samples: int = NUM_SAMPLES) -> list[Tensor]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [shortest, longest, *(draw.randint(shortest, longest) for _ in range(num_samples - 2))]
    return [torch.randint(1, NUM_TOKENS, (n + 1,), generator=generator) for n in lengths]


OPTIONS: dict[str, Any] = {"collate": padded, "length": lambda sample: len(sample) - 1, "weight": "tokens"}


def planned(batch: list[Tensor], budget: str = "16MiB", model: nn.Module | None = None, **options: Any) -> bb.Plan:
    """On estimated times, so that it is the same on every machine."""
    model = model or Attention()
    how = {"optimizer": torch.optim.AdamW(model.parameters()), "batch_size": len(batch), "calibrate": False}
    return bb.plan(model, loss_fn, batch, memory_budget=budget, **how, **OPTIONS, **options)


def footprint_of(plan: bb.Plan) -> Any:
    assert plan.footprint is not None
    return plan.footprint


def make_step(plan: bb.Plan, model: nn.Module | None = None) -> bb.Step:
    model = model or Attention()
    return bb.Step(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=plan, **OPTIONS)


def peaks_of(step: bb.Step, batch: list[Tensor]) -> tuple[list[int], tuple[int, ...]]:
    """Counted peak of each micro-batch of a steady step (the last one with the update), and their sizes."""
    step(batch)
    live, peaks = LiveBytes(), []
    live.track(step.model, *step.optimizers, batch)

    def at_the_next(number: int, count: int | None) -> None:
        if number > 1:
            peaks.append(live.peak_bytes())
        live.reset_peak()

    step.on_micro_batch = at_the_next
    with live:
        sizes = step(batch).micro_batch_sizes
    peaks.append(live.peak_bytes())
    step.on_micro_batch = None
    return peaks, sizes


@pytest.mark.parametrize("recompute", [None, ("qkv",)])
def test_bytes_are_exact_for_lengths_and_samples_that_were_not_traced(recompute):
    """Against counted steps of two micro-batches, whose batch is counted by itself."""
    plan = planned(make_batch(0), recompute=recompute)
    footprint, step = footprint_of(plan), make_step(plan)
    assert plan.max_tokens == 256 * plan.micro_batch_size

    for length, samples in ((9, 300), (100, 30), (300, 7)):
        micro = padded([torch.ones(length + 1, dtype=torch.long)] * samples)
        found = step.measure(bb.LogicalBatch([micro, micro]), None) - sum(t.nbytes for t in micro.values())
        expected = footprint.bytes_of(samples, length)

        # The planned batch is in it, of 64 samples as long as the longest, and their list.
        assert 0 < expected - found < 0.6 * MIB, (length, samples)


def test_no_micro_batch_needs_more_than_the_budget():
    """Of batches as planned for, and of shorter and longer ones."""
    plan = planned(make_batch(0))
    full = []
    for seed, longest in ((1, 256), (3, 64), (4, 400)):
        peaks, sizes = peaks_of(make_step(plan), make_batch(seed, longest=longest))
        assert max(peaks) <= 16 * MIB, (seed, sizes)
        assert sum(sizes) == NUM_SAMPLES
        full.append(max(peaks))
    assert max(full) > 0.85 * 16 * MIB, "And it is made use of."


def test_the_gradient_is_that_of_the_big_batch():
    torch.manual_seed(0)
    plan, model, batch = planned(make_batch(0)), Attention().double(), make_batch(1)
    expected = big_batch_gradients(model, loss_fn, padded(batch))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    result = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=1.0), plan=plan, **OPTIONS)(batch)

    assert len(result.micro_batch_sizes) > 2
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    assert_same_gradients(moved, expected, tolerance=1e-9)


def test_a_bound_of_tokens_exceeds_the_budget_or_leaves_most_of_it():
    """Control: a plan for samples of up to 64 tokens says nothing about 256, and one for 256 little about 48."""
    short = replace(planned(make_batch(0, longest=64, num_samples=256)), footprint=None)
    peaks, _ = peaks_of(make_step(short), make_batch(1))
    assert max(peaks) > 1.2 * 16 * MIB

    long, many = planned(make_batch(0)), make_batch(1, shortest=47, longest=48, num_samples=400)
    by_tokens, many_sizes = peaks_of(make_step(replace(long, footprint=None)), many)
    by_bytes, few_sizes = peaks_of(make_step(long), many)
    assert max(by_tokens) < 0.5 * 16 * MIB < max(by_bytes) <= 16 * MIB
    assert len(few_sizes) < 0.5 * len(many_sizes)


def test_a_plan_for_short_samples_holds_for_long_ones():
    plan = planned(make_batch(0, longest=64, num_samples=256))

    peaks, _ = peaks_of(make_step(plan), make_batch(1))

    assert max(peaks) <= 16 * MIB


def test_a_memory_budget_makes_and_tries_a_plan_with_a_footprint():
    model, batch = Attention(), make_batch(0)
    step = bb.Step(model, loss_fn, torch.optim.AdamW(model.parameters()), memory_budget="16MiB", **OPTIONS)
    step(batch)

    assert step.plan is not None
    assert step.plan.footprint is not None
    peaks, _ = peaks_of(step, make_batch(1))
    assert max(peaks) <= 16 * MIB


def test_a_size_that_was_asked_for_is_not_exceeded_by_the_longest():
    plan = planned(make_batch(0), micro_batch_size=4)

    assert 4 <= footprint_of(plan).most(256) < 6  # the next smaller number of micro-batches


def test_a_plan_with_a_footprint_can_be_written_and_read():
    plan = planned(make_batch(0))

    assert bb.Plan.from_json(plan.to_json()) == plan
    assert hash(plan) == hash(bb.Plan.from_json(plan.to_json()))


class ByLength(Attention):
    """Does something else for long samples."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits if tokens.shape[1] < 100 else logits * 2 + logits.exp().log()


@pytest.mark.parametrize("why", ["one length", "lengths near to each other", "other operations"])
def test_where_there_is_no_footprint_tokens_are_the_bound(why):
    lengths = {"one length": [200], "lengths near to each other": range(150, 200), "other operations": range(8, 200)}
    batch = [torch.ones(n + 1, dtype=torch.long) for n in lengths[why]]
    plan = planned(batch * 4, model=ByLength() if why == "other operations" else None)

    assert plan.footprint is None
    assert plan.max_tokens == (len(batch[-1]) - 1) * plan.micro_batch_size
