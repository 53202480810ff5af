"""Backward runs outside autocast: recomputation must restore the autocast state of the forward."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.cases.common import same
from tests.reference import gradients


def build():
    torch.manual_seed(31)
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return dict(block=block, x=torch.randn(6, 8))


def _run(forward):
    case = build()
    x = case["x"].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = forward(case["block"], x).float().square().mean()
    loss.backward()
    return gradients(case["block"])


def reference():
    return _run(lambda block, x: block(x))


def careful():
    return _run(lambda block, x: checkpoint(block, x, use_reentrant=False))


class ForgetfulCheckpoint(torch.autograd.Function):
    """Recomputes in whatever state backward finds itself in."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, *gradients):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(x), *gradients)
        return None, x.grad


def naive():
    return _run(lambda block, x: ForgetfulCheckpoint.apply(block, x))


def ours():
    return _run(lambda block, x: bb.recompute(block)(x))


def ours_step():
    """``precision="bf16"`` is autocast in the forward; what is recomputed later runs under it too."""
    case = build()
    model = nn.Sequential(case["block"])
    with bb.apply(bb.Plan(micro_batch_size=6, recompute=("0",)), model):
        bb.accumulate(model, lambda model, x: model(x).float().square().mean(), case["x"], precision="bf16")
    return gradients(case["block"])


def check(result):
    same(result, reference(), 1e-6)
