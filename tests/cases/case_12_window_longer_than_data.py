"""Fewer micro-batches than a step takes: one smaller step must still happen; zero steps is silent non-training."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same
from tests.reference import RecordingSGD, big_batch_gradients, gradients


def build():
    torch.manual_seed(11)
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    loader = [(x[index : index + 1], y[index : index + 1]) for index in range(3)]
    return dict(model=nn.Linear(2, 1), loader=loader, window=8, x=x, y=y)


def mean_loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def reference():
    case = build()
    return dict(steps=1, grad=big_batch_gradients(case["model"], mean_loss, (case["x"], case["y"])))


def _run(divide_by, flush):
    case = build()
    steps, found = 0, None
    for index, batch in enumerate(case["loader"]):
        (mean_loss(case["model"], batch) / divide_by).backward()
        if (index + 1) % case["window"] == 0 or (flush and index == 2):
            steps += 1
            found = gradients(case["model"])
    return dict(steps=steps, grad=found)


def careful():
    return _run(3, True)


def naive():
    return _run(8, False)


def naive_tiny_step():
    return _run(8, True)


def _ours(batch, **how):
    case = build()
    optimizer = RecordingSGD(case["model"])
    step = bb.Step(case["model"], mean_loss, optimizer, **how)
    step(batch(case))
    return dict(steps=step.num_steps, grad=optimizer.seen[-1])


def ours():
    return _ours(lambda case: (case["x"], case["y"]), micro_batch_size=1)


def ours_with_a_loader_of_micro_batches():
    return _ours(lambda case: bb.LogicalBatch(case["loader"][: case["window"]]))


def check(result):
    assert result["steps"] == 1, f"{result['steps']} steps"
    same(result["grad"], reference()["grad"])
