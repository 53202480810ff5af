"""Without the random state of the forward, the recomputed dropout mask differs from the one the loss saw."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.cases.common import same
from tests.reference import gradients


def build():
    torch.manual_seed(27)
    block = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 1))
    return dict(block=block, x=torch.randn(8, 16), seed=123)


def _run(forward):
    case = build()
    torch.manual_seed(case["seed"])
    forward(case["block"], case["x"].clone().requires_grad_()).square().mean().backward()
    return dict(g=gradients(case["block"]), rng_after=torch.rand(1))


def reference():
    return _run(lambda block, x: block(x))


def careful():
    return _run(lambda block, x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=True))


def naive():
    return _run(lambda block, x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False))


def ours():
    return _run(lambda block, x: bb.recompute(block)(x))


def ours_step():
    case = build()
    model = nn.Sequential(case["block"])
    torch.manual_seed(case["seed"])
    with bb.apply(bb.Plan(micro_batch_size=8, recompute=("0",)), model):
        bb.accumulate(model, lambda model, x: model(x).square().mean(), case["x"])
    return dict(g=gradients(case["block"]), rng_after=torch.rand(1))


def check(result):
    wanted = reference()
    same(result["g"], wanted["g"], 1e-4)
    assert torch.equal(result["rng_after"], wanted["rng_after"]), "the random stream shifted after the step"
