"""7 micro-batches, 4 to a step, one epoch: the last 3 must make a step, scaled by 3 and not by 4.

The result is the list of parameter vectors after each optimizer step (plain SGD, learning rate 0.1).
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import spans


def build():
    torch.manual_seed(9)
    x, y = torch.randn(14, 3), torch.randn(14, 1)
    loader = [(x[start : start + 2], y[start : start + 2]) for start in range(0, 14, 2)]
    return dict(model=nn.Linear(3, 1), loader=loader, x=x, y=y, window=4, lr=0.1)


def mean_loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def vector(model):
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def reference():
    case = build()
    model = copy.deepcopy(case["model"]).double()
    optimizer = torch.optim.SGD(model.parameters(), case["lr"])
    vectors = []
    for start, stop in spans(14, 8):
        optimizer.zero_grad()
        mean_loss(model, (case["x"][start:stop].double(), case["y"][start:stop].double())).backward()
        optimizer.step()
        vectors.append(vector(model))
    return vectors


def _run(flush, divide_by):
    case = build()
    model, loader, window = case["model"], case["loader"], case["window"]
    optimizer = torch.optim.SGD(model.parameters(), case["lr"])
    vectors = []
    for index, batch in enumerate(loader):
        left = len(loader) - index + index % window
        (mean_loss(model, batch) / (min(window, left) if divide_by == "actual" else window)).backward()
        if (index + 1) % window == 0 or (flush and index == len(loader) - 1):
            optimizer.step()
            optimizer.zero_grad()
            vectors.append(vector(model))
    return vectors


def careful():
    return _run(True, "actual")


def naive_dropped():
    return _run(False, "actual")


def naive_weakened():
    return _run(True, "planned")


def _ours(batches, **how):
    case = build()
    optimizer = torch.optim.SGD(case["model"].parameters(), case["lr"])
    step = bb.Step(case["model"], mean_loss, optimizer, **how)
    vectors = []
    for batch in batches(case):
        step(batch)
        vectors.append(vector(case["model"]))
    return vectors


def ours():
    """The loader yields batches of 8; the last one holds 6."""
    return _ours(
        lambda case: [(case["x"][start:stop], case["y"][start:stop]) for start, stop in spans(14, 8)],
        micro_batch_size=2,
    )


def ours_with_a_loader_of_micro_batches():
    """The loader yields micro-batches; four of them, or what is left, are one step."""
    return _ours(lambda case: [bb.LogicalBatch(case["loader"][start:stop]) for start, stop in spans(7, case["window"])])


def check(result):
    wanted = reference()
    assert len(result) == len(wanted), f"{len(result)} optimizer steps, expected {len(wanted)}"
    for found, expected in zip(result, wanted, strict=True):
        assert torch.allclose(found.double(), expected, atol=1e-5), "parameters differ after a step"
