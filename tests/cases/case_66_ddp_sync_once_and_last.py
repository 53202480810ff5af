"""DDP decides in forward whether to reduce.

``no_sync`` around backward alone changes nothing; reducing at the first micro-batch instead of the last leaves the
ranks apart. A group of one process; a communication hook records at which micro-batch gradients are reduced.
"""

import contextlib

import torch
import torch.nn as nn

import bigbatch as bb
from tests.process_group import in_process_group_of_one


def build():
    return dict(micro_batches=4, x=torch.randn(8, 4), n=8, micro=2)


def reference():
    return dict(synced_at=[3])


def _wrap(model):
    wrapped = nn.parallel.DistributedDataParallel(model)
    synced_at, now = [], [0]

    def hook(state, bucket):
        synced_at.append(now[0])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    return wrapped, synced_at, now


def _run(order):
    case = build()
    torch.manual_seed(0)

    def run():
        model, synced_at, now = _wrap(nn.Linear(4, 1))
        for index, part in enumerate(case["x"].split(case["micro"])):
            now[0] = index
            quiet = index != 0 if order == "first" else index != case["micro_batches"] - 1
            skip = model.no_sync if quiet else contextlib.nullcontext
            if order == "backward only":
                loss = model(part).square().mean() / 4
                with skip():
                    loss.backward()
            else:
                with skip():
                    (model(part).square().mean() / 4).backward()
        return dict(synced_at=sorted(set(synced_at)))

    return in_process_group_of_one(run)


def careful():
    return _run("last")


def naive_backward_only():
    return _run("backward only")


def naive_first():
    return _run("first")


def ours():
    case = build()
    torch.manual_seed(0)

    def run():
        model, synced_at, now = _wrap(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # A communication hook runs where DDP itself reduces, which is what "overlap" leaves to it.
        step = bb.Step(
            model, lambda m, b: m(b).square().mean(), optimizer, micro_batch_size=case["micro"], reduce="overlap"
        )
        step.on_micro_batch = lambda number, count: now.__setitem__(0, number - 1)
        step(case["x"])
        return dict(synced_at=sorted(set(synced_at)))

    return in_process_group_of_one(run)


def check(result):
    assert result == reference(), f"reduced at micro-batches {result['synced_at']}"
