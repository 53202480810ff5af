"""Where not even the smallest micro-batch fits, modules are recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes
from tests.cases.common import FakeOutOfMemory
from tests.reference import assert_same_gradients


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16))

    def forward(self, x):
        return x + self.inner(x)


class Limited(nn.Module):
    """Runs out of memory when so many blocks keep what they saved; says nothing of it to a trace without numbers."""

    def __init__(self, most_kept):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.most_kept = most_kept
        self.refusals = 0

    def forward(self, x):
        x = self.blocks(x)
        is_real = type(x) is torch.Tensor
        num_kept = sum(not any("_bigbatch_on" in vars(m) for m in block.modules()) for block in self.blocks)
        if is_real and torch.is_grad_enabled() and num_kept > self.most_kept:
            self.refusals += 1
            raise FakeOutOfMemory
        return x


def loss_fn(model, batch):
    return model(batch).square().mean()


def make(most_kept):
    torch.manual_seed(0)
    model = Limited(most_kept).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 200, 16, dtype=torch.float64)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_modules_are_recomputed_and_the_step_is_the_same(caplog):
    expected, optimizer, batch = make(most_kept=4)
    loss_fn(expected, batch).backward()
    optimizer.step()
    model, optimizer, batch = make(most_kept=2)
    step = bb.Step(model, loss_fn, optimizer)

    result = step(batch)

    assert result.retries > 0
    assert model.refusals > 0
    assert step.plan is not None
    assert step.plan.recompute
    assert "modules recomputed" in caplog.text
    assert_same_gradients(weights(model), weights(expected))
    assert step(batch).retries == 0  # it is remembered


def test_when_that_does_not_help_the_model_is_as_before():
    model, optimizer, batch = make(most_kept=-1)
    before = weights(model)
    step = bb.Step(model, loss_fn, optimizer)

    with pytest.raises(bb.BudgetError, match="Nothing was moved"):
        step(batch)

    assert step.plan is None
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with LiveBytes() as live:  # recompute is off: what was saved is alive after the forward
        live.track(model)
        model.most_kept = 4
        loss = loss_fn(model, batch)
        assert live.current_bytes() > 4 * 3 * 200 * 256 * 8
    del loss


def test_plans_of_ones_own_are_not_replaced_by_what_they_have():
    model, optimizer, batch = make(most_kept=-1)
    plan = bb.Plan(micro_batch_size=3, recompute=tuple(f"blocks.{index}" for index in range(4)))
    step = bb.Step(model, loss_fn, optimizer, plan=plan)

    with pytest.raises(bb.BudgetError, match="Nothing was moved"):
        step(batch)

    assert step.plan == plan
