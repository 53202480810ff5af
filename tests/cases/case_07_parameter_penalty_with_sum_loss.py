"""A summed data loss plus a weight penalty: adding micro-batch losses counts the penalty once per micro-batch.

A product either takes the penalty as a separate term, or its equivalence check must say that the loss does not add up.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def data_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def penalty(model):
    return 3.0 * sum((parameter**2).sum() for parameter in model.parameters())


def whole_loss(model, batch):
    return data_loss(model, batch) + penalty(model)


def build():
    torch.manual_seed(6)
    model = nn.Linear(6, 2)
    batch = dict(x=torch.randn(8, 6), y=torch.randint(0, 2, (8,)))
    return dict(model=model, batch=batch, n=8, micro=2)


def reference():
    case = build()
    return big_batch_gradients(case["model"], whole_loss, case["batch"])


def careful():
    case = build()
    for span in spans(case["n"], case["micro"]):
        data_loss(case["model"], slice_batch(case["batch"], *span)).backward()
    penalty(case["model"]).backward()
    return gradients(case["model"])


def naive():
    case = build()
    for span in spans(case["n"], case["micro"]):
        whole_loss(case["model"], slice_batch(case["batch"], *span)).backward()
    return gradients(case["model"])


def ours():
    case = build()
    bb.accumulate(
        case["model"],
        lambda model, batch: (bb.Sum(data_loss(model, batch)), bb.Constant(penalty(model))),
        case["batch"],
        micro_batch_size=case["micro"],
    )
    return gradients(case["model"])


def check(result):
    same(result, reference())
