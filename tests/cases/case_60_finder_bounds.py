"""Finding the largest size that fits.

It starts above the limit; the last doubling was never tried; there are more samples than data; the retry takes the
original oversized tensor.
"""

import math
from typing import Any

import torch
import torch.nn as nn

import bigbatch as bb
from bigbatch.stepping.fitting.sizing import largest_that_fits
from tests.cases.common import FakeOutOfMemory


def build(limit=37, data=10**9) -> dict[str, Any]:
    tried = []

    def probe(x):
        tried.append(len(x))
        if len(x) > limit:
            raise FakeOutOfMemory("simulated: out of memory")

    return dict(
        probe=probe,
        tried=tried,
        limit=limit,
        data=data,
        starts=[1, 2, 64, 512],
        make=lambda n: torch.zeros(n, 1),
        oom=FakeOutOfMemory,
    )


def reference():
    return dict(best=37, best_when_data_is_20=20, verified=True)


def _search(start, data, broken=None):
    case = build(data=data)
    fits, fails, n = 0, None, min(start, data)
    first = case["make"](n)
    for _ in range(60):
        try:
            case["probe"](first if broken == "same tensor" else case["make"](n))
            fits = max(fits, n)
        except torch.OutOfMemoryError:
            fails = n
        if broken == "no low" and fails == n and fits == 0:
            raise UnboundLocalError("low")
        if fails is None:
            following = fits * 2 if broken == "no cap" else min(fits * 2, data)
        elif fails == 1:
            break
        else:
            following = (fits + fails) // 2
        if following in (fits, fails, 0):
            break
        n = following
    if broken == "untested double":
        fits *= 2
    return dict(best=fits, verified=fits in case["tried"])


def _run(broken=None):
    runs = [_search(start, 10**6, broken) for start in build()["starts"]]
    return dict(runs=runs, small=_search(4, 20, broken))


def careful():
    return _run()


def naive_no_low():
    return _run("no low")


def naive_untested_double():
    return _run("untested double")


def naive_same_tensor():
    return _run("same tensor")


def naive_no_cap():
    return _run("no cap")


def _ours_search(num_samples):
    case = build()

    def peak_of(size):
        try:
            case["probe"](case["make"](size))
        except torch.OutOfMemoryError:
            return math.inf
        return size * 4

    best, _ = largest_that_fits(range(1, num_samples + 1), peak_of, budget_bytes=10**9)
    return dict(best=best, verified=best in case["tried"])


def ours():
    """The search alone, for every size up to that of the data."""
    return dict(runs=[_ours_search(n) for n in (37, 38, 64, 512, 10**6)], small=_ours_search(20))


def _ours_fit(num_samples):
    case = build()
    model = nn.Linear(1, 1)

    def loss_fn(model, x):
        case["probe"](x)
        return model(x).square().mean()

    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), memory_budget="1GiB")
    best = step.fit(case["make"](num_samples)).micro_batch_size
    return dict(best=best, verified=best in case["tried"])


def ours_step():
    """A step that is given a budget. These batches can be cut into micro-batches of 37, all of them full."""
    return dict(runs=[_ours_fit(n) for n in (37, 74, 370, 37 * 64)], small=_ours_fit(20))


def check(result):
    wanted = reference()
    for run in result["runs"]:
        assert run == dict(best=wanted["best"], verified=True), run
    assert result["small"]["best"] == wanted["best_when_data_is_20"], result["small"]
