"""Gradient hooks that step and clear inside backward fire at every micro-batch.

They must be found and refused (or held back), never silently stepped once per micro-batch.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import spans
from tests.reference import slice_batch


def mean_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def build():
    torch.manual_seed(62)
    model = nn.Linear(3, 1)
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}
    steps = []

    def hook(parameter):
        optimizers[parameter].step()
        parameter.grad = None
        steps.append(1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return dict(model=model, steps=steps, batch=dict(x=torch.randn(8, 3), y=torch.randn(8, 1)), n=8, micro=2)


def reference():
    return dict(refused_or_steps_per_parameter=1)


def careful():
    parameters = build()["model"].parameters()
    return dict(refused=any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters))


def naive():
    case = build()
    for span in spans(case["n"], case["micro"]):
        (mean_loss(case["model"], slice_batch(case["batch"], *span)) / 4).backward()
    return dict(refused=False, steps=len(case["steps"]) / 2)


def _ours(run):
    case = build()
    before = [parameter.detach().clone() for parameter in case["model"].parameters()]
    try:
        run(case)
    except bb.GradientError:
        after = list(case["model"].parameters())
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "refused, but the weights moved"
        assert all(parameter.grad is None for parameter in after), "refused, but gradients are left"
        return dict(refused=True)
    return dict(refused=False, steps=len(case["steps"]) / 2)


def ours_accumulate():
    return _ours(lambda case: bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=case["micro"]))


def ours_step():
    def run(case):
        optimizer = torch.optim.SGD(case["model"].parameters(), 0.1)
        bb.Step(case["model"], mean_loss, optimizer, micro_batch_size=case["micro"])(case["batch"])

    return _ours(run)


def check(result):
    assert result.get("refused") or result["steps"] == 1, f"{result['steps']} updates per parameter in one step"
