"""One micro-batch has no valid target: its mean cross-entropy is 0/0.

In torch 2.13 the gradient stays zero but the loss is NaN, so a logged or scaled loss is NaN, and a guard against NaN
may drop a good step. The gradient and the reported loss must both be right.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def torch_mean(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100)


def masked_mean(model, batch):
    losses = F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100, reduction="none")
    valid = (batch["y"] != -100).to(losses.dtype)
    return (losses * valid).sum() / valid.sum()


def count_valid(batch):
    return (batch["y"] != -100).sum()


def build():
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    y = torch.tensor([0, 2, -100, -100, 1, -100])
    return dict(model=model, batch=dict(x=torch.randn(6, 4), y=y), n=6, micro=2)


def reference():
    case = build()
    loss = float(torch_mean(case["model"], case["batch"]).detach())
    return dict(grads=big_batch_gradients(case["model"], torch_mean, case["batch"]), loss=loss)


def _run(skip, loss_fn=torch_mean):
    case = build()
    valid = count_valid(case["batch"])
    total = 0.0
    for span in spans(case["n"], case["micro"]):
        part = slice_batch(case["batch"], *span)
        share = count_valid(part) / valid
        if skip and share == 0:
            continue
        loss = loss_fn(case["model"], part) * share
        loss.backward()
        total += float(loss.detach())
    return dict(grads=gradients(case["model"]), loss=total)


def careful():
    return _run(True)


def naive_ce():
    return _run(False)


def naive_masked():
    return _run(False, masked_mean)


def _ours(loss_fn):
    case = build()
    result = bb.accumulate(case["model"], loss_fn, case["batch"], micro_batch_size=case["micro"], weight=count_valid)
    return dict(grads=gradients(case["model"]), loss=float(result.loss))


def ours_ce():
    return _ours(torch_mean)


def ours_masked():
    return _ours(masked_mean)


def check(result):
    wanted = reference()
    same(result["grads"], wanted["grads"])
    assert abs(result["loss"] - wanted["loss"]) < 1e-4, f"reported loss {result['loss']}"
