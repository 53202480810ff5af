"""The batch grows during warm-up; 'index % window == 0' gives irregular steps. Each must hold the planned count."""

from typing import Any

import torch
import torch.nn as nn

import bigbatch as bb


def build() -> dict[str, Any]:
    return dict(planned=[1, 1, 2, 2, 3, 3, 4, 4], micro_batches=20)


def reference():
    return dict(sizes=[1, 1, 2, 2, 3, 3, 4, 4])


def careful():
    case = build()
    sizes, count = [], 0
    windows = iter(case["planned"])
    window = next(windows)
    for _ in range(case["micro_batches"]):
        count += 1
        if count == window:
            sizes.append(count)
            count, window = 0, next(windows, None)
    return dict(sizes=sizes)


def naive():
    case = build()
    schedule = [window for window in case["planned"] for _ in range(window)]
    sizes, count = [], 0
    for index in range(case["micro_batches"]):
        count += 1
        if index % schedule[index] == 0:
            sizes.append(count)
            count = 0
    return dict(sizes=sizes)


def ours():
    """A growing batch is a growing logical batch: there is no window to count."""
    case = build()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = bb.Step(model, lambda model, x: model(x).square().mean(), optimizer, micro_batch_size=1)
    data = torch.randn(case["micro_batches"], 2)
    sizes = [len(step(batch).micro_batch_sizes) for batch in data.split(case["planned"])]
    assert step.num_steps == len(case["planned"])
    return dict(sizes=sizes)


def check(result):
    assert result["sizes"] == reference()["sizes"], result["sizes"]
