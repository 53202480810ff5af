"""An embedding tied to the output layer, recomputed: the right gradient, and its hook fires once per micro-batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(7, 5)
        self.f = nn.Linear(5, 5)
        self.o = nn.Linear(5, 7, bias=False)
        self.o.weight = self.e.weight

    def forward(self, ids):
        return self.o(torch.tanh(self.f(self.e(ids))))


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["i"]).flatten(0, 1), batch["y"].flatten())


def build():
    torch.manual_seed(25)
    batch = dict(i=torch.randint(0, 7, (4, 6)), y=torch.randint(0, 7, (4, 6)))
    return dict(model=TiedModel(), batch=batch, n=4, micro=2)


def reference():
    case = build()
    return dict(grads=big_batch_gradients(case["model"], mean_loss, case["batch"]), hooks=2, still_tied=True)


def _count_hook_calls(case):
    calls = []
    case["model"].e.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(1))
    return calls


def _found(case, calls):
    model = case["model"]
    return dict(grads=gradients(model), hooks=len(calls), still_tied=model.e.weight is model.o.weight)


def _run(use_reentrant):
    case = build()
    model, calls = case["model"], _count_hook_calls(case)
    for module in (model.f, model.o):
        module.forward = _checkpointed(module.forward, use_reentrant)
    for span in spans(case["n"], case["micro"]):
        (mean_loss(model, slice_batch(case["batch"], *span)) / 2).backward()
    return _found(case, calls)


def _checkpointed(forward, use_reentrant):
    return lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)


def careful():
    return _run(False)


def naive_reentrant():
    return _run(True)


def ours():
    case = build()
    calls = _count_hook_calls(case)
    with bb.apply(bb.Plan(micro_batch_size=case["micro"], recompute=("f", "o")), case["model"]):
        bb.accumulate(case["model"], mean_loss, case["batch"], micro_batch_size=case["micro"])
    return _found(case, calls)


def check(result):
    wanted = reference()
    same(result["grads"], wanted["grads"])
    assert result["still_tied"]
    assert result["hooks"] == wanted["hooks"], f"hook fired {result['hooks']} times"
