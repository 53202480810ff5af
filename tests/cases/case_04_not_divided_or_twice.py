"""The loop and the helper library both divide by the number of micro-batches, or neither does."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def build():
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    batch = dict(x=torch.randn(8, 4), y=torch.randint(0, 3, (8,)))
    return dict(
        model=model,
        batch=batch,
        loss_fn=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        n=8,
        micro=2,
    )


def reference():
    case = build()
    return big_batch_gradients(case["model"], case["loss_fn"], case["batch"])


def _run(scale):
    case = build()
    for span in spans(case["n"], case["micro"]):
        (case["loss_fn"](case["model"], slice_batch(case["batch"], *span)) * scale).backward()
    return gradients(case["model"])


def careful():
    return _run(1 / 4)


def naive_twice():
    return _run(1 / 16)


def naive_never():
    return _run(1.0)


def ours():
    case = build()
    bb.accumulate(case["model"], case["loss_fn"], case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def check(result):
    same(result, reference())
