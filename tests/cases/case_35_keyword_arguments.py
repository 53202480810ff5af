"""Blocks are called with keyword arguments; recomputing must pass them on and keep their gradients."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x, *, scale, mask=None, flag=True):
        return torch.tanh(self.l(x) * scale) * (1.0 if mask is None else mask)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Linear(4, 4)
        self.blk = Block()
        self.call = None

    def forward(self, x):
        hidden = self.pre(x)
        keywords = dict(scale=hidden.mean(-1, keepdim=True), mask=torch.ones(4, dtype=hidden.dtype), flag=False)
        return self.blk(hidden, **keywords) if self.call is None else self.call(self.blk, hidden, **keywords)


def mean_loss(model, batch):
    return model(batch["x"]).square().mean()


def build():
    torch.manual_seed(29)
    return dict(model=Net(), batch=dict(x=torch.randn(6, 4)), n=6, micro=3, checkpoint=["blk"])


def reference():
    case = build()
    return big_batch_gradients(case["model"], mean_loss, case["batch"])


def _run(use_reentrant):
    case = build()
    case["model"].call = lambda block, x, **keywords: checkpoint(block, x, use_reentrant=use_reentrant, **keywords)
    for span in spans(case["n"], case["micro"]):
        (mean_loss(case["model"], slice_batch(case["batch"], *span)) / 2).backward()
    return gradients(case["model"])


def careful():
    return _run(False)


def naive():
    return _run(True)


def naive_closure_detaches():
    def call(block, x, **keywords):
        detached = {name: v.detach() if torch.is_tensor(v) else v for name, v in keywords.items()}
        return block(x, **detached)

    case = build()
    case["model"].call = call
    mean_loss(case["model"], case["batch"]).backward()
    return gradients(case["model"])


def ours():
    case = build()
    plan = bb.Plan(micro_batch_size=case["micro"], recompute=tuple(case["checkpoint"]))
    with bb.apply(plan, case["model"]):
        bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def ours_recompute():
    case = build()
    case["model"].call = lambda block, x, **keywords: bb.recompute(block)(x, **keywords)
    bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def check(result):
    same(result, reference())
