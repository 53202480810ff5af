"""A loss that looks across the samples of all ranks is that of the one big batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from bigbatch.stepping.coupled.batch_of_ranks import Elsewhere
from tests.reference import gradient_error
from tests.stepping import rank_whole_batch as cases
from tests.stepping.workers import workers

READY = ["InfoNCE", "SigLIP", "SupCon"]
WRITTEN = ["Pearson", "pairwise AUC", "soft Dice"]  # the second looks at the batch, the third at sums
FAST = [
    (1, "InfoNCE", "uneven", 3),
    (2, "InfoNCE", "equal", 99),
    (2, "SigLIP", "uneven", 1),
    (2, "soft Dice", "empty rank", 3),
    (3, "InfoNCE", "empty first", "uneven"),
    (3, "SupCon", "uneven", "uneven"),
    (3, "Pearson", "uneven", 3),
    (4, "SigLIP", "empty rank", 3),
    (4, "SupCon", "empty first", 1),
    (4, "pairwise AUC", "uneven", 3),
    (4, "Pearson", "empty rank", "uneven"),
    (4, "soft Dice", "uneven", 1),
]


def check(found: list[dict[str, float]]) -> None:
    for rank, errors in enumerate(found):
        assert errors["gradient"] <= 1e-12, f"rank {rank}: {errors}"
        assert errors["loss"] <= 1e-12, f"rank {rank}: {errors}"


@pytest.mark.parametrize(("size", "name", "shares", "micro"), FAST)
def test_gradient_and_loss_are_those_of_the_big_batch(ranks, size, name, shares, micro):
    found = ranks.run(size, cases.gradient_case, name, shares, micro)

    check(found)
    assert {rank["weight"] for rank in found} == {0.0}
    assert {rank["own"] for rank in found} == {0}


@pytest.mark.parametrize("name", ["SigLIP", "soft Dice"])
def test_a_step_makes_the_same_gradient(ranks, name):
    check(ranks.run(3, cases.gradient_case, name, "uneven", 3, steps=True))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 3, "uneven", 99])
@pytest.mark.parametrize("shares", cases.SHARES)
@pytest.mark.parametrize("name", READY + WRITTEN)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_whole_matrix(ranks, size, name, shares, micro):
    check(ranks.run(size, cases.gradient_case, name, shares, micro))


@pytest.mark.parametrize("name", READY + WRITTEN)
def test_negatives_of_the_own_rank_alone_are_not_the_big_batch(ranks, name):
    """Control: what DDP does with such a loss is far outside the tolerance above."""
    assert min(ranks.run(3, cases.own_negatives_case, name)) > 1e-2


@pytest.mark.parametrize("micro", [1, 2, 9])
def test_each_rank_has_masks_of_its_own_and_draws_the_same_in_both_passes(ranks, micro):
    for found in ranks.run(3, cases.dropout_case, micro):
        assert found["gradient"] <= 1e-12
        assert found["control"] > 1e-2
        assert found["goes on"]
        assert found["exactness"] == "same in distribution"


INSIDE = [
    ("ddp", "overlap", "uneven", 2),
    ("ddp", "overlap", "empty first", 3),
    ("ddp", "overlap", "equal", 99),
    ("fsdp2", "after", "uneven", 2),
    ("fsdp2", "after", "empty rank", 99),
    ("fsdp2", "each", "empty first", 3),
]


@pytest.mark.parametrize(("wrap", "reduce", "shares", "micro"), INSIDE)
def test_gradients_may_be_summed_inside_backward(ranks, wrap, reduce, shares, micro):
    check(ranks.run(3, cases.inside_case, wrap, reduce, shares, micro))


def test_ten_steps_are_those_of_one_process(ranks):
    found = ranks.run(3, cases.steps_case)

    for rank in found:
        assert rank["losses"] <= 1e-10
        assert rank["error"] <= 1e-10
        assert all(value.equal(found[0]["weights"][name]) for name, value in rank["weights"].items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_autocast_it_is_as_near_to_float64_as_the_big_batch(ranks, precision):
    for found in ranks.run(3, cases.precise_case, precision):
        assert found["ranks"] < 2 * found["alone"]
        assert found["alone"] < 0.1
        assert found["loss"] == pytest.approx(found["plain"], rel=1e-2)


def test_a_temperature_is_trained_alone(ranks):
    assert max(ranks.run(3, cases.frozen_case)) <= 1e-12


@pytest.mark.parametrize("num_samples", [16, 11])
def test_each_rank_computes_its_part_of_all_pairs(ranks, num_samples):
    """Once in forward and once in backward; replicated, it would be all rows on each."""
    found = ranks.run(4, cases.rows_case, num_samples)

    assert sum(sum(rows) for rows in found) == 2 * num_samples
    assert max(sum(rows) for rows in found) <= 2 * -(-num_samples // 4)


@pytest.mark.slow
def test_each_rank_plans_for_its_share_and_all_take_the_most_careful_plan(ranks):
    found = ranks.run(2, cases.plan_case, ["16MiB", "22KiB"])

    assert found[0]["sizes"] == found[1]["sizes"]
    assert max(found[0]["sizes"]) < 16, "what rank 1 has room for"
    assert max(rank["gradient"] for rank in found) <= 1e-12


FAILURES = ["first pass", "second pass", "only pass", "loss", "rows", "rows again", "backward"]


def same_everywhere(found: list[dict]) -> dict:
    for other in found[1:]:
        for name, weights in found[0]["weights"].items():
            assert weights.equal(other["weights"][name]), name
        assert other["num_steps"] == found[0]["num_steps"]
        assert other["size"] == found[0]["size"]
        assert other["gradients"] == []
    return found[0]


def micro_of(where: str) -> int:
    return 4 if where == "only pass" else 2


@pytest.mark.parametrize(
    ("where", "bad"),
    [
        ("first pass", [1]),
        ("second pass", [0, 2]),
        ("only pass", [1]),
        ("rows again", [0]),
        *(pytest.param(where, bad, marks=pytest.mark.slow) for where in FAILURES for bad in ([1], [0, 2])),
    ],
)
def test_ranks_make_a_step_again_together_when_memory_runs_out_on_some(ranks, where, bad):
    found = ranks.run(3, cases.failing_case, where, "memory", bad, micro_of(where))
    first = same_everywhere(found)

    assert [rank["happened"] for rank in found] == [rank in bad for rank in range(3)]
    assert {rank["said"] for rank in found} == {"done, 0 retries; done, 1 retries; done, 0 retries; "}
    assert gradient_error(first["weights"], cases.truth_after(3, 3)) <= 1e-10
    assert first["num_steps"] == 3
    assert first["size"] == micro_of(where) // 2


@pytest.mark.parametrize("where", ["first pass", "rows again"])
def test_an_error_on_one_rank_is_told_on_the_others(ranks, where):
    found = ranks.run(3, cases.failing_case, where, "error", [1], micro_of(where))

    same_everywhere(found)
    assert "own KeyError: 'sample 17'" in found[1]["said"]
    for rank in (0, 2):
        told = "DistributedError: Rank 1 failed: KeyError: 'sample 17'. All ranks undid the step."
        assert told in found[rank]["said"]
    assert gradient_error(found[0]["weights"], cases.truth_after(2, 3)) <= 1e-10


@pytest.mark.parametrize(
    "where",
    ["first pass", pytest.param("loss", marks=pytest.mark.slow), pytest.param("backward", marks=pytest.mark.slow)],
)
def test_ranks_skip_a_step_together_when_one_is_not_finite(ranks, where):
    found = ranks.run(3, cases.failing_case, where, "nan", [1], on_non_finite="skip")

    assert {rank["said"] for rank in found} == {"done, 0 retries; skipped, 0 retries; done, 0 retries; "}
    assert gradient_error(same_everywhere(found)["weights"], cases.truth_after(2, 3)) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("where", ["first pass", "second pass", "loss", "rows", "rows again"])
def test_a_killed_rank_ends_the_others_with_its_number(where):
    with workers(3) as own:
        found = own.answers(3, cases.failing_case, where, "kill", [1], then_end=True)

    assert found.pop(1) == (False, "the process is gone")
    for well, answer in found.values():
        assert well, answer
        assert "DistributedError: Rank 1 is gone: the process has ended" in answer["said"]


def test_with_raise_all_ranks_undo_the_step_when_memory_runs_out_on_one(ranks):
    found = ranks.run(2, cases.failing_case, "first pass", "memory", [1], on_out_of_memory="raise")

    same_everywhere(found)
    assert "own OutOfMemoryError" in found[1]["said"]
    assert "RankMemoryError: Rank 1 failed" in found[0]["said"]


@pytest.mark.parametrize("micro", [1, 4])
def test_what_is_communicated_does_not_depend_on_the_number_of_micro_batches(ranks, micro):
    for found in ranks.run(3, cases.collectives_case, "SigLIP", micro):
        # Weights, outputs, rows, sums over rows, their gradients, losses.
        assert found == {"scalar": 6, "all_gather_object": 1, gathers(found): 2, "all_reduce": 2}


def gathers(found: dict[str, int]) -> str:
    return next(name for name in ("all_gather_single", "all_gather_into_tensor") if name in found)


def test_a_tensor_of_the_batch_is_sent_when_the_loss_looks_at_it(ranks):
    """One is the output; what is looked at twice is sent once."""
    assert ranks.run(2, cases.looks_case) == [(1, 3)] * 2


@pytest.mark.parametrize("how", ["plain", "collate", "logical", "others"])
def test_the_loss_gets_the_batch_of_all_ranks(ranks, how):
    for found in ranks.run(3, cases.batch_case, how):
        assert found["gradient"] <= 1e-12
        assert found["right"]
        assert found["type"] == "dict"
        if how == "others":
            assert found["names"] == [f"n{i}" for i in range(5)]
            assert found["array"] == list(range(5))
            assert found["number"] == 7.0
            assert tuple(found["turned"]) == (2, 5)


@pytest.mark.parametrize("sizes", [[3, 0, 4], [1, 5], [1, 1, 1]])
def test_tensors_may_be_columns_of_a_table(ranks, sizes):
    """One row of a column, or none of them, counts as contiguous with any stride."""
    assert max(rank["gradient"] for rank in ranks.run(len(sizes), cases.columns_case, sizes)) <= 1e-12


def test_outputs_may_have_any_dtype(ranks):
    for found in ranks.run(3, cases.dtypes_case):
        assert set(found) > {"none", "n", "any", "c"}
        assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize("compiled", [False, True])
def test_running_statistics_are_merged_over_ranks_whatever_their_micro_batches(ranks, compiled):
    for found in ranks.run(3, cases.batch_norm_case, [3, 9, 2], compiled):
        assert found["error"] <= 1e-12


USES = {
    "shape": lambda y, z: tuple(y.shape),
    "length": lambda y, z: len(y),
    "as an index": lambda y, z: z[y].tolist(),
    "in an index": lambda y, z: z[1:3, y[:2]].tolist(),
    "mask": lambda y, z: z[y > 0].tolist(),
    "cross-entropy": lambda y, z: float(F.cross_entropy(z, y)),
    "joined": lambda y, z: torch.cat([y, y]).tolist(),
    "in a dict": lambda y, z: torch.stack(tensors=[y], dim=0).tolist(),
    "on the right": lambda y, z: (z[:, 0] * y).tolist(),
    "NumPy": lambda y, z: y.numpy().tolist(),
    "one by one": lambda y, z: [int(label) for label in y],
    "in place": lambda y, z: z.clone().index_add_(0, y, z).tolist(),
    "copied": lambda y, z: copy.deepcopy(y).tolist(),
    "operator": lambda y, z: torch.ops.aten.add(y, y).tolist(),
    "text": lambda y, z: repr(y),
}


@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_is_elsewhere_is_used_like_any_other(use):
    y, z = torch.tensor([1, 0, 2, 2]), torch.arange(16.0).view(4, 4)

    assert USES[use](Elsewhere.found_by(lambda: y), z) == USES[use](y, z)


def test_a_loss_that_draws_does_the_same_on_all_ranks(ranks):
    found = ranks.run(3, cases.random_loss_case)

    assert {tuple(rank["drawn"]) for rank in found} == {tuple(found[0]["drawn"])}
    assert found[0]["drawn"][0] != found[0]["drawn"][1]
    assert len({rank["own"] for rank in found}) == 3


TOLD = {
    "peeks": "DistributedError: The ranks are at different places of the step: {0: 'tensor 3 of the batch is sent'",
    "other names": "LossError: forward returned ['z1'] for rank 1, but ['z0'] for rank 0.",
    "other shapes": "LossError: The output of forward has other shapes in other ranks: (2,), (3,), without the samples",
    "other dtypes": "LossError: The output of forward has other dtypes on other ranks: [torch.float64, torch.float32]",
    "other values": "LossError: The output '1' of forward is [0, 1] in the ranks, and nobody knows",
    "other kinds": "LossError: The output 'flag' of forward is a bb.Sum for some ranks, but not for others",
    "padded": "LossError: The loss of WholeBatchLoss looks at a tensor of the batch that cannot be put together",
    "padded, not looked at": "no error",
    "beside": "LossError: The loss of WholeBatchLoss reaches parameters of shape [()] that are not in the model",
    "not sent": "LossError: ",
    "well": "no error",
}


def test_what_does_not_go_together_is_told_on_all_ranks(ranks):
    for found in ranks.run(2, cases.told_case):
        for name, said in TOLD.items():
            assert found[name].startswith(said), f"{name}: {found[name]}"
