"""The traceback of the caught error holds the frames and their tensors: memory must be free before the retry."""

import contextlib
import gc
import weakref

import torch

import bigbatch as bb
from tests.cases.common import FakeOutOfMemory


def build():
    return dict(big=lambda: torch.empty(1000, 1000), oom=FakeOutOfMemory)


def reference():
    return dict(alive_at_retry=0)


def _body(references, fail):
    hidden = build()["big"]()
    references.append(weakref.ref(hidden))
    grown = hidden + 1
    references.append(weakref.ref(grown))
    if fail:
        raise FakeOutOfMemory("simulated: out of memory")


def _num_alive(references):
    return sum(reference() is not None for reference in references)


def careful():
    references = []
    with contextlib.suppress(torch.OutOfMemoryError):
        _body(references, True)
    return dict(alive_at_retry=_num_alive(references))  # Outside the block that caught it.


def ours():
    """The retry sees nothing of what the failed attempt had made."""
    references, alive_at_retry = [], []

    def loss_fn(model, x):
        alive_at_retry.append(_num_alive(references))
        _body(references, fail=len(x) > 2)
        return model(x).square().mean()

    model = torch.nn.Linear(3, 1)
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4)
    step(torch.randn(4, 3))
    return dict(alive_at_retry=max(alive_at_retry))


def naive():
    references = []
    alive = 0
    try:
        _body(references, True)
    except torch.OutOfMemoryError as error:  # noqa: F841 - the name holds the traceback
        gc.collect()
        alive = _num_alive(references)
        _body([], False)  # The retry, inside the except block.
    return dict(alive_at_retry=alive)


def naive_saved_error():
    references, errors = [], []
    try:
        _body(references, True)
    except torch.OutOfMemoryError as error:
        errors.append(error)
    gc.collect()
    return dict(alive_at_retry=_num_alive(references))


def check(result):
    assert result["alive_at_retry"] == 0, f"{result['alive_at_retry']} tensors still alive at the retry"
