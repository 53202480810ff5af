"""Adding the loss tensor itself to a running total keeps every micro-batch's graph alive; a step must not do it."""

import weakref

import torch
import torch.nn as nn

import bigbatch as bb


def build():
    torch.manual_seed(56)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return dict(model=model, x=torch.randn(16, 8), micro=2, n=16)


def reference():
    return dict(alive_graphs_at_most=1)


def _tagging(references):
    """A function that leaves a weak reference to each graph it was part of."""

    class Tag(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.tag = type("GraphIsAlive", (), {})()
            references.append(weakref.ref(ctx.tag))
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients):
            return gradients[0]

    return Tag.apply


def _num_alive(references):
    return sum(reference() is not None for reference in references)


def _run(keep):
    case = build()
    total, references = 0.0, []
    tag = _tagging(references)
    for part in case["x"].split(case["micro"]):
        loss = tag(case["model"](part)).square().mean() / 8
        loss.backward()
        total = total + (loss if keep else loss.detach())
        del loss
    return dict(alive=_num_alive(references))


def careful():
    return _run(False)


def naive():
    return _run(True)


def ours():
    case = build()
    references, alive_at_forward = [], []
    tag = _tagging(references)

    def loss_fn(model, x):
        alive_at_forward.append(_num_alive(references))
        return tag(model(x)).square().mean()

    result = bb.accumulate(case["model"], loss_fn, case["x"], micro_batch_size=case["micro"])
    assert len(alive_at_forward) == len(result.micro_batch_sizes) == 8
    assert max(alive_at_forward) == 0, "an earlier graph is alive at the next forward"
    return dict(alive=_num_alive(references))


def check(result):
    assert result["alive"] <= reference()["alive_graphs_at_most"], f"{result['alive']} graphs alive after the step"
