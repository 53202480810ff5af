"""clip(clip(g1) + g2) is not clip(g1 + g2)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import RecordingSGD, big_batch_gradients, gradients, slice_batch


def mean_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def build():
    torch.manual_seed(14)
    model = nn.Linear(3, 1, bias=False)
    x = torch.randn(4, 3) * torch.tensor([10.0, 0.1, 0.1, 10.0])[:, None]
    return dict(model=model, batch=dict(x=x, y=torch.zeros(4, 1)), max_norm=1.0, n=4, micro=1)


def reference():
    case = build()
    whole = big_batch_gradients(case["model"], mean_loss, case["batch"])
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in whole.values()))
    return {name: gradient * min(1.0, float(case["max_norm"] / norm)) for name, gradient in whole.items()}


def _run(each, average_after=False):
    case = build()
    model = case["model"]
    for span in spans(case["n"], case["micro"]):
        (mean_loss(model, slice_batch(case["batch"], *span)) / (1 if average_after else 4)).backward()
        if each:
            nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"])
    if not each:
        nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"])
    if average_after:
        for parameter in model.parameters():
            parameter.grad /= 4
    return gradients(model)


def careful():
    return _run(False)


def naive():
    return _run(True)


def naive_clip_before_average():
    return _run(False, average_after=True)


def ours():
    case = build()
    optimizer = RecordingSGD(case["model"])
    step = bb.Step(case["model"], mean_loss, optimizer, micro_batch_size=case["micro"], max_grad_norm=case["max_norm"])
    step(case["batch"])
    return optimizer.seen[-1]


def check(result):
    same(result, reference(), 1e-4)
