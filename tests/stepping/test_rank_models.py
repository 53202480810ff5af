"""Models that are wrapped in unusual ways, layers that look at the whole batch, and what is communicated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.stepping import rank_models as cases
from tests.stepping.workers import Workers, workers


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    with workers(3) as found:
        yield found


@pytest.mark.parametrize("micro", [1, 2, 9])
def test_a_step_reduces_once_and_talks_twice(ranks, micro):
    for found in ranks.run(3, cases.collectives_case, "after", micro):
        assert found["scalar"] == 2
        assert found["gradients"] == 1, "one bucket holds this model"
        assert found["others"] == 0
        assert (found["schedule"], found["average"]) == (2, 2)


@pytest.mark.parametrize("micro", [1, 2, 9])
def test_ddp_reduces_once_inside_the_last_backward(ranks, micro):
    for found in ranks.run(3, cases.collectives_case, "overlap", micro):
        assert found["through DDP"] == 1
        assert found["scalar"] == 2
        assert found["gradients"] == 1, "that of the hook"
        assert found["others"] == 0
        assert (found["schedule"], found["average"]) == (2, 2)


def test_a_loop_without_no_sync_reduces_in_each_micro_batch(ranks):
    """Control: the hook counts."""
    assert ranks.run(3, cases.plain_loop_case, 1) == [3, 3, 3]


@pytest.mark.parametrize(
    ("reduce", "backend", "inside"),
    [
        ("after", "eager", False),
        ("overlap", "eager", False),
        pytest.param("after", "inductor", False, marks=pytest.mark.slow),
        pytest.param("overlap", "inductor", False, marks=pytest.mark.slow),
        pytest.param("after", "inductor", True, marks=pytest.mark.slow),
        pytest.param("overlap", "inductor", True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_reduces_once_too(ranks, reduce, backend, inside):
    """An old PyTorch ignored ``no_sync`` there."""
    for found in ranks.run(2, cases.compiled_case, reduce, backend, inside):
        assert found["error"] <= 1e-12
        assert found["reductions"] == 1


def test_ranks_may_use_different_branches(ranks):
    assert max(ranks.run(3, cases.branches_case, "after")) <= 1e-12


def test_ranks_may_use_different_branches_inside_backward_when_ddp_looks_for_them(ranks):
    assert max(ranks.run(3, cases.branches_case, "overlap", find_unused_parameters=True)) <= 1e-12


def test_a_parameter_that_ddp_waits_for_is_told_in_the_same_step():
    with workers(3) as own:
        found = own.answers(3, cases.unused_case, then_end=True)

    for _, said in found.values():
        assert "GradientError: DistributedDataParallel waits for gradients of parameters" in said


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_an_overflow_on_one_rank_is_skipped_on_all_and_halves_the_scale_once(ranks, wrap):
    assert ranks.run(2, cases.scaled_case, wrap) == [[False, False, True, 512.0]] * 2


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_wrapped_model_of_one_rank_is_tried_again(ranks, wrap):
    for retries, error in ranks.run(1, cases.retried_alone_case, wrap):
        assert retries == 1
        assert error <= 1e-12


def test_two_models_in_ddp_and_one_of_them_alone(ranks):
    assert max(ranks.run(2, cases.two_case, False)) <= 1e-12
    assert max(ranks.run(2, cases.two_case, True)) <= 1e-12


def test_what_lay_in_grad_is_added_once(ranks):
    assert max(ranks.run(3, cases.added_case)) <= 1e-12


def test_sparse_gradients_are_summed(ranks):
    assert max(ranks.run(3, cases.sparse_case)) <= 1e-12


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, "float64"), (torch.bfloat16, None)])
def test_sparse_gradients_are_summed_in_the_dtype_that_they_are_added_up_in(ranks, dtype, wide):
    """A rank that has none adds nothing in that dtype; in another one torch refuses, and the others would wait."""
    errors = ranks.run(3, cases.sparse_case, dtype, accumulation_dtype=wide)

    assert max(errors) <= 4 * torch.finfo(dtype).eps


def test_what_cannot_be_kept_equal_is_refused(ranks):
    for found in ranks.run(2, cases.refused_case):
        assert found["partly"].startswith("DistributedError: ['scale', 'embed.weight', 'head.weight'] and 1 more"), (
            found["partly"]
        )
        assert "is in no DistributedDataParallel" in found["partly"]
        assert found["hooked"].startswith("OptionError: The DistributedDataParallel has a communication hook")
        assert found["static"].startswith("OptionError: DistributedDataParallel(static_graph=True)")
        assert found["each"].startswith('OptionError: reduce="each" is for FSDP2')
        assert found["16 bits"].startswith("OptionError: The parameters have 16 bits")
        assert found["only some"].startswith("OptionError: With parameters=, DDP would wait for the others")
        assert found["all empty"] == "EmptyBatchError: The batch is empty on every rank."


def test_a_model_in_no_wrapper_is_refused(ranks):
    for found in ranks.run(3, cases.plain_case):
        assert found.startswith("DistributedError: The process group has 3 ranks, but nothing in the model keeps them")


@pytest.mark.parametrize("sizes", [[6, 3, 4], [5, 2, 0]])
def test_batch_norm_is_merged_over_ranks(ranks, sizes):
    found = ranks.run(3, cases.batch_norm_case, "merge", sizes)

    for rank in found:
        assert rank["error"] <= 1e-12
        assert rank["exactness"] == "approximate"
        assert all(value.equal(found[0]["buffers"][name]) for name, value in rank["buffers"].items())


def test_batch_norm_of_torch_is_far_from_the_big_batch_but_the_same_on_all_ranks(ranks):
    """Control; DDP sends the buffers of rank 0."""
    found = ranks.run(3, cases.batch_norm_case, "native", [6, 3, 4])

    for rank in found:
        assert rank["error"] > 1e-2
        assert all(value.equal(found[0]["buffers"][name]) for name, value in rank["buffers"].items())


def test_every_rank_draws_its_own_random_numbers(ranks):
    found = ranks.run(2, cases.dropout_case)

    assert [rank["exactness"] for rank in found] == ["same in distribution"] * 2
    assert found[0]["drawn"] != found[1]["drawn"]
    assert all(value.equal(found[1]["weights"][name]) for name, value in found[0]["weights"].items())


def test_the_norm_is_that_of_all_shards(ranks):
    for found in ranks.run(2, cases.shards_case):
        assert found["error"] <= 1e-12
        assert found["large"] <= 1e-12
        assert found["skipped"]
        assert found["after"] == []


@pytest.mark.parametrize("beside", ["nothing", "padding"])
def test_a_rank_that_has_scaled_no_loss_unscales_the_gradient_of_the_others(ranks, beside):
    assert ranks.run(2, cases.scaled_without_samples_case, beside) == [[False, True, 2.0**10]] * 2


def test_ranks_that_are_at_different_steps_are_told(ranks):
    for found in ranks.run(2, cases.different_numbers_of_steps_case):
        assert found.startswith("DistributedError: The ranks are at different steps")


@pytest.mark.parametrize("reduce", [None, "overlap"])
@pytest.mark.parametrize(("data", "last_is_empty"), [("samples", True), ("whole batch", True), ("whole batch", False)])
def test_ddp_puts_its_buckets_in_order_when_all_ranks_are_there(ranks, reduce, data, last_is_empty):
    """After its first reduction, DDP sends their order in a forward with gradients, which not every rank runs."""
    assert max(ranks.run(3, cases.after_a_loop_case, reduce, data, last_is_empty)) <= 1e-12


def test_ddp_puts_its_buckets_in_order_before_ranks_plan_alone(ranks):
    assert [sum(sizes) for sizes in ranks.run(3, cases.planned_after_a_loop_case)] == [4, 3, 0]


def test_what_ddp_says_before_the_first_forward_leaves_gradients_as_they_were():
    with workers(2) as ranks:
        for said, is_kept in ranks.run(2, cases.unfinished_case):
            assert said.startswith("Expected to have finished reduction in the prior iteration")
            assert is_kept
