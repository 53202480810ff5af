"""An allocation fails in the middle of a backward: some parameters already got their share.

The retry must start from the state before the micro-batch.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import FakeOutOfMemory, same, spans
from tests.reference import RecordingSGD, big_batch_gradients, gradients, slice_batch


class Bomb(torch.autograd.Function):
    """Fails in backward, as often as ``armed`` says, when it gets more than one sample."""

    armed = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        if Bomb.armed > 0 and len(gradient) > 1:
            Bomb.armed -= 1
            raise FakeOutOfMemory("simulated: out of memory")
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 1)

    def forward(self, x):
        return self.c(torch.tanh(self.b(Bomb.apply(torch.tanh(self.a(x))))))


def mean_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def build(fail_times=1):
    torch.manual_seed(48)
    Bomb.armed = fail_times
    model = Net()
    batch = dict(x=torch.randn(8, 4), y=torch.randn(8, 1))
    return dict(model=model, batch=batch, loss_fn=mean_loss, n=8, micro=4, oom=FakeOutOfMemory)


def reference():
    case = build(0)
    return big_batch_gradients(case["model"], mean_loss, case["batch"])


def _run(case, restore):
    model = case["model"]
    todo = spans(case["n"], case["micro"])[::-1]
    while todo:
        start, stop = todo.pop()
        kept = gradients(model)
        try:
            loss = case["loss_fn"](model, slice_batch(case["batch"], start, stop)) * (stop - start) / case["n"]
            loss.backward()
            failed = False
        except torch.OutOfMemoryError:
            failed = True
        if failed:
            restore(model, kept)
            middle = (start + stop) // 2
            todo += [(middle, stop), (start, middle)]
    return gradients(model)


def _put_back(model, kept):
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name]


def careful():
    return _run(build(), _put_back)


def ours():
    case = build()
    optimizer = RecordingSGD(case["model"])
    step = bb.Step(case["model"], mean_loss, optimizer, micro_batch_size=case["micro"])
    assert step(case["batch"]).retries == 1
    return optimizer.seen[-1]


def naive_keeps_partial():
    return _run(build(), lambda model, kept: None)


def naive_zeroes_all():
    """Loses the micro-batches that were already done: the second one fails."""
    case = build(0)
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 2:
            Bomb.armed = 1
        return mean_loss(model, batch)

    case["loss_fn"] = loss_fn
    return _run(case, lambda model, kept: model.zero_grad())


def check(result):
    same(result, reference())
