"""A block that appends to a cache passed by reference: when it is recomputed the cache is twice as long.

Accepted: the right gradient (the cache restored or switched off), or a clear refusal before training.
"""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.cases.common import same
from tests.reference import gradients


class CachingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.Linear(4, 4)
        self.q = nn.Linear(4, 4)

    def forward(self, x, cache):
        cache.append(self.k(x))
        keys = torch.cat(cache, 1)
        return (self.q(x) @ keys.transpose(1, 2)).softmax(-1) @ keys


def build():
    torch.manual_seed(44)
    return dict(block=CachingBlock(), x=torch.randn(2, 3, 4))


def _run(forward):
    case = build()
    forward(case["block"], case["x"].clone().requires_grad_(), []).square().mean().backward()
    return gradients(case["block"])


def reference():
    return _run(lambda block, x, cache: block(x, cache))


def careful():
    return _run(lambda block, x, cache: checkpoint(lambda y: block(y, list(cache)), x, use_reentrant=False))


def naive():
    return _run(lambda block, x, cache: checkpoint(block, x, cache, use_reentrant=False))


def ours():
    try:
        return _run(lambda block, x, cache: bb.recompute(block)(x, cache))
    except bb.RecomputeError:
        return dict(refused=True)


def check(result):
    if not result.get("refused"):
        same(result, reference())
