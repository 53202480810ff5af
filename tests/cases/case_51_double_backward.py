"""A gradient penalty: a gradient of a gradient through a recomputed block, inside micro-batches."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 8)
        self.b = nn.Linear(8, 1)
        self.through = None

    def forward(self, x):
        return self.b(self._first(x) if self.through is None else self.through(self._first, x))

    def _first(self, x):
        return torch.tanh(self.a(x))


def penalised_loss(model, batch):
    x = batch["x"].detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


def build():
    torch.manual_seed(46)
    return dict(model=Critic(), batch=dict(x=torch.randn(6, 3)), n=6, micro=2)


def reference():
    case = build()
    return big_batch_gradients(case["model"], penalised_loss, case["batch"])


def _run(use_reentrant):
    case = build()
    case["model"].through = lambda function, x: checkpoint(function, x, use_reentrant=use_reentrant)
    for span in spans(case["n"], case["micro"]):
        (penalised_loss(case["model"], slice_batch(case["batch"], *span)) / 3).backward()
    return gradients(case["model"])


def careful():
    return _run(False)


def naive():
    return _run(True)


def ours():
    case = build()
    case["model"].through = lambda function, x: bb.recompute(function)(x)
    bb.accumulate(case["model"], penalised_loss, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def check(result):
    same(result, reference(), 1e-4)
