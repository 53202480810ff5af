"""Saving between two micro-batches of a step loses the partial gradient.

Either the saved state carries it, or saving waits for the boundary, or refuses until then.
"""

import copy
import signal
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from bigbatch.training.checkpoint import Checkpoints, newest
from bigbatch.training.loop import Run
from bigbatch.training.resuming import resume
from bigbatch.training.saving import Saver
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


def ours():
    """SIGTERM comes between two micro-batches of the first step; the run is saved at the end of that step."""
    case = build()
    micro_batches = []

    def loss_fn(model, batch):
        micro_batches.append(batch)
        if len(micro_batches) == case["stop_after_micro"] + 1:
            signal.raise_signal(signal.SIGTERM)
        return F.mse_loss(model(batch[0]), batch[1])

    task = bb.Task(
        model=lambda: copy.deepcopy(case["model"]),
        train_data=lambda: torch.utils.data.TensorDataset(case["x"], case["y"]),
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), case["lr"]),
        batch_size=4,
        epochs=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        try:
            Run(task, micro_batch_size=1).train(Saver(checkpoints))
        except bb.RunStopped:
            assert len(micro_batches) == 4
        run = Run(task, micro_batch_size=1)
        resume(run, newest(checkpoints.folder))
        checkpoints.close()
    assert run.progress.num_steps == 1
    return _vector(run.parts.model)


def check(result):
    if isinstance(result, dict) and result.get("refused"):
        return
    assert torch.allclose(result, reference(), atol=1e-5), "the update after resuming differs"
