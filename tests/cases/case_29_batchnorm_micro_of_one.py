"""9 samples, at most 4 in a micro-batch: 4 + 4 + 1 crashes in training BatchNorm; a balanced 3 + 3 + 3 does not."""

import torch
import torch.nn as nn

import bigbatch as bb


def build():
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return dict(model=model, x=torch.randn(9, 3), n=9, max_micro=4)


def reference():
    return dict(all_seen=9, min_size_at_least=2, max_size_at_most=4)


def _run(sizes):
    case = build()
    for part in case["x"].split(sizes):
        case["model"](part).sum().backward()
    return dict(sizes=list(sizes))


def careful():
    return _run([3, 3, 3])


def naive():
    return _run([4, 4, 1])


def ours():
    case = build()
    result = bb.accumulate(
        case["model"],
        lambda model, x: bb.Sum(model(x).sum()),
        case["x"],
        micro_batch_size=case["max_micro"],
    )
    return dict(sizes=list(result.micro_batch_sizes))


def check(result):
    wanted = reference()
    assert sum(result["sizes"]) == wanted["all_seen"], result
    assert min(result["sizes"]) >= wanted["min_size_at_least"], result
    assert max(result["sizes"]) <= wanted["max_size_at_most"], result
