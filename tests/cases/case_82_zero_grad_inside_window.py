"""zero_grad at the top of every micro-batch throws away all but the last; never clearing keeps the step before."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import RecordingSGD, big_batch_gradients, gradients, slice_batch


def mean_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def build():
    torch.manual_seed(64)
    batch = dict(x=torch.randn(8, 3), y=torch.randn(8, 1))
    return dict(model=nn.Linear(3, 1), batch=batch, n=8, micro=2)


def reference():
    case = build()
    return big_batch_gradients(case["model"], mean_loss, case["batch"])


def _run(case, zero_each):
    for span in spans(case["n"], case["micro"]):
        if zero_each:
            case["model"].zero_grad()
        (mean_loss(case["model"], slice_batch(case["batch"], *span)) / 4).backward()
    return gradients(case["model"])


def careful():
    return _run(build(), False)


def naive():
    return _run(build(), True)


def naive_never_cleared():
    case = build()
    mean_loss(case["model"], case["batch"]).backward()  # Left over from the step before.
    return _run(case, False)


def ours():
    """The second step sees its own gradient only: with a learning rate of 0 it is that of the first."""
    case = build()
    optimizer = RecordingSGD(case["model"])
    step = bb.Step(case["model"], mean_loss, optimizer, micro_batch_size=case["micro"])
    step(case["batch"])
    step(case["batch"])
    return optimizer.seen[-1]


def ours_refuses_what_is_left_over():
    case = build()
    mean_loss(case["model"], case["batch"]).backward()
    optimizer = RecordingSGD(case["model"])
    step = bb.Step(case["model"], mean_loss, optimizer, micro_batch_size=case["micro"])
    try:
        step(case["batch"])
    except bb.GradientError:
        assert not optimizer.seen
        case["model"].zero_grad()
        step(case["batch"])
    return optimizer.seen[-1]


def check(result):
    same(result, reference())
