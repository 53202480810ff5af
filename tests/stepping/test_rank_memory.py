"""The bytes of one of several ranks are those of its plan: buckets of DDP, shards and whole modules of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stepping import rank_memory as cases
from tests.stepping.workers import Workers, workers

TOLERANCE = 0.005
"""Of the measured bytes: the peak that is planned may be as much less."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    with workers(4) as found:
        yield found


@pytest.mark.parametrize(
    ("micro", "reduce", "width", "as_view"),
    [(2, "after", 49, False), pytest.param(2, "overlap", 49, True, marks=pytest.mark.slow), (2, "after", 160, False)],
)
def test_a_plan_counts_the_buckets_of_ddp(ranks, micro, reduce, width, as_view):
    """They are made in C++, so the allocator is asked, in a real step of all ranks."""
    for found in ranks.run(2, cases.ddp_case, micro, reduce, width, as_view):
        assert found["buckets"] == found["of parameters"]
        assert found["planned"] == found["to be"] == pytest.approx(found["Step.measure"], rel=TOLERANCE)
        assert found["planned"] == pytest.approx(found["measured"], rel=TOLERANCE)
        # Control: what a plan for one process says is far outside.
        assert found["without"] < 0.9 * found["measured"]


FAST = [
    (2, 2, 6, "after", "none", "plain"),
    (2, 2, 6, "each", "none", "plain"),
    (4, 4, 12, "each", "all", "plain"),
    (2, 2, 6, "after", "none", "stays"),
]
SLOW = [
    (size, micro, count * micro, reduce, recompute, way)
    for size in (1, 2, 3, 4)
    for micro, count in ((2, 1), (2, 3), (16, 2))
    for reduce in ("after", "each")
    for recompute in ("none", "all")
    for way in ("plain", "stays")
]


def check(ranks: Workers, size: int, *case: object) -> list[dict]:
    found = ranks.run(size, cases.fsdp_case, *case)
    largest = max(rank["measured"] for rank in found)
    for rank in found:
        assert 1 - TOLERANCE <= rank["planned"] / largest <= 1.05
        assert rank["to be"] in (None, rank["planned"])
        assert rank["gradient"] <= 1e-5  # float32: a plan that recomputes does not change it
    return found


@pytest.mark.parametrize(("size", "micro", "num_samples", "reduce", "recompute", "way"), FAST)
def test_a_plan_for_fsdp2_takes_the_bytes_that_it_says(ranks, size, micro, num_samples, reduce, recompute, way):
    check(ranks, size, micro, num_samples, reduce, recompute, way)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "micro", "num_samples", "reduce", "recompute", "way"), SLOW)
def test_any_plan_for_fsdp2_takes_the_bytes_that_it_says(ranks, size, micro, num_samples, reduce, recompute, way):
    check(ranks, size, micro, num_samples, reduce, recompute, way)


def test_a_plan_of_one_process_says_nothing_of_fsdp2(ranks):
    """Control: neither the peak of the whole model nor a part of it by the number of ranks is within the tolerance."""
    found = ranks.run(4, cases.fsdp_case, 2, 6, "after")[0]

    assert not 0.95 <= found["alone"] / found["measured"] <= 1.05
    assert not 0.95 <= found["alone"] / 4 / found["measured"] <= 1.05


def test_gradients_that_stay_for_one_sum_are_counted(ranks):
    """Between the two ways of reducing there are the gradients of all modules, which one of them keeps."""
    once, each = (ranks.run(2, cases.fsdp_case, 2, 6, reduce)[0] for reduce in ("after", "each"))

    assert once["measured"] > 1.1 * each["measured"]
    assert once["planned"] - each["planned"] == pytest.approx(once["measured"] - each["measured"], rel=0.02)


@pytest.mark.parametrize("budget", [1.1, 0.6])
def test_a_step_with_fsdp2_plans_within_its_budget(ranks, budget):
    found = ranks.run(2, cases.budget_case, budget)

    assert found[0]["plan"] == found[1]["plan"]
    for rank in found:
        assert rank["share"] <= 1.0
        assert rank["reduce"] == rank["plan"].reduce
    assert (len(found[0]["sizes"]) == 1) == (budget > 1)


def test_gradients_are_summed_in_each_micro_batch_where_all_of_them_do_not_fit(ranks):
    """With wide blocks the gradients of all modules are most of it."""
    found = ranks.run(4, cases.budget_case, 0.78, width=160)[0]

    assert found["plan"].reduce == "each"
    assert found["share"] <= 1.0
    assert len(found["sizes"]) > 1


def test_a_budget_in_which_nothing_fits_is_an_error_with_the_smallest(ranks):
    for found in ranks.run(2, cases.budget_case, 0.05):
        assert found["error"].startswith("No plan fits in")
        assert found["smallest"] > 0
