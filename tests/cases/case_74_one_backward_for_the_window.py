"""Summing micro-batch losses and calling backward once gives the right gradient but keeps all activations.

Saved bytes must not grow with the number of pieces.
"""

import torch
import torch.nn as nn

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def mean_loss(model, batch):
    return model(batch["x"]).square().mean()


def build():
    torch.manual_seed(58)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    return dict(model=model, batch=dict(x=torch.randn(32, 32)), n=32, micro=4)


def reference():
    case = build()
    return dict(grads=big_batch_gradients(case["model"], mean_loss, case["batch"]), peak_at_most=1.5)


class SavedBytes:
    """Counts the bytes that autograd keeps for micro-batches of 4 samples, as long as it keeps them."""

    def __init__(self):
        self._live = {}
        self.peak = 0

    def hooks(self):
        counter = self

        class Box:
            def __init__(self, tensor):
                self.tensor = tensor
                counter._live[id(self)] = tensor.nbytes if tensor.dim() and tensor.shape[0] == 4 else 0
                counter.peak = max(counter.peak, sum(counter._live.values()))

            def __del__(self):
                counter._live.pop(id(self), None)

        return torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor)


def _bytes_of_one(case):
    counter = SavedBytes()
    with counter.hooks():
        loss = mean_loss(case["model"], slice_batch(case["batch"], 0, case["micro"]))
    del loss
    return counter.peak


def _run(once):
    case = build()
    counter = SavedBytes()
    total = 0
    with counter.hooks():
        for span in spans(case["n"], case["micro"]):
            loss = mean_loss(case["model"], slice_batch(case["batch"], *span)) / 8
            if once:
                total = total + loss
            else:
                loss.backward()
            del loss
        if once:
            total.backward()
    return dict(grads=gradients(case["model"]), peak_ratio=counter.peak / _bytes_of_one(case))


def careful():
    return _run(False)


def naive():
    return _run(True)


def ours():
    case = build()
    counter = SavedBytes()
    with counter.hooks():
        bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=case["micro"])
    return dict(grads=gradients(case["model"]), peak_ratio=counter.peak / _bytes_of_one(case))


def check(result):
    wanted = reference()
    same(result["grads"], wanted["grads"])
    assert result["peak_ratio"] <= wanted["peak_at_most"], f"peak is {result['peak_ratio']:.1f} x one micro-batch"
