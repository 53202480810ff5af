"""InfoNCE / NT-Xent: negatives come from the whole batch. Averaging micro-batch losses is a different loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def pair_loss(a, b):
    similarity = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.2
    target = torch.arange(len(similarity))
    return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2


def embed(model, batch):
    return model(batch["a"]), model(batch["b"])


def contrastive_loss(model, batch):
    return pair_loss(*embed(model, batch))


def build():
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(8, 6)
    return dict(model=model, batch=dict(a=x, b=x + 0.3 * torch.randn(8, 6)), n=8, micro=2)


def reference():
    case = build()
    return big_batch_gradients(case["model"], contrastive_loss, case["batch"])


def careful():
    case = build()
    model = case["model"]
    parts = [slice_batch(case["batch"], *span) for span in spans(case["n"], case["micro"])]
    with torch.no_grad():
        pairs = [embed(model, part) for part in parts]
    a, b = (torch.cat(side).requires_grad_() for side in zip(*pairs, strict=True))
    pair_loss(a, b).backward()
    for (start, stop), part in zip(spans(case["n"], case["micro"]), parts, strict=True):
        torch.autograd.backward(embed(model, part), (a.grad[start:stop], b.grad[start:stop]))
    return gradients(model)


def ours():
    case = build()
    loss_fn = bb.WholeBatchLoss(embed, lambda pair, batch: pair_loss(*pair))
    bb.accumulate(case["model"], loss_fn, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def ours_in_chunks_of_rows():
    case = build()
    loss_fn = bb.WholeBatchLoss(embed, lambda pair, batch: bb.info_nce(*pair, scale=5.0, chunk_size=3))
    bb.accumulate(case["model"], loss_fn, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def naive():
    case = build()
    for span in spans(case["n"], case["micro"]):
        (contrastive_loss(case["model"], slice_batch(case["batch"], *span)) / 4).backward()
    return gradients(case["model"])


def check(result):
    same(result, reference())
