"""A micro-batch size above the batch size (the last small batch): one piece, no error, no change of scale."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same
from tests.reference import big_batch_gradients, gradients


def mean_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def build():
    torch.manual_seed(42)
    batch = dict(x=torch.randn(3, 3), y=torch.randn(3, 1))
    return dict(model=nn.Linear(3, 1), batch=batch, n=3, micro=8)


def reference():
    case = build()
    return big_batch_gradients(case["model"], mean_loss, case["batch"])


def careful():
    case = build()
    mean_loss(case["model"], case["batch"]).backward()
    return gradients(case["model"])


def naive_integer_division():
    case = build()
    for _ in range(case["n"] // case["micro"]):  # No pieces: nothing is done.
        mean_loss(case["model"], case["batch"]).backward()
    return gradients(case["model"])


def naive_scales_by_planned_size():
    case = build()
    (mean_loss(case["model"], case["batch"]) * case["n"] / case["micro"]).backward()
    return gradients(case["model"])


def ours():
    case = build()
    result = bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=case["micro"])
    assert result.micro_batch_sizes == (3,)
    return gradients(case["model"])


def check(result):
    same(result, reference())
