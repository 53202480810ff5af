"""What an optimizer does beside moving weights is undone too."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.stepping.optimizer_undo import OptimizerUndo
from tests.cases.common import FakeOutOfMemory


class Counting(torch.optim.Optimizer):
    """Counts in its settings, lowers its own learning rate, and fails at the second parameter when it is told to."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.failures = 0

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] *= 0.5
            group["largest"] = group["k"]
            for index, p in enumerate(group["params"]):
                if index == 1 and self.failures:
                    self.failures -= 1
                    raise FakeOutOfMemory
                p.sub_(p.grad, alpha=group["lr"])


def make(num_groups=1, failures=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    groups = [{"params": layer.parameters()} for layer in model] if num_groups == 2 else model.parameters()
    optimizer = Counting(groups)
    optimizer.failures = failures
    step = bb.Step(model, lambda m, b: m(b).square().mean(), optimizer)
    return model, optimizer, step


@pytest.mark.parametrize("num_groups", [1, 2])
def test_settings_are_put_back_before_the_retry(num_groups):
    batch = torch.randn(4, 3)
    expected, undisturbed, step = make(num_groups)
    step(batch)
    model, optimizer, step = make(num_groups, failures=1)

    result = step(batch)

    assert result.retries == 1
    for group, other in zip(optimizer.param_groups, undisturbed.param_groups, strict=True):
        assert {n: v for n, v in group.items() if n != "params"} == {n: v for n, v in other.items() if n != "params"}
    for p, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, other)


def test_when_it_cannot_be_made_again_the_settings_are_as_before():
    _, optimizer, step = make(failures=100)

    with pytest.raises(bb.BudgetError, match="Nothing was moved"):
        step(torch.randn(1, 3))

    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    assert settings == {"lr": 0.1, "k": 0}


def test_the_number_of_skipped_steps_in_a_row_is_saved():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    options = {"on_non_finite": "skip", "max_skipped": 2}

    def make_step():
        return bb.Step(model, lambda m, b: m(b).mean(), torch.optim.SGD(model.parameters(), lr=0.1), **options)

    step, bad = make_step(), torch.full((2, 3), torch.nan)
    step(bad)
    step(bad)
    again = make_step()
    again.load_state_dict(step.state_dict())

    with pytest.raises(bb.NonFiniteError, match="3 steps in a row"):
        again(bad)


@pytest.mark.parametrize(("seconds", "copies"), [(0.0, False), (0.2, True)])
def test_copies_are_made_as_long_as_they_are_a_small_part_of_a_step(seconds, copies):
    """4 MiB of weights and state take about a millisecond: too much of a step without work, not of one of 200 ms."""
    weight = nn.Parameter(torch.randn(1024, 512))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    undo = OptimizerUndo([optimizer])

    for _ in range(8):
        undo.take()
        undo.let_go()
        time.sleep(seconds)

    assert undo.is_exact == copies


def test_few_bytes_are_always_copied():
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    undo = OptimizerUndo([optimizer])

    for _ in range(20):
        undo.take()
        undo.let_go()

    assert undo.is_exact
