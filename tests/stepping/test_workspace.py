"""Kernels are watched in real micro-batches, and nothing of it stays."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bigbatch as bb
from bigbatch.planning.costs import NOTHING
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.stepping.fitting.workspace import find_workspace


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(8, 4)
    )


def images(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_samples, 3, 32, 32), torch.randint(4, (num_samples,))


def found(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], **options):
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    planner = Planner(step, batch)
    line = find_workspace(step, batch, planner.shadow, planner.traced, 16, lambda size, recompute_all: True)
    return planner, line


def test_convolutions_need_workspace_and_the_peaks_have_it():
    planner, line = found(convolutions(), images(4))

    tensors, with_workspace = planner.peaks(bb.Plan(micro_batch_size=8), 16)

    assert line.at(8) > 0
    assert with_workspace > 1.02 * tensors
    assert tensors == planner.peak_bytes(bb.Plan(micro_batch_size=8), 16)


def test_what_an_optimizer_makes_is_no_workspace_of_kernels():
    """Its temporaries are there when no micro-batch is: the peaks of both are not added up."""
    wide = nn.Linear(1024, 1024)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(16), nn.Flatten(), wide, nn.Linear(1024, 4))
    step = bb.Step(model, loss_fn, torch.optim.AdamW(model.parameters(), foreach=True))
    planner = Planner(step, images(4))

    line = find_workspace(step, planner.batch, planner.shadow, planner.traced, 16, lambda size, recompute_all: True)

    record = planner.shadow.run((2, 2), bb.Plan(micro_batch_size=2))
    temporaries = record.peak_bytes - record.peak_of_micro_batches
    assert planner.shadow.workspaces
    assert temporaries > wide.weight.nbytes
    assert line.at(2) < 0.1 * temporaries


def test_products_need_none():
    """Control: what is found above is not there for every model."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 4))
    planner, line = found(model, images(4))

    tensors, with_workspace = planner.peaks(bb.Plan(micro_batch_size=4), 8)

    assert line == NOTHING
    assert tensors == with_workspace


def test_state_is_as_before_bit_for_bit():
    model, batch = convolutions(), images(4)
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    found(model, batch)

    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_where_another_profiler_runs_nothing_is_measured():
    model = convolutions()
    with torch.autograd.profiler.profile():
        _, line = found(model, images(4))

    assert line == NOTHING


def test_what_does_not_fit_is_not_run():
    model = convolutions()
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    planner = Planner(step, images(4))
    traced, sizes = planner.traced, []
    step.accumulator.loss_fn = lambda model, batch: sizes.append(len(batch[0])) or loss_fn(model, batch)

    find_workspace(step, images(4), planner.shadow, traced, 16, lambda size, recompute_all: size < 4)

    assert set(sizes) == {1, 2}


def test_a_budget_for_the_allocator_is_kept_by_a_plan():
    """The plan leaves room for the workspace, also where tensors alone would fit with a larger micro-batch."""
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    planner, _ = found(model, images(16))
    budget = planner.peaks(bb.Plan(micro_batch_size=8), 16)[0]

    plan = bb.plan(model, loss_fn, images(16), optimizer=optimizer, memory_budget=budget)

    assert planner.peaks(plan, 16)[1] <= budget


def test_a_step_whose_half_batch_is_tried_twice_may_be_planned():
    """Micro-batches of 4 are timed in pairs, which is more than the 7 samples of a batch: this raised BatchError."""
    model, batch = convolutions(), images(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    direct = Planner(bb.Step(model, loss_fn, optimizer), batch).peak_bytes(bb.Plan(micro_batch_size=7), 7)
    step = bb.Step(model, loss_fn, optimizer, batch_size=7, memory_budget=int(0.95 * direct))

    step(batch)

    assert step.accumulator.most_samples == 7
    with pytest.raises(bb.BatchError, match="batch_size=7"):
        step(images(8))
