"""A shared block recomputed twice under DDP: reentrant mode marks its parameters ready twice and raises."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.cases.common import same
from tests.process_group import in_process_group_of_one
from tests.reference import gradients


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.pre = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self.b, torch.tanh(self.call(self.b, self.pre(x))))


def build(call=lambda block, x: block(x)):
    torch.manual_seed(53)
    x = torch.randn(4, 4)
    torch.manual_seed(1)
    return dict(model=Net(call), x=x)


def reference():
    case = build()
    case["model"](case["x"]).square().mean().backward()
    return gradients(case["model"])


def _run(use_reentrant):
    case = build(lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant))

    def run():
        wrapped = nn.parallel.DistributedDataParallel(case["model"])
        wrapped(case["x"]).square().mean().backward()
        return gradients(case["model"])

    return in_process_group_of_one(run)


def careful():
    return _run(False)


def naive():
    return _run(True)


def ours():
    case = build()

    def run():
        model = case["model"]
        plan = bb.Plan(micro_batch_size=2, accumulation_steps=2, recompute=("b",))
        bb.apply(plan, model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        bb.accumulate(wrapped, lambda m, x: m(x).square().mean(), case["x"], micro_batch_size=2, reduce="overlap")
        return gradients(model)

    return in_process_group_of_one(run)


def check(result):
    same(result, reference(), 1e-5)
