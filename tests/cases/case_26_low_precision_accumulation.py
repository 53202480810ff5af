"""bf16 parameters: adding 256 small gradients in bf16 loses most of them; they are accumulated in fp32."""

import torch
import torch.nn as nn

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def mean_loss(model, batch):
    return (model(batch["x"]) - batch["y"] - 1).mean() * 3


def build():
    torch.manual_seed(20)
    model = nn.Linear(8, 1, bias=False).bfloat16()
    batch = dict(x=(torch.rand(256, 8) + 0.5).bfloat16(), y=torch.zeros(256, 1).bfloat16())
    return dict(model=model, batch=batch, n=256, micro=1)


def reference():
    case = build()
    return big_batch_gradients(case["model"], mean_loss, case["batch"])


def careful():
    case = build()
    added = {}
    for span in spans(case["n"], case["micro"]):
        case["model"].zero_grad()
        (mean_loss(case["model"], slice_batch(case["batch"], *span)) / 256).backward()
        for name, parameter in case["model"].named_parameters():
            added[name] = added.get(name, 0) + parameter.grad.float()
    return added


def naive():
    case = build()
    for span in spans(case["n"], case["micro"]):
        (mean_loss(case["model"], slice_batch(case["batch"], *span)) / 256).backward()
    return gradients(case["model"])


def ours():
    case = build()
    bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def check(result):
    same(result, reference(), 4e-3)
