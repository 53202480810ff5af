from __future__ import annotations

import pytest
import torch

import bigbatch as bb
from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.stepping.losses import plain_loss
from bigbatch.training.comparison import (
    RunsComparison,
    compare_runs,
    compare_steps,
    direct_peak_bytes,
    uneven_cut,
)
from bigbatch.training.loop import Run
from bigbatch.verification.comparison import MAX_DIFFERENCE
from tests.training.tiny import network, tiny_task


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_grad_norm": 0.1},
        {"collate": lambda samples: tuple(map(torch.stack, zip(*samples, strict=True)))},
        {"scheduler": lambda optimizer, n: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, n)},
        {"precision": "bf16"},
    ],
    ids=["plain", "clipped", "collated", "OneCycle", "bf16"],
)
def test_ten_steps_in_float64_are_those_of_the_big_batch(changes):
    found = compare_steps(tiny_task(**changes), micro_batch_size=5)

    assert found.num_steps == 10
    assert found.difference <= MAX_DIFFERENCE["float64"]
    assert found.within


def over_some(model, batch):
    """A mean over something else than the samples, with no weight given."""
    losses = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * batch[1]).sum() / (batch[1].sum() + 1)


def test_a_loss_that_is_not_cut_rightly_is_outside():
    """Control."""
    found = compare_steps(tiny_task(loss_fn=over_some), micro_batch_size=5)

    assert found.difference > 1e-4
    assert not found.within


def test_where_the_run_cut_nothing_another_cut_is_compared():
    found = compare_steps(tiny_task(), micro_batch_size=16)
    wrong = compare_steps(tiny_task(loss_fn=over_some), micro_batch_size=16)

    assert (found.whole, found.micro_batch_size) == (16, 5)
    assert found.is_cut
    assert found.within
    assert wrong.difference > 1e-4  # Control: the whole batch compared with itself would be equal.
    assert not wrong.within


@pytest.mark.filterwarnings("ignore:batch_size=70, but there are 50 samples")
def test_a_batch_of_all_samples_is_known_to_be_whole():
    found = compare_steps(tiny_task(batch_size=70, epochs=10), micro_batch_size=60)

    assert (found.whole, found.micro_batch_size) == (50, 17)
    assert found.within


def test_that_cut_leaves_no_micro_batch_of_one_sample_to_batch_norm():
    found = compare_steps(tiny_task(model=lambda: network(norm=True), batch_size=9), micro_batch_size=9)

    assert (found.micro_batch_size, found.exactness) == (5, "approximate")


def test_a_batch_that_cannot_be_cut_is_compared_with_nothing():
    found = compare_steps(tiny_task(batch_size=1), micro_batch_size=1)

    assert not found.is_cut


@pytest.mark.parametrize("num_samples", range(2, 40))
@pytest.mark.parametrize("smallest", [1, 2])
def test_an_uneven_cut_is_about_a_third_and_has_a_smaller_rest_where_there_is_one(num_samples, smallest):
    size = uneven_cut(num_samples, smallest=smallest)
    sizes = micro_batch_sizes(num_samples, size, smallest)

    possible = [micro_batch_sizes(num_samples, other, smallest) for other in range(smallest, num_samples)]
    uneven = [cut for cut in possible if len(set(cut)) > 1 and min(cut) >= smallest]
    assert min(sizes) >= smallest
    assert len(set(sizes)) > 1 or not uneven
    assert len(sizes) > 1 or num_samples < 2 * smallest


def test_batch_norm_is_held_to_no_bound():
    found = compare_steps(tiny_task(model=lambda: network(norm=True)), micro_batch_size=8)

    assert found.exactness == "approximate"
    assert found.difference > MAX_DIFFERENCE["float64"]
    assert found.within


def test_an_exact_run_ends_where_the_direct_one_does():
    task = tiny_task()
    result = Run(task, micro_batch_size=5).train()

    found = compare_runs(task, result.metrics, micro_batch_size=5)

    assert found.gradient_difference < 1e-5
    assert found.direct["loss"] == pytest.approx(result.metrics["loss"], rel=1e-3)


def test_a_run_with_batch_norm_differs_and_is_told():
    task = tiny_task(model=lambda: network(norm=True))

    found = compare_runs(task, {"accuracy": 0.0, "loss": 9.0}, micro_batch_size=4)

    assert found.gradient_difference > 1e-3
    assert not found.within


@pytest.mark.parametrize(("accuracy", "within"), [(0.9049, True), (0.9, True), (0.8949, False), (0.906, False)])
def test_accuracies_may_differ_by_half_a_point(accuracy, within):
    found = RunsComparison(0.1, "weight", cut={"accuracy": accuracy, "loss": 1}, direct={"accuracy": 0.9, "loss": 2})

    assert found.within == within


def test_the_direct_peak_is_larger():
    task = tiny_task(model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 500), torch.nn.Linear(500, 3)))
    run = Run(task, micro_batch_size=2)
    list(run.steps(2))

    assert direct_peak_bytes(task) > run.peak_bytes


def test_every_kind_of_loss_has_a_direct_value():
    one = torch.tensor(1.0)
    terms = {"a": one, "b": bb.Ratio(3 * one, 2.0), "c": bb.Sum(4 * one), "d": bb.Constant(5 * one)}

    assert float(plain_loss(terms)) == 1 + 1.5 + 4 + 5
    assert float(plain_loss(tuple(terms.values()))) == 11.5
