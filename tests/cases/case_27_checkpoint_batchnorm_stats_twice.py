"""Recomputation must not update running statistics a second time."""

import contextlib

import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.cases.common import same
from tests.reference import gradients


def build():
    torch.manual_seed(21)
    block = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU())
    return dict(block=block, x=torch.randn(8, 4) * 3 + 1)


def _found(block):
    norm = block[1]
    return dict(
        mean=norm.running_mean.clone(),
        var=norm.running_var.clone(),
        n=int(norm.num_batches_tracked),
        g=gradients(block),
    )


def _stats(run):
    case = build()
    run(case["block"], case["x"].clone().requires_grad_()).square().mean().backward()
    return _found(case["block"])


def reference():
    return _stats(lambda block, x: block(x))


@contextlib.contextmanager
def _buffers_aside(block):
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [(norm.running_mean, norm.running_var, norm.num_batches_tracked) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        norm.running_mean, norm.running_var, norm.num_batches_tracked = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm.running_mean, norm.running_var, norm.num_batches_tracked = buffers


def careful():
    def run(block, x):
        def contexts():
            return contextlib.nullcontext(), _buffers_aside(block)

        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    return _stats(run)


def naive():
    return _stats(lambda block, x: checkpoint(block, x, use_reentrant=False))


def ours():
    """In somebody's own loop."""
    case = build()
    model = nn.Sequential(case["block"])
    with bb.apply(bb.Plan(micro_batch_size=8, recompute=("0",)), model):
        model(case["x"].clone().requires_grad_()).square().mean().backward()
    return _found(case["block"])


def ours_recompute():
    """A function of one's own that calls the block."""
    return _stats(lambda block, x: bb.recompute(block)(x))


def ours_step():
    """In a step: one update of the running statistics, whatever is recomputed."""
    case = build()
    model = nn.Sequential(case["block"])
    with bb.apply(bb.Plan(micro_batch_size=8, recompute=("0",)), model):
        bb.accumulate(model, lambda model, x: model(x).square().mean(), case["x"], micro_batch_size=8)
    return _found(case["block"])


def check(result):
    wanted = reference()
    assert result["n"] == wanted["n"], f"updates {result['n']} != {wanted['n']}"
    assert torch.allclose(result["mean"], wanted["mean"])
    assert torch.allclose(result["var"], wanted["var"])
    same(result["g"], wanted["g"])
