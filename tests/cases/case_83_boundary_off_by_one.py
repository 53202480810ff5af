"""'index % window == 0' steps after the very first micro-batch, and from then on one micro-batch late."""

import torch
import torch.nn as nn

import bigbatch as bb


def build():
    return dict(micro_batches=8, window=4)


def reference():
    return dict(windows=[[0, 1, 2, 3], [4, 5, 6, 7]])


def _run(ends):
    case = build()
    windows, window = [], []
    for index in range(case["micro_batches"]):
        window.append(index)
        if ends(index):
            windows.append(window)
            window = []
    return dict(windows=windows)


def careful():
    return _run(lambda index: (index + 1) % 4 == 0)


def naive():
    return _run(lambda index: index % 4 == 0)


def naive_every():
    return _run(lambda index: True)


def ours():
    """Whatever is forwarded between two calls of ``optimizer.step`` is one step."""
    case = build()
    model = nn.Linear(1, 1)
    windows, window = [], []

    class WatchedSGD(torch.optim.SGD):
        def step(self, closure=None):
            windows.append(list(window))
            window.clear()
            return super().step(closure)

    def loss_fn(model, x):
        window.extend(int(value) for value in x.flatten())
        return model(x).square().mean()

    step = bb.Step(model, loss_fn, WatchedSGD(model.parameters(), 0.0), micro_batch_size=1)
    for batch in torch.arange(float(case["micro_batches"]))[:, None].split(case["window"]):
        step(batch)
    return dict(windows=windows)


def check(result):
    assert result == reference(), result
