"""A nested batch: strings, None, scalars, lists per sample, and a shared tensor as long as the batch by accident."""

import torch
import torch.nn as nn

import bigbatch as bb
from tests.cases.common import same
from tests.reference import big_batch_gradients, gradients


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 2)

    def forward(self, x, table):
        return self.l(x) @ table[:2, :2]


def mean_loss(model, batch):
    assert len(batch["names"]) == len(batch["inp"]["x"])
    assert batch["inp"]["opts"][1] == "train"
    predicted = model(batch["inp"]["x"], batch["shared"]["table"]) / batch["temp"]
    return (predicted - batch["y"][0]).square().mean()


def build():
    torch.manual_seed(40)
    batch = dict(
        inp=dict(x=torch.randn(4, 4), opts=[None, "train", 3]),
        y=[torch.randn(4, 2)],
        names=["a", "b", "c", "d"],
        shared=dict(table=torch.randn(4, 4)),
        temp=torch.tensor(2.0),
    )
    return dict(model=Net(), batch=batch, n=4, micro=2, shared_keys=["shared.table", "temp"])


def reference():
    case = build()
    return big_batch_gradients(case["model"], mean_loss, case["batch"])


def _run(share_table):
    case = build()
    batch = case["batch"]
    for start, stop in ((0, 2), (2, 4)):
        table = batch["shared"]["table"]
        part = dict(
            inp=dict(x=batch["inp"]["x"][start:stop], opts=batch["inp"]["opts"]),
            y=[batch["y"][0][start:stop]],
            names=batch["names"][start:stop],
            temp=batch["temp"],
            shared=dict(table=table if share_table else table[start:stop]),
        )
        (mean_loss(case["model"], part) / 2).backward()
    return gradients(case["model"])


def careful():
    return _run(True)


def naive_cuts_everything_with_that_size():
    return _run(False)


def ours():
    case = build()
    bb.accumulate(
        case["model"],
        mean_loss,
        case["batch"],
        micro_batch_size=case["micro"],
        batch_dims=dict.fromkeys(case["shared_keys"]),
    )
    return gradients(case["model"])


def check(result):
    same(result, reference())
