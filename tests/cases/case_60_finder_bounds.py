"""Finding the largest size that fits.

It starts above the limit; the last doubling was never tried; there are more samples than data; the retry takes the
original oversized tensor.
"""

import torch

from tests.cases.common import FakeOutOfMemory


def build(limit=37, data=10**9):
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


def check(result):
    wanted = reference()
    for run in result["runs"]:
        assert run == dict(best=wanted["best"], verified=True), run
    assert result["small"]["best"] == wanted["best_when_data_is_20"], result["small"]
