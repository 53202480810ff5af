"""A warm-up of 4 optimizer steps with 4 micro-batches each must not finish after 1 optimizer step."""

import torch
import torch.nn as nn

import bigbatch as bb


def build():
    return dict(window=4, optimizer_steps=4, lr_lambda=lambda step: min(1.0, (step + 1) / 4), base_lr=1.0)


def reference():
    return dict(lrs=[0.25, 0.5, 0.75, 1.0])


def _make():
    case = build()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), case["base_lr"])
    return case, model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, case["lr_lambda"])


def _run(per_micro):
    case, model, optimizer, scheduler = _make()
    lrs = []
    for index in range(case["window"] * case["optimizer_steps"]):
        model(torch.ones(1, 1)).sum().backward()
        last = (index + 1) % case["window"] == 0
        if last:
            lrs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
        if per_micro or last:
            scheduler.step()
    return dict(lrs=lrs)


def careful():
    return _run(False)


def naive():
    return _run(True)


def ours():
    case, model, optimizer, scheduler = _make()
    step = bb.Step(model, lambda model, x: model(x).mean(), optimizer, micro_batch_size=1, scheduler=scheduler)
    lrs = []
    for _ in range(case["optimizer_steps"]):
        lrs.append(optimizer.param_groups[0]["lr"])
        step(torch.ones(case["window"], 1))
    return dict(lrs=lrs)


def check(result):
    wanted = reference()["lrs"]
    assert len(result["lrs"]) == len(wanted), result["lrs"]
    assert all(abs(found - lr) < 1e-9 for found, lr in zip(result["lrs"], wanted, strict=True)), result["lrs"]
