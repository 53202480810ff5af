"""Dropout by sample and the gradient noise scale over ranks are those of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.reference import gradient_error
from tests.stepping import rank_randomness as cases
from tests.stepping.workers import Workers, workers


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    with workers(3) as found:
        yield found


def truth(batch, **options):
    """The big batch at once, in one process."""
    model = cases.dropping()
    torch.manual_seed(7)
    return cases.dropped(model, batch, dropout="per-sample", **options)


@pytest.mark.parametrize(
    ("size", "num_samples", "micro", "last_is_empty"),
    [(2, 12, 2, False), (2, 7, 3, False), (3, 11, 1, False), (3, 5, 2, True), (1, 6, 2, False)],
)
def test_masks_are_those_of_the_big_batch_in_one_process(ranks, size, num_samples, micro, last_is_empty):
    found = ranks.run(
        size, cases.dropout_case, num_samples, "ddp", last_is_empty, micro_batch_size=micro, dropout="per-sample"
    )

    expected = truth(cases.tokens(num_samples))
    for rank in found:
        assert gradient_error(rank["gradient"], expected["gradient"]) <= 1e-12
        assert abs(rank["loss"] - expected["loss"]) <= 1e-12
        assert rank["exactness"] == "exact"


def test_without_them_ranks_drop_other_things_than_the_big_batch(ranks):
    """Control: native dropout, and per-sample dropout that takes the number of a sample in its own share."""
    native = ranks.run(2, cases.dropout_case, 12, "ddp", False, micro_batch_size=2)

    expected = truth(cases.tokens(12))["gradient"]
    assert min(gradient_error(rank["gradient"], expected) for rank in native) > 1e-2
    assert {rank["exactness"] for rank in native} == {"same in distribution"}
    batch = cases.tokens(12)
    halves = [truth({name: value[half] for name, value in batch.items()}) for half in (slice(6), slice(6, 12))]
    weights = [(batch["labels"][half] != -100).sum() for half in (slice(6), slice(6, 12))]
    own = {
        name: sum(w * half["gradient"][name] for w, half in zip(weights, halves, strict=True)) / sum(weights)
        for name in expected
    }
    assert gradient_error(own, expected) > 1e-2


@pytest.mark.parametrize(("wrap", "reduce"), [("ddp", "overlap"), ("fsdp2", "after"), ("fsdp2", "each")])
def test_so_are_they_where_gradients_are_summed_inside_backward(ranks, wrap, reduce):
    """There a rank without samples runs a micro-batch of another one, whose masks do not matter."""
    found = ranks.run(3, cases.dropout_case, 5, wrap, True, micro_batch_size=2, dropout="per-sample", reduce=reduce)

    expected = truth(cases.tokens(5))["gradient"]
    assert max(gradient_error(rank["gradient"], expected) for rank in found) <= 1e-12


def test_so_are_they_in_both_passes_of_a_loss_that_looks_across_samples(ranks):
    found = ranks.run(3, cases.coupled_case, 11)

    model = cases.dropping()
    torch.manual_seed(7)
    expected = cases.coupled(model, cases.tokens(11))
    for rank in found:
        assert gradient_error(rank["gradient"], expected["gradient"]) <= 1e-12
        assert abs(rank["loss"] - expected["loss"]) <= 1e-12


def test_shares_that_are_dealt_in_turn_are_a_batch_in_the_order_of_the_ranks(ranks):
    found = ranks.run(2, cases.dealt_case, 8)

    batch = cases.tokens(8)
    in_order = {name: torch.cat([value[0::2], value[1::2]]) for name, value in batch.items()}
    for rank in found:
        assert gradient_error(rank["gradient"], truth(in_order)["gradient"]) <= 1e-12
        assert gradient_error(rank["gradient"], truth(batch)["gradient"]) > 1e-2


@pytest.mark.parametrize("size", [2, 3])
def test_steps_of_ranks_are_those_of_one_process_also_one_that_is_made_again(ranks, size):
    found = ranks.run(size, cases.dropout_steps_case)

    torch.manual_seed(7)
    model = cases.dropping()
    torch.manual_seed(7)
    expected = cases.dropping_steps(model, [cases.tokens(9)] * 3)
    for rank in found:
        assert rank["retries"] == 1
        assert gradient_error(rank["weights"], expected["weights"]) <= 1e-12


SIZES = {
    "equal": [[4, 4], [4, 4]],
    "uneven": [[5, 1], [3, 2, 2]],
    "one each": [[4], [3]],
    "a rank without samples": [[4, 3], []],
    "three ranks": [[2, 2], [1], [6, 1, 1]],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_noise_scale_is_that_of_one_process_with_the_same_micro_batches(ranks, sizes):
    found = ranks.run(len(sizes), cases.noise_case, sizes, "mean")

    expected = cases.noise_scales(cases.linear(), sizes, None, "mean")
    for rank in found:
        assert rank == pytest.approx(expected, rel=1e-10)
    assert all(0 < value < float("inf") for value in expected)


@pytest.mark.parametrize(
    "options",
    [dict(loss="ratio"), dict(loss="mean", reduce="overlap"), dict(loss="ratio", reduce="overlap")],
    ids=["late denominator", "overlap", "late denominator, overlap"],
)
def test_so_it_is_with_a_late_denominator_and_where_ddp_divides_by_the_ranks(ranks, options):
    found = ranks.run(2, cases.noise_case, SIZES["uneven"], **options)

    expected = cases.noise_scales(cases.linear(), SIZES["uneven"], None, "mean")
    assert found[0] == pytest.approx(expected, rel=1e-10)
    assert found[1] == found[0]


def test_the_micro_batches_of_one_rank_alone_tell_another_noise_scale(ranks):
    """Control: what a rank would find that does not know of the others."""
    alone = ranks.run(1, cases.noise_case, SIZES["uneven"], "mean")[0]

    expected = cases.noise_scales(cases.linear(), SIZES["uneven"], None, "mean")
    assert abs(alone[0] / expected[0] - 1) > 0.1


def test_what_has_no_noise_scale_is_refused_on_all_ranks(ranks):
    for found in ranks.run(2, cases.noise_refused_case):
        assert found["fsdp2"].startswith("DistributedError: noise_scale=True needs the gradient of each micro-batch")
        assert found["constant"].startswith("LossError: noise_scale=True needs")
