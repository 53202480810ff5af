"""With a loss scale of 2**16 a clip to 1 on scaled gradients shrinks the true gradient to almost nothing."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import RecordingSGD, big_batch_gradients, gradients, slice_batch


def mean_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def build():
    torch.manual_seed(16)
    return dict(
        model=nn.Linear(3, 1, bias=False),
        batch=dict(x=torch.randn(6, 3), y=torch.randn(6, 1) * 3),
        scale=2.0**16,
        max_norm=1.0,
        n=6,
        micro=2,
    )


def reference():
    case = build()
    whole = big_batch_gradients(case["model"], mean_loss, case["batch"])
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in whole.values()))
    return {name: gradient * min(1.0, float(case["max_norm"] / norm)) for name, gradient in whole.items()}


def _run(unscale_first):
    case = build()
    model = case["model"]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=case["scale"])
    for span in spans(case["n"], case["micro"]):
        scaler.scale(mean_loss(model, slice_batch(case["batch"], *span)) / 3).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"])
    if not unscale_first:
        scaler.unscale_(optimizer)
    return gradients(model)


def careful():
    return _run(True)


def naive():
    return _run(False)


def ours():
    """The forward runs in float16 here, where this scale overflows: such steps are skipped, and the scale halved."""
    case = build()
    optimizer = RecordingSGD(case["model"])
    step = bb.Step(
        case["model"],
        mean_loss,
        optimizer,
        micro_batch_size=case["micro"],
        max_grad_norm=case["max_norm"],
        precision=torch.amp.GradScaler("cpu", init_scale=case["scale"]),
    )
    skipped = 0
    while step(case["batch"]).skipped:
        skipped += 1
        assert skipped < 5
        assert not optimizer.seen
    return optimizer.seen[-1]


def check(result):
    same(result, reference(), 1e-3)
