"""Even one sample fails: stop after a bounded number of tries with an error that says so; never loop or guess."""

import torch
import torch.nn as nn

import bigbatch as bb
from tests.cases.common import FakeOutOfMemory


def build():
    calls = []

    def attempt(micro):
        calls.append(micro)
        if len(calls) > 50:
            raise AssertionError("still trying after 50 attempts")
        raise FakeOutOfMemory("simulated: out of memory")

    return dict(attempt=attempt, calls=calls, start=16, oom=FakeOutOfMemory)


def reference():
    return dict(outcome="error", attempts_at_most=10)


def careful():
    case = build()
    micro = case["start"]
    while True:
        try:
            case["attempt"](micro)
            return dict(outcome="fit", attempts=len(case["calls"]))
        except torch.OutOfMemoryError:
            pass
        if micro == 1:
            return dict(outcome="error", attempts=len(case["calls"]))
        micro //= 2


def naive_floor_at_one():
    case = build()
    micro = case["start"]
    while True:
        try:
            case["attempt"](micro)
            return dict(outcome="fit", attempts=1)
        except torch.OutOfMemoryError:
            micro = max(1, micro // 2)


def naive_returns_default():
    case = build()
    try:
        case["attempt"](case["start"])
    except torch.OutOfMemoryError:
        return dict(outcome="fit", attempts=1, micro=16)


def ours():
    """A budget is given, and every try runs out of memory."""
    case = build()
    model = nn.Linear(2, 1)

    def loss_fn(model, x):
        case["attempt"](len(x))
        return model(x).square().mean()

    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), memory_budget="1GiB")
    try:
        step(torch.randn(case["start"], 2))
    except bb.BudgetError:
        return dict(outcome="error", attempts=len(case["calls"]))
    return dict(outcome="fit", attempts=len(case["calls"]))


def check(result):
    wanted = reference()
    assert result["outcome"] == wanted["outcome"], result
    assert result["attempts"] <= wanted["attempts_at_most"], result
