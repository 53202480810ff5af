"""The number shown is the big batch's loss for every micro-batch size, uneven pieces and token weights included."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import spans
from tests.reference import big_batch_loss, slice_batch


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100)


def count_valid(batch):
    return (batch["y"] != -100).sum()


def build() -> dict[str, Any]:
    torch.manual_seed(59)
    model = nn.Linear(4, 3)
    y = torch.tensor([0, 1, -100, -100, 2, -100, 1, 0, 2, 1])
    return dict(model=model, batch=dict(x=torch.randn(10, 4), y=y), n=10, micros=[1, 3, 4, 10])


def reference():
    case = build()
    return dict(loss=big_batch_loss(case["model"], mean_loss, case["batch"]))


def _run(combine):
    case = build()
    losses = []
    for micro in case["micros"]:
        parts = [slice_batch(case["batch"], *span) for span in spans(case["n"], micro)]
        values = [
            (float(mean_loss(case["model"], part).detach()), int(count_valid(part)))
            for part in parts
            if count_valid(part) > 0
        ]
        losses.append(combine(values, int(count_valid(case["batch"])), len(parts)))
    return dict(losses=losses)


def careful():
    return _run(lambda values, valid, num_parts: sum(loss * count for loss, count in values) / valid)


def naive_mean_of_means():
    return _run(lambda values, valid, num_parts: sum(loss for loss, _ in values) / len(values))


def naive_sum():
    return _run(lambda values, valid, num_parts: sum(loss for loss, _ in values))


def naive_last_scaled():
    return _run(lambda values, valid, num_parts: values[-1][0] / num_parts)


def ours():
    case = build()
    results = [
        bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=micro, weight=count_valid)
        for micro in case["micros"]
    ]
    return dict(losses=[float(result.loss) for result in results])


def check(result):
    wanted = reference()["loss"]
    assert len(result["losses"]) == 4
    assert all(abs(loss - wanted) < 1e-5 for loss in result["losses"]), f"{result['losses']} against {wanted:.4f}"
