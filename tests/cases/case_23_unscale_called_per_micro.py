"""``unscale_`` twice for one optimizer between updates raises; a skipped step without ``update()`` poisons the next."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb


def build():
    torch.manual_seed(17)
    return dict(model=nn.Linear(2, 1), x=torch.randn(4, 2), y=torch.randn(4, 1), scale=8.0, windows=2)


def reference():
    return dict(finished=True)


def _make():
    case = build()
    optimizer = torch.optim.SGD(case["model"].parameters(), 0.1)
    return case, optimizer, torch.amp.GradScaler("cpu", init_scale=case["scale"])


def _losses(case):
    for index in range(4):
        x, y = case["x"][index : index + 1], case["y"][index : index + 1]
        yield F.mse_loss(case["model"](x), y) / 4


def careful():
    case, optimizer, scaler = _make()
    for _ in range(case["windows"]):
        for loss in _losses(case):
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        # The user drops the step because its norm is large, but update() still runs.
        nn.utils.clip_grad_norm_(case["model"].parameters(), 1e-9)
        scaler.update()
        optimizer.zero_grad()
    return dict(finished=True)


def naive():
    case, optimizer, scaler = _make()
    for loss in _losses(case):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    return dict(finished=True)


def naive_skip_without_update():
    case, optimizer, scaler = _make()
    for _ in range(case["windows"]):
        scaler.scale(F.mse_loss(case["model"](case["x"]), case["y"])).backward()
        scaler.unscale_(optimizer)
    return dict(finished=True)


def ours():
    """Two good steps, then two that overflow, then a good one: the skipped ones poison nothing."""
    case, optimizer, scaler = _make()
    step = bb.Step(
        case["model"],
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer,
        micro_batch_size=1,
        max_grad_norm=1e-9,
        precision=scaler,
    )
    skipped = [step((case["x"] * scale, case["y"])).skipped for scale in (1.0, 1.0, 1e6, 1e6, 1.0)]
    assert skipped == [False, False, True, True, False]
    assert step.num_steps == 3
    return dict(finished=scaler.get_scale() == case["scale"] / 4)


def check(result):
    assert result["finished"]
