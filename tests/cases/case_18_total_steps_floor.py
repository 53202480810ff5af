"""The planned number of optimizer steps must count the partial ones, or the schedule ends early."""

import math

import bigbatch as bb


def build():
    return dict(micro_batches_per_epoch=10, window=4, epochs=3)


def reference():
    return dict(total=9)


def careful():
    case = build()
    return dict(total=math.ceil(case["micro_batches_per_epoch"] / case["window"]) * case["epochs"])


def naive():
    case = build()
    return dict(total=case["micro_batches_per_epoch"] // case["window"] * case["epochs"])


def naive_global():
    case = build()
    return dict(total=case["micro_batches_per_epoch"] * case["epochs"] // case["window"])


def ours():
    """Counted in samples: micro-batches of 2, so 20 samples in batches of 8."""
    case = build()
    total = bb.total_steps(case["micro_batches_per_epoch"] * 2, case["window"] * 2, epochs=case["epochs"])
    return dict(total=total)


def check(result):
    assert result == reference(), result
