"""The bytes of a step by kind: they add up at every moment, and their highest moment is the plan's peak."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.memory.events import Event, Storage
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.timeline import KINDS, read_timeline
from bigbatch.stepping.fitting.planner import Planner

WIDTH, BLOCKS = 32, 4


def mark(label: str, live: float, peak: float, gradients: float = 0, seconds: float = 0) -> Event:
    return Event("mark", label, (), peak, live, seconds, gradient_bytes=gradients)


# Resident 100 and inputs of 10. Storage 0 is saved twice and loaded twice; storage 1 is never loaded.
EVENTS = [
    mark("micro-batch", 110, 110),
    Event("save", 0, (Storage(0, 40),), 170, 150, 1.0),
    Event("save", 1, (Storage(0, 40),), 160, 150, 0.5),
    Event("save", 2, (Storage(1, 5),), 155, 155, 0.5),
    mark("backward", 155, 155),
    Event("load", 0, (), 180, 175, 2.0, gradient_bytes=15),
    Event("load", 1, (), 175, 165, 2.0, gradient_bytes=30),
    mark("update", 140, 170, 30, 1.0),
    mark("end", 130, 190, 30, 3.0),
]
PROFILE = MemoryProfile(
    parameter_bytes=50, gradient_bytes=30, optimizer_bytes=30, buffer_bytes=12, average_bytes=5, other_bytes=3
)


def timeline_of(events, batch_bytes=10):
    return read_timeline(events, PROFILE, micro_batch_bytes=10, batch_bytes=batch_bytes, num_later=0)


def test_each_kind_has_what_the_events_say():
    found = timeline_of(EVENTS)

    # The moment of each event itself; those between are where most was alive before it.
    assert found.kinds["saved"][1::2] == (0, 40, 40, 45, 45, 45, 5, 0, 0)
    assert found.kinds["gradients"][1::2] == (0, 0, 0, 0, 0, 15, 30, 30, 30)
    assert found.kinds["work"][1::2] == (0, 0, 0, 0, 0, 5, 20, 0, 0)
    # What was kept to undo the step is gone at its end, and gradients are not taken for it.
    assert found.kinds["buffers"][1::2] == (20, 20, 20, 20, 20, 20, 20, 20, 10)
    assert found.kinds["saved"][2] == 0, "what is not yet saved is work"
    assert found.kinds["work"][2] == 60


def test_the_stretches_are_those_of_the_step():
    found = timeline_of(EVENTS)

    assert [tuple(stretch) for stretch in found.stretches] == [
        ("forward", 1, 0.0, 2.0),
        ("backward", 1, 2.0, 7.0),
        ("update", 0, 7.0, 10.0),
    ]
    assert found.seconds[-1] == 10.0
    assert list(found.seconds) == sorted(found.seconds)


@pytest.mark.parametrize("batch_bytes", [10, 25])
def test_the_kinds_of_made_up_events_add_up(batch_bytes):
    found = timeline_of(EVENTS, batch_bytes)

    expected = [bytes_ + batch_bytes - 10 for e in EVENTS for bytes_ in (e.peak_bytes, e.live_bytes)]
    assert list(found.totals) == expected
    assert found.peak_bytes == 190 + batch_bytes - 10
    assert min(min(values) for values in found.kinds.values()) >= 0


@functools.cache
def planner(device: str) -> Planner:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH))
    step = bb.Step(
        model,
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        torch.optim.AdamW(model.parameters()),
        max_grad_norm=1.0,
    )
    return Planner(step, (torch.randn(6, WIDTH), torch.randn(6, WIDTH)), device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("micro_batch_size", [50, 150, 300])
@pytest.mark.parametrize("recompute", [(), ("0", "2"), (("0", "1", "2"), "3")])
def test_the_highest_moment_is_the_peak_of_the_plan(device, micro_batch_size, recompute):
    plans = planner(device)
    plan = bb.Plan(micro_batch_size=micro_batch_size, recompute=recompute)

    found = plans.timeline(plan, 300)

    assert found.peak_bytes == plans.peak_bytes(plan, 300)
    assert set(found.kinds) == set(KINDS)
    assert min(min(values) for values in found.kinds.values()) >= 0
    # What a profile calls gradients has the sums of BatchNorm too, which live as long.
    parameters = sum(p.nbytes for p in plans.step.model.parameters())
    assert parameters <= max(found.kinds["gradients"]) <= plans.traced.gradient_bytes
    assert found.num_later == 300 // micro_batch_size - 1


def test_recompute_turns_what_is_saved_into_work():
    """Control: the kinds are told apart, and are not only a sum."""
    plans = planner("cpu")

    plain, recomputed = (
        plans.timeline(bb.Plan(micro_batch_size=150, recompute=names), 300) for names in ((), ("0", "1", "2", "3"))
    )

    saved_inside = 150 * WIDTH * 4 * 4
    assert max(plain.kinds["saved"]) - max(recomputed.kinds["saved"]) >= BLOCKS * saved_inside
    assert max(recomputed.kinds["work"]) >= saved_inside
