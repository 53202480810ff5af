"""Truncated back-propagation through time inside a step.

The carried state is detached, and the gradients of all chunks are kept until the step.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same
from tests.reference import gradients


def build(dtype=torch.float32):
    torch.manual_seed(61)
    model = nn.ModuleDict(dict(c=nn.GRUCell(2, 4), o=nn.Linear(4, 1)))
    x, y = torch.randn(6, 3, 2), torch.randn(6, 3, 1)
    return dict(model=model.to(dtype), x=x.to(dtype), y=y.to(dtype), chunk=2)


def _chunk_loss(model, hidden, x, y):
    """Sum over the chunk's moments of the mean over sequences; the state goes on."""
    loss = 0
    for moment in range(len(x)):
        hidden = model["c"](x[moment], hidden)
        loss = loss + F.mse_loss(model["o"](hidden), y[moment])
    return loss, hidden


def _run(dtype, zero_inside=False, detach=True):
    case = build(dtype)
    model = case["model"]
    hidden = torch.zeros(3, 4, dtype=dtype)
    for x, y in zip(case["x"].split(case["chunk"]), case["y"].split(case["chunk"]), strict=True):
        if zero_inside:
            model.zero_grad(set_to_none=True)
        loss, hidden = _chunk_loss(model, hidden.detach() if detach else hidden, x, y)
        (loss / 6).backward()
    return gradients(model)


def reference():
    return _run(torch.float64)


def careful():
    return _run(torch.float32)


def naive_zero_inside():
    return _run(torch.float32, zero_inside=True)


def naive_not_detached():
    return _run(torch.float32, detach=False)


class CarryingLoss:
    """A loss that hands the detached state from one chunk of time to the next."""

    def __init__(self, dtype):
        self.hidden = torch.zeros(3, 4, dtype=dtype)

    def __call__(self, model, chunk):
        x, y = chunk
        loss, hidden = _chunk_loss(model, self.hidden, x, y)
        self.hidden = hidden.detach()
        return bb.Sum(loss / 6)


def ours():
    """Time is what is cut: dimension 0 holds 6 moments, 2 to a micro-batch."""
    case = build()
    bb.accumulate(case["model"], CarryingLoss(torch.float32), (case["x"], case["y"]), micro_batch_size=case["chunk"])
    return gradients(case["model"])


def ours_with_ready_chunks():
    case = build()
    chunks = list(zip(case["x"].split(case["chunk"]), case["y"].split(case["chunk"]), strict=True))
    bb.accumulate(case["model"], CarryingLoss(torch.float32), bb.LogicalBatch(chunks))
    return gradients(case["model"])


def check(result):
    same(result, reference(), 1e-4)
