"""A fast part of ``benchmarks/planner/accuracy.py``: predicted peaks are those of real steps."""

from __future__ import annotations

import functools

import pytest
import torch

import bigbatch as bb
from benchmarks.planner.accuracy import (
    DEPENDS_ON_DATA,
    RECOMPUTE,
    Bench,
    Configuration,
    large_candidates,
    small_configurations,
)
from benchmarks.planner.accuracy_report import Errors, errors_of
from benchmarks.planner.budgets import groupings
from benchmarks.planner.models import models

EXACT = 1e-5
WITH_WORKSPACE = 0.01
CONFIGURATIONS = [
    Configuration("small", "gpt2-like", "AdamW, fused", 4, "none", 11),
    Configuration("small", "gpt2-like", "AdamW, fused", 2, "every block", 6),
    Configuration("small", "gpt2-like", "AdamW, fused", 8, "planned", 8),
    Configuration("small", "llama-like, tied head", "SGD, momentum", 1, "every second block", 3),
    Configuration("small", "llama-like, tied head", "SGD, momentum", 8, "none", 8),
    Configuration("small", "llama-like, tied head", "SGD, momentum", 4, "planned", 11),
    Configuration("small", "lstm", "AdamW, foreach", 2, "none", 6),
    Configuration("small", "lstm", "AdamW, foreach", 16, "every second block", 17),
    Configuration("small", "lstm", "AdamW, foreach", 8, "planned", 23),
    Configuration("small", "unet", "AdamW, fused", 2, "none", 5),
    Configuration("small", "unet", "AdamW, fused", 4, "every block", 4),
    Configuration("small", "unet", "AdamW, fused", 16, "planned", 16),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def bench(name: str, optimizer: str) -> Bench:
    return Bench("small", name, optimizer)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: f"{c.model}, {c.batch_size} in {c[3]}, {c[4]}")
def test_the_predicted_peak_is_that_of_the_real_step(configuration):
    row = bench(*configuration[1:3]).row(configuration)

    assert abs(row.predicted_bytes / row.counted_bytes - 1) < EXACT
    assert abs(row.predicted_with_workspace_bytes / row.allocated_bytes - 1) < WITH_WORKSPACE


def measured(configuration: Configuration) -> int:
    made = bench(*configuration[1:3])
    return made.measure(made.plan(configuration), configuration.batch_size)[0]


def test_who_forgets_the_gradients_beside_later_micro_batches_is_off():
    """Control: the first micro-batch alone."""
    configuration = CONFIGURATIONS[0]
    made = bench(*configuration[1:3])

    first_alone = made.planner.peak_bytes(made.plan(configuration), configuration.micro_batch_size)

    assert first_alone < 0.95 * measured(configuration)


def test_who_forgets_the_state_that_an_optimizer_makes_in_its_first_step_is_off():
    """Control: parameters, gradients and activations alone."""
    configuration = CONFIGURATIONS[0]
    made = bench(*configuration[1:3])

    without = made.planner.peak_bytes(made.plan(configuration), 11) - made.planner.traced.optimizer_bytes

    assert without < 0.9 * measured(configuration)


def test_who_ignores_what_is_recomputed_is_off():
    """Control: the same cut without recompute."""
    configuration = CONFIGURATIONS[1]
    made = bench(*configuration[1:3])

    plain = made.planner.peak_bytes(bb.Plan(micro_batch_size=2), 6)

    assert plain > 1.05 * measured(configuration)


def test_tensors_alone_are_less_than_what_the_allocator_gives_out_for_convolutions():
    """Control: without the workspace of kernels."""
    configuration = CONFIGURATIONS[-1]
    made = bench(*configuration[1:3])
    plan = made.plan(configuration)

    assert made.planner.peak_bytes(plan, 16) < 0.9 * made.measure(plan, 16)[1]


def test_the_small_configurations_are_balanced():
    found = list(small_configurations())
    counts = [
        [sum(value in c for c in found) for value in values]
        for values in (RECOMPUTE, dict.fromkeys(c.optimizer for c in found), dict.fromkeys(c.model for c in found))
    ]

    assert len(found) == len(set(found)) == 172
    assert all(max(each) - min(each) <= 6 for each in counts), counts
    assert all(c.model != DEPENDS_ON_DATA for c in found)


@pytest.mark.parametrize("name", models("large"))
def test_large_candidates_name_what_there_is(name):
    assert {c.model for c in large_candidates(name)} == {name}
    assert len(set(large_candidates(name))) == 3 * len(RECOMPUTE)


def test_errors_are_shares_of_what_was_measured():
    pairs = [(100.0, 100.0)] * 18 + [(97.0, 100.0), (104.0, 100.0)]

    assert errors_of(pairs) == Errors(20, median=0.0, high=0.03, worst=0.04, num_under=1, most_under=0.03)


@pytest.mark.parametrize(("num_blocks", "num_choices"), [(0, 1), (1, 2), (2, 5), (3, 13), (4, 34)])
def test_every_choice_of_groups_is_tried_once(num_blocks, num_choices):
    found = list(groupings([f"b{i}" for i in range(num_blocks)]))

    assert len(found) == len(set(found)) == num_choices
