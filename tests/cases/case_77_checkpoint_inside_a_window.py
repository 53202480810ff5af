"""Saving between two micro-batches of a step loses the partial gradient.

Either the saved state carries it, or saving waits for the boundary, or refuses until then.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.reference import gradients


def build():
    torch.manual_seed(60)
    return dict(model=nn.Linear(3, 1), x=torch.randn(4, 3), y=torch.randn(4, 1), lr=0.1, stop_after_micro=2)


def _vector(model):
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def reference():
    case = build()
    model = copy.deepcopy(case["model"]).double()
    F.mse_loss(model(case["x"].double()), case["y"].double()).backward()
    torch.optim.SGD(model.parameters(), case["lr"]).step()
    return _vector(model)


def _run(save_gradients):
    case = build()

    def backward(model, indices):
        for index in indices:
            part = slice(index, index + 1)
            (F.mse_loss(model(case["x"][part]), case["y"][part]) / 4).backward()

    backward(case["model"], range(case["stop_after_micro"]))
    saved = copy.deepcopy(case["model"].state_dict())
    kept = gradients(case["model"]) if save_gradients else {}

    resumed = nn.Linear(3, 1)
    resumed.load_state_dict(saved)
    for name, parameter in resumed.named_parameters():
        parameter.grad = kept.get(name)
    backward(resumed, range(case["stop_after_micro"], 4))
    torch.optim.SGD(resumed.parameters(), case["lr"]).step()
    return _vector(resumed)


def careful():
    return _run(True)


def naive():
    return _run(False)


def check(result):
    if isinstance(result, dict) and result.get("refused"):
        return
    assert torch.allclose(result, reference(), atol=1e-5), "the update after resuming differs"
