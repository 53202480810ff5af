"""The traceback of the caught error holds the frames and their tensors: memory must be free before the retry."""

import contextlib
import gc
import weakref

import torch

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
