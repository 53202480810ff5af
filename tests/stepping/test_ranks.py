"""A step of several ranks is the step of one process: same gradient, same loss, same weights."""

from __future__ import annotations

import pytest

from tests.reference import gradient_error
from tests.stepping import rank_cases as cases

FAST = [
    (2, "ddp", "mean", 3),
    (2, "ddp", "uneven tokens", 1),
    (3, "ddp", "indivisible", "uneven"),
    (4, "ddp", "empty rank", 1),
    (2, "ddp", "two terms", 3),
    (3, "ddp", "late ratio", 1),
    (3, "ddp", "mixed", "uneven"),
    (1, "ddp", "two terms", 3),
    (2, "fsdp2", "mean", 3),
    (2, "fsdp2", "uneven tokens", "uneven"),
    (3, "fsdp2", "indivisible", 1),
    (4, "fsdp2", "empty rank", 3),
    (2, "fsdp2", "two terms", "uneven"),
    (3, "fsdp2", "late ratio", 1),
    (1, "fsdp2", "two terms", 3),
    (3, "ddp", "six terms", 3),
    (2, "ddp", "padded rank", 3),
    (2, "fsdp2", "padded rank", 3),
]


def check(found: list[dict[str, float]]) -> None:
    for rank, errors in enumerate(found):
        assert errors["gradient"] <= 1e-12, f"rank {rank}: {errors}"
        assert errors["loss"] <= 1e-12, f"rank {rank}: {errors}"


@pytest.mark.parametrize(("size", "wrap", "data", "micro"), FAST)
def test_gradient_is_that_of_the_big_batch(ranks, size, wrap, data, micro):
    check(ranks.run(size, cases.gradient_case, wrap, data, micro))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("data", ["uneven tokens", "empty rank", "late ratio", "padded rank"])
def test_gradient_is_that_of_the_big_batch_when_it_is_summed_inside_backward(ranks, wrap, data):
    check(ranks.run(3, cases.gradient_case, wrap, data, 1, reduce="overlap"))


@pytest.mark.parametrize("data", ["uneven tokens", "empty rank"])
def test_gradient_is_that_of_the_big_batch_when_fsdp2_sums_after_each_micro_batch(ranks, data):
    check(ranks.run(2, cases.gradient_case, "fsdp2", data, 1, reduce="each"))


def test_a_mean_of_the_means_of_ranks_is_not_the_big_batch(ranks):
    """Control: what DDP does by itself is far outside the tolerance above."""
    assert min(ranks.run(2, cases.mean_of_means_case)) > 1e-2


@pytest.mark.parametrize(("size", "wrap"), [(3, "ddp"), (2, "fsdp2")])
def test_ten_steps_with_clipping_and_a_schedule_are_those_of_one_process(ranks, size, wrap):
    for errors in ranks.run(size, cases.steps_case, wrap):
        assert errors["losses"] <= 1e-10
        assert errors["weights"] <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 3, "uneven"])
@pytest.mark.parametrize("data", ["mean", "uneven tokens", "indivisible", "empty rank", "two terms"])
@pytest.mark.parametrize("wrap", ["ddp", "compiled", "fsdp2"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_whole_matrix(ranks, size, wrap, data, micro):
    check(ranks.run(size, cases.gradient_case, wrap, data, micro))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("wrap", ["ddp", "compiled", "fsdp2"])
@pytest.mark.parametrize("reduce", ["after", "overlap"])
def test_ten_steps_of_any_ranks_are_those_of_one_process(ranks, size, wrap, reduce):
    for errors in ranks.run(size, cases.steps_case, wrap, reduce):
        assert errors["losses"] <= 1e-10
        assert errors["weights"] <= 1e-10


def same_everywhere(found: list[dict]) -> dict:
    for other in found[1:]:
        for name, weights in found[0]["weights"].items():
            assert weights.equal(other["weights"][name]), name
        assert other["num_steps"] == found[0]["num_steps"]
        assert other["size"] == found[0]["size"]
        assert other["gradients"] == []
    return found[0]


@pytest.mark.parametrize("bad", [[1], [0, 2]])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_ranks_make_a_step_again_together_when_memory_runs_out_on_some(ranks, where, bad):
    found = same_everywhere(ranks.run(3, cases.failing_steps, where, bad, "memory"))

    assert gradient_error(found["weights"], cases.truth_after(skipped=False)) <= 1e-10
    assert found["num_steps"] == 3
    assert found["size"] == (2 if where == "optimizer" else 1)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_skip_a_step_together_when_one_is_not_finite(ranks, where):
    found = ranks.run(3, cases.failing_steps, where, [1], "nan", on_non_finite="skip")

    assert gradient_error(same_everywhere(found)["weights"], cases.truth_after(skipped=True)) <= 1e-10
    assert {one["num_steps"] for one in found} == {2}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_for_what_is_not_finite_is_the_same_on_all_ranks(ranks, where):
    found = ranks.run(3, cases.failing_steps, where, [1], "nan")

    same_everywhere(found)
    assert {one["said"] for one in found} == {found[0]["said"]}
    assert "NonFiniteError: Not finite: " in found[0]["said"]
    assert where == "backward" or "micro-batch 1 on rank 1" in found[0]["said"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_on_one_rank_is_told_on_the_others(ranks, where):
    found = ranks.run(3, cases.failing_steps, where, [1], "error")

    same_everywhere(found)
    assert "own KeyError: 'sample 17'" in found[1]["said"]
    for rank in (0, 2):
        assert (
            "DistributedError: Rank 1 failed: KeyError: 'sample 17'. All ranks undid the step." in found[rank]["said"]
        )
    assert gradient_error(found[0]["weights"], cases.truth_after(skipped=True)) <= 1e-10


def test_with_raise_all_ranks_undo_the_step_when_memory_runs_out_on_one(ranks):
    found = ranks.run(2, cases.failing_steps, "forward", [1], "memory", on_out_of_memory="raise")

    same_everywhere(found)
    assert "own OutOfMemoryError" in found[1]["said"]
    assert "RankMemoryError: Rank 1 failed" in found[0]["said"]


def test_ranks_take_the_most_careful_of_their_plans(ranks):
    found = ranks.run(3, cases.plan_case, ["16MiB", "60KiB", "16MiB"])

    assert {rank["plan"] for rank in found} == {found[1]["plan"]}
    assert max(found[0]["sizes"]) < 22, "what rank 1 has room for"
    assert all(rank["unmoved"] for rank in found)
    assert max(rank["weights"] for rank in found) <= 1e-12


def test_when_one_rank_finds_no_plan_all_are_told(ranks):
    found = ranks.run(2, cases.plan_case, ["16MiB", "1KiB"])

    assert found[1]["error"].startswith("BudgetError: ")
    assert found[0]["error"].startswith("DistributedError: Rank 1 failed: BudgetError: ")


def test_ranks_plan_for_fsdp2_by_arithmetic_and_take_one_plan(ranks):
    found = ranks.run(2, cases.plan_case, ["30KiB", "16MiB"], "fsdp2")

    assert {rank["plan"] for rank in found} == {found[0]["plan"]}
    assert len(found[0]["sizes"]) > 1
    assert all(rank["unmoved"] and rank["weights"] <= 1e-10 for rank in found)


def test_when_no_plan_fits_with_fsdp2_all_ranks_are_told(ranks):
    for found in ranks.run(2, cases.plan_case, ["16MiB", "1KiB"], "fsdp2"):
        assert "BudgetError" in found["error"]
        assert "No plan fits in 1.00 KiB" in found["error"]


def test_what_is_wrong_on_some_rank_is_told_on_all(ranks):
    first, second = ranks.run(2, cases.told_case)

    for found in (first, second):
        assert found["nothing counts"].startswith("LossError: The weight is 0 over the whole batch")
        assert found["other terms"].startswith("LossError: The ranks have different terms in their losses")
    assert first["no batch"].startswith("BatchError: ")
    assert second["no batch"].startswith("DistributedError: Rank 0 failed: BatchError: ")


def test_micro_batches_may_come_one_by_one(ranks):
    assert max(ranks.run(3, cases.iterator_case)) <= 1e-12


@pytest.mark.parametrize(
    ("size", "wrap", "reduce"), [(2, "ddp", "after"), (3, "ddp", "overlap"), (3, "fsdp2", "after")]
)
def test_each_rank_groups_its_share_by_length(ranks, size, wrap, reduce):
    """Also beside a rank of no samples, and with other numbers of micro-batches on each."""
    found = ranks.run(size, cases.grouped_case, wrap, 23, reduce)

    check(found)
    sharing = found[:2]
    assert sum(sum(rank["sizes"]) for rank in sharing) == 23
    for rank in sharing:
        before, after = rank["padding"]
        assert after < before
    assert sharing[0]["padding"] != sharing[1]["padding"]
    assert all(rank["padding"] is None and sum(rank["sizes"]) == 0 for rank in found[2:])


def test_groups_of_ranks_weighed_by_samples_are_not_the_big_batch(ranks):
    """Control."""
    found = ranks.run(2, cases.grouped_case, "ddp", 23, weight="samples")

    assert min(rank["gradient"] for rank in found) > 1e-2


def test_a_sample_that_is_too_long_on_one_rank_is_told_on_all(ranks):
    first, second = ranks.run(2, cases.grouped_case, "ddp", 9, max_tokens=10)

    assert second["error"].startswith("LengthError: Sample 0 of the batch has length 12")
    assert first["error"].startswith("DistributedError: Rank 1 failed: LengthError: ")


def test_ranks_with_other_lengths_take_the_plan_of_the_fewest_tokens(ranks):
    """And not that of the fewest samples: rank 0 holds few because they are long."""
    found = ranks.run(2, cases.grouped_plan_case, ["500KiB", "200KiB"])
    alone = ranks.run(1, cases.grouped_plan_case, ["500KiB"])[0]

    assert found[0]["plan"] == found[1]["plan"]
    assert found[0]["max_tokens"] < alone["max_tokens"]
