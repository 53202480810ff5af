"""A regularisation pass repeated per micro-batch must see another slice each time, not the same images again."""

import torch
import torch.nn as nn

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def mean_loss(model, batch):
    return (model(batch["x"]).squeeze(-1) ** 4).mean()


def build():
    torch.manual_seed(55)
    return dict(model=nn.Linear(3, 1), batch=dict(x=torch.randn(6, 3)), n=6, micro=2)


def reference():
    case = build()
    return big_batch_gradients(case["model"], mean_loss, case["batch"])


def _run(pick):
    case = build()
    for span in spans(case["n"], case["micro"]):
        (mean_loss(case["model"], slice_batch(case["batch"], *pick(span))) / 3).backward()
    return gradients(case["model"])


def careful():
    return _run(lambda span: span)


def naive():
    return _run(lambda span: (0, 2))


def ours():
    """A second loss over the same batch is one more call: it only adds to ``.grad``."""

    def half_of_it(model, batch):
        return mean_loss(model, batch) / 2

    case = build()
    for _ in range(2):
        bb.accumulate(case["model"], half_of_it, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def check(result):
    same(result, reference())
