"""512 micro-batches of one sample with very different loss sizes: their sum in fp32 must not lose the small ones."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def mean_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def build():
    torch.manual_seed(68)
    n = 512
    sizes = torch.logspace(-4, 3, n)[:, None]
    model = nn.Linear(4, 1)
    return dict(model=model, batch=dict(x=torch.randn(n, 4), y=torch.randn(n, 1) * sizes), n=n, micro=1)


def reference():
    case = build()
    return big_batch_gradients(case["model"], mean_loss, case["batch"])


def careful():
    case = build()
    for span in spans(case["n"], case["micro"]):
        (mean_loss(case["model"], slice_batch(case["batch"], *span)) / case["n"]).backward()
    return gradients(case["model"])


def naive_half_precision_sum():
    case = build()
    model = case["model"]
    added = {name: torch.zeros_like(parameter, dtype=torch.float16) for name, parameter in model.named_parameters()}
    for span in spans(case["n"], case["micro"]):
        model.zero_grad()
        (mean_loss(model, slice_batch(case["batch"], *span)) / case["n"]).backward()
        for name, parameter in model.named_parameters():
            added[name] += parameter.grad.half()
    return added


def ours():
    case = build()
    bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def check(result):
    same(result, reference(), 2e-5)
