"""batch_norm="exact" over ranks: loss, gradient and running statistics of the big batch in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference import gradient_error
from tests.stepping import rank_norms as cases
from tests.stepping.pooled_models import big_batch, images
from tests.stepping.workers import workers

GRADIENT, STATISTICS = 1e-10, 1e-12


def check(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        assert one["gradient"] <= GRADIENT, f"rank {rank}: {one}"
        assert one["loss"] <= 1e-12, f"rank {rank}: {one}"
        assert one["statistics"] <= STATISTICS, f"rank {rank}: {one}"
        assert one["exactness"] == "exact"
        assert all(value.equal(found[0]["buffers"][name]) for name, value in one["buffers"].items())


@pytest.mark.parametrize(
    ("name", "sizes", "micro"),
    [
        ("resnet", [7], [3]),
        ("resnet", [7, 5], [3, 2]),
        ("resnet", [4, 3], [None, None]),
        ("resnet", [1, 1, 1], [1, 1, 1]),
        ("branches", [6, 1, 4], [4, 4, 1]),
        ("recomputed branches", [6, 1, 4], [4, 4, 1]),
        ("vectors", [5, 1], [2, 2]),
        ("resnet", [2, 5, 3, 1], [2, 2, 1, 1]),
    ],
)
def test_it_is_the_big_batch(ranks, name, sizes, micro):
    """Shares and micro-batches of any size, and other numbers of them on each rank."""
    found = ranks.run(len(sizes), cases.exact_case, name, sizes, micro)

    check(found)
    assert [sum(one["sizes"]) for one in found] == sizes


@pytest.mark.parametrize(("name", "sizes"), [("resnet", [5, 0, 4]), ("branches", [0, 6]), ("vectors", [3, 0])])
def test_a_rank_without_samples_takes_part(ranks, name, sizes):
    """It runs a micro-batch of another rank without a graph, which is in nobody's statistics."""
    found = ranks.run(len(sizes), cases.exact_case, name, sizes, [2] * len(sizes))

    check(found)
    assert found[sizes.index(0)]["sizes"] == ()


@pytest.mark.parametrize("sizes", [[7, 5], [2, 5, 0]])
def test_sync_batch_norm_joins_micro_batches_too(ranks, sizes):
    check(ranks.run(len(sizes), cases.exact_case, "resnet", sizes, [3] * len(sizes), sync=True))


@pytest.mark.parametrize(("name", "sizes"), [("branches", [6, 1, 4]), ("resnet", [5, 0])])
def test_what_is_saved_may_lie_on_the_host(ranks, name, sizes):
    check(ranks.run(len(sizes), cases.exact_case, name, sizes, [2] * len(sizes), on_host=True))


def test_an_overflow_on_one_rank_is_skipped_on_all(ranks):
    found = ranks.run(2, cases.scaled_case)

    assert [one[:3] for one in found] == [[False, True, 32.0]] * 2
    assert all(value.equal(found[1][3][name]) for name, value in found[0][3].items())


def test_statistics_of_each_rank_are_far_outside():
    """Control: the exact gradient of each share, weighed by its samples, is not that of the batch."""
    (x, y), model = images(12, size=8), cases.make("resnet")
    big = big_batch(model, (x, y))
    shares = [big_batch(model, (x[:7], y[:7])), big_batch(model, (x[7:], y[7:]))]

    added: dict[str, Any] = {name: shares[0].gradients[name] * 7 / 12 for name in big.gradients}
    added = {name: g + shares[1].gradients[name] * 5 / 12 for name, g in added.items()}

    assert gradient_error(added, big.gradients) > 0.1


def test_merge_with_the_same_shares_is_far_outside(ranks):
    """Control."""
    for one in ranks.run(2, cases.exact_case, "resnet", [7, 5], [3, 2], policy="merge"):
        assert one["gradient"] > 0.1
        assert one["statistics"] > 1e-5


def test_denominators_that_are_known_late_have_a_backward_each(ranks):
    check(ranks.run(3, cases.late_case, [4, 3, 2]))


def test_a_rank_whose_samples_do_not_count_has_a_gradient_all_the_same(ranks):
    """Through the statistics, from the losses of the others."""
    check(ranks.run(2, cases.weighed_case, [4, 3]))


@pytest.mark.parametrize("of", ["first", "left", "last"])
@pytest.mark.parametrize("sizes", [[4, 3], [4, 0, 3]])
def test_gradients_of_some_parameters_alone(ranks, sizes, of):
    """All ranks go through all meetings in backward, also one that has no graph, and no way from them to these."""
    assert max(ranks.run(len(sizes), cases.some_parameters_case, sizes, of)) <= GRADIENT


def test_steps_go_where_those_of_one_process_go(ranks):
    assert max(ranks.run(3, cases.steps_case, [[4, 3, 2], [5, 0, 1], [1, 1, 9]])) <= 1e-9


def test_a_meeting_is_two_exchanges_in_forward_and_one_in_backward(ranks):
    """And a step has four: weights, the end of the forwards, the end of the backwards, the gradients."""
    for one in ranks.run(2, cases.exchanges_case, [4, 3]):
        assert one["exchanges"] == 5 * (2 + 1) + 4


def same_everywhere(found: list[dict[str, Any]]) -> dict[str, Any]:
    for other in found[1:]:
        for name, weights in found[0]["weights"].items():
            assert weights.equal(other["weights"][name]), name
        assert (other["num_steps"], other["size"], other["gradients"]) == (found[0]["num_steps"], found[0]["size"], [])
    return found[0]


@pytest.mark.parametrize(
    ("where", "between", "bad"),
    [
        ("forward", True, [0, 2]),
        ("forward", False, [1]),
        ("backward", True, [1]),
        ("backward", False, [0, 2]),
        *[
            pytest.param(where, between, bad, marks=pytest.mark.slow)
            for where, between, bad in [
                ("forward", True, [1]),
                ("forward", False, [0, 2]),
                ("backward", True, [0, 2]),
                ("backward", False, [1]),
            ]
        ],
    ],
)
def test_ranks_make_a_step_again_together_when_memory_runs_out_on_some(ranks, where, between, bad):
    found = ranks.run(3, cases.failing_case, where, bad, "memory", between=between)

    one = same_everywhere(found)
    assert gradient_error(one["weights"], cases.truth_after(3, between=between)) <= 1e-10
    assert one["size"] == 1
    assert [rank for rank, other in enumerate(found) if other["happened"]] == bad


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("between", [True, False], ids=["between two layers", "at the end"])
def test_an_error_on_one_rank_is_told_on_the_others(ranks, where, between):
    found = ranks.run(3, cases.failing_case, where, [1], "error", between=between)

    same_everywhere(found)
    assert "own KeyError: 'sample 17'" in found[1]["said"]
    for rank in (0, 2):
        assert "Rank 1 failed: KeyError: 'sample 17'. All ranks undid the step." in found[rank]["said"]
    assert gradient_error(found[0]["weights"], cases.truth_after(2, between=between)) <= 1e-10


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_skip_a_step_together_when_one_is_not_finite(ranks, where):
    found = ranks.run(3, cases.failing_case, where, [1], "nan", on_non_finite="skip")

    assert gradient_error(same_everywhere(found)["weights"], cases.truth_after(2)) <= 1e-10
    assert {one["num_steps"] for one in found} == {2}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_who_is_killed_between_two_layers_is_named(where):
    with workers(3) as own:
        found = own.answers(3, cases.killed_case, where, 1, then_end=True)

    for rank in (0, 2):
        assert found[rank][1].startswith("1: Rank 1 is gone")


def test_what_cannot_be_is_told_on_all_ranks(ranks):
    first, second = ranks.run(2, cases.told_case)

    for found in (first, second):
        assert found["overlap"].startswith(
            'OptionError: batch_norm="exact" over several ranks has exchanges of its own'
        )
        assert found["sharded"].startswith('DistributedError: batch_norm="exact" joins statistics of ranks under')
        assert "Rank 0 came to the layer 'module.a' when rank 1 came to the layer 'module.b'" in found["another layer"]
        assert "Rank 0 came to the layer 'module.b' when rank 1 came to the end of its forward" in found["the end"]
        assert found["other terms"].startswith("LossError: The ranks have different terms in their losses")
        assert found["one value"].startswith("BatchError: The BatchNorm layer 'module.1' got one value per channel")
        assert found["after"] == "no error"
    assert first["no loss"].startswith("LossError: The term 'loss' of the loss has shape (2, 5)")
    assert second["no loss"].startswith("DistributedError: Rank 0 failed: LossError")


def test_each_rank_plans_for_its_share(ranks):
    found = ranks.run(2, cases.plan_case, "64MiB")

    assert found[0]["plan"] == found[1]["plan"] != ""
    for one in found:
        assert one["loss"] <= 1e-12
        assert one["statistics"] <= STATISTICS


def test_a_budget_with_sync_batch_norm_is_refused(ranks):
    for one in ranks.run(2, cases.plan_case, "64MiB", sync=True):
        assert one["error"].startswith("OptionError: With SyncBatchNorm a plan cannot be found by trying")
