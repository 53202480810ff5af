"""A load-balancing term is a product of two batch means: it does not add up over micro-batches.

It is either exact (two passes) or declared inexact.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.Linear(4, 3)
        self.e = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        shares = self.r(x).softmax(-1)
        chosen = shares.argmax(-1)
        y = sum((chosen == k).to(x.dtype)[:, None] * expert(x) for k, expert in enumerate(self.e))
        return y * shares.gather(1, chosen[:, None]), shares, chosen


def balanced_loss(model, batch):
    y, shares, chosen = model(batch["x"])
    used = torch.stack([(chosen == k).to(shares.dtype).mean() for k in range(3)])
    return F.mse_loss(y, batch["y"]) + 5.0 * 3 * (used * shares.mean(0)).sum()


def build():
    torch.manual_seed(35)
    x = torch.cat([torch.randn(4, 4) + 2, torch.randn(4, 4) - 2])
    return dict(model=Mixture(), batch=dict(x=x, y=torch.randn(8, 4)), n=8, micro=4)


def reference():
    case = build()
    return big_batch_gradients(case["model"], balanced_loss, case["batch"])


def careful():
    return dict(declared_inexact=True)


def ours():
    case = build()

    def forward(model, batch):
        y, shares, chosen = model(batch["x"])
        used = torch.stack([(chosen == k).to(shares.dtype).sum() for k in range(3)])
        return dict(y=y, share=bb.Sum(shares.sum(0)), used=bb.Sum(used))

    def loss(outputs, batch):
        n = len(batch["y"])
        return F.mse_loss(outputs["y"], batch["y"]) + 5.0 * 3 * (outputs["used"] / n * outputs["share"] / n).sum()

    loss_fn = bb.WholeBatchLoss(forward, loss)
    bb.accumulate(case["model"], loss_fn, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def naive():
    case = build()
    for span in spans(case["n"], case["micro"]):
        (balanced_loss(case["model"], slice_batch(case["batch"], *span)) / 2).backward()
    return gradients(case["model"])


def check(result):
    if result.get("declared_inexact"):
        return
    wanted = reference()
    filled = {name: torch.zeros_like(wanted[name]) if found is None else found for name, found in result.items()}
    same(filled, wanted, 1e-4)
