from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.training.data import LogicalBatches
from bigbatch.training.preflight import preflight
from tests.training.tiny import network, tiny_task


def sgd(learning_rate):
    return lambda model: torch.optim.SGD(model.parameters(), lr=learning_rate)


def check_of(found, name):
    return next(check for check in found.checks if check.name == name)


def test_a_healthy_task_may_go():
    found = preflight(tiny_task(max_grad_norm=5.0), num_steps=50, memory_budget="1GiB")

    assert found.go
    assert found.num_steps == 50
    names = "memory, budget; memory, expectation; skipped steps; loss falls; gradient norms; clipping; step time"
    assert [check.name for check in found.checks] == names.split("; ")
    assert {check.verdict for check in found.checks[:-1]} == {"ok"}


@pytest.mark.parametrize("learning_rate", [1e6, 30.0])
def test_a_learning_rate_that_is_too_high_is_found(learning_rate):
    found = preflight(tiny_task(optimizer=sgd(learning_rate)), num_steps=50)

    assert not found.go
    assert any("lower the learning rate" in check.advice.lower() for check in found.checks if check.verdict == "wrong")


def test_a_loss_that_is_not_finite_is_told_with_its_step():
    def overflowing(model, batch):
        return (model(batch[0]) * 1e30).square().mean()

    found = preflight(tiny_task(loss_fn=overflowing))

    assert not found.go
    assert "step 1 is not finite (the term 'loss'" in check_of(found, "loss").found


def test_a_budget_that_nothing_fits_in_is_found():
    found = preflight(tiny_task(), memory_budget="2kB")

    assert not found.go
    assert "No plan fits in 1.95 KiB" in check_of(found, "memory, budget").found


def test_a_later_step_over_the_budget_is_found():
    """The first batch is of short samples, so it tells too little."""
    order = []

    def growing(samples):
        order.append(len(samples))
        width = 2 if len(order) < 40 else 2000
        return torch.ones(len(samples), width), torch.zeros(len(samples), dtype=torch.long)

    def loss_fn(model, batch):
        wide = batch[0].expand(16, *batch[0].shape) * model[0].weight.sum()
        return model(batch[0][:, :2]).square().mean() + wide.square().mean()

    found = preflight(tiny_task(collate=growing, loss_fn=loss_fn, train_data=lambda: [0] * 32), memory_budget="150kB")

    assert check_of(found, "memory, budget").verdict == "wrong"
    assert check_of(found, "memory, expectation").verdict == "wrong"


def _of_its_length(samples):
    return torch.ones(len(samples), max(samples), 2)


def test_later_batches_of_longer_samples_are_no_reason_to_stop():
    """Nothing is wrong with lengths that differ, and with no budget nothing is exceeded."""
    order = LogicalBatches(60, batch_size=4, epochs=1, seed=0)
    (_, first), *_ = order
    lengths = [5 if index in first else 500 for index in range(60)]
    task = tiny_task(
        train_data=lambda: lengths,
        collate=_of_its_length,
        loss_fn=lambda model, batch: model(batch).square().mean(),
        eval_data=None,
        batch_size=4,
    )
    found = preflight(task, num_steps=12)

    assert check_of(found, "memory, expectation").verdict == "look"
    assert "Later batches need more" in check_of(found, "memory, expectation").advice
    assert "memory, expectation" not in [check.name for check in found.checks if check.verdict == "wrong"]


def test_what_is_kept_from_step_to_step_is_found():
    """Control: the first batch itself needs more after the steps than before."""

    class Keeping(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 3))
            self.seen = torch.zeros(0)

        def forward(self, input):
            self.seen = torch.cat([self.seen, torch.zeros(1000)])
            return super().forward(input)

    found = preflight(tiny_task(model=Keeping), num_steps=12)

    assert check_of(found, "memory, expectation").verdict == "wrong"
    assert "Something is kept from step to step" in check_of(found, "memory, expectation").advice
    assert not found.go


def test_gradients_of_zero_are_found():
    found = preflight(tiny_task(loss_fn=lambda model, batch: (model(batch[0]) * 0).sum()), num_steps=20)

    assert check_of(found, "gradient norms").verdict == "wrong"
    assert "All are zero" in check_of(found, "gradient norms").advice


def test_a_loss_that_stays_is_looked_at_and_no_reason_to_stop():
    found = preflight(tiny_task(optimizer=sgd(1e-9)), num_steps=30)

    assert found.go
    assert check_of(found, "loss falls").verdict == "look"


def test_clipping_of_nearly_every_step_is_looked_at():
    found = preflight(tiny_task(max_grad_norm=1e-3), num_steps=20)

    assert check_of(found, "clipping").verdict == "look"
    assert check_of(found, "clipping").found == "100% of the steps over 0.001"


def test_many_skipped_steps_are_found():
    calls = []

    def often_nan(model, batch):
        calls.append(1)
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * float("nan") if len(calls) % 3 == 0 else loss

    found = preflight(tiny_task(loss_fn=often_nan, on_non_finite="skip"), num_steps=30)

    assert check_of(found, "skipped steps").verdict == "wrong"


def test_steps_that_get_slower_are_looked_at():
    calls = []

    def slower(model, batch):
        calls.append(1)
        time.sleep(0.0005 * len(calls))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    found = preflight(tiny_task(loss_fn=slower), num_steps=20)

    assert check_of(found, "step time").verdict == "look"


def test_it_needs_some_steps():
    with pytest.raises(bb.OptionError, match="A pre-flight of 3 steps tells nothing; it needs at least 10"):
        preflight(tiny_task(), num_steps=3)


def test_the_schedule_is_that_of_the_run():
    told = []

    def scheduler(optimizer, total_steps):
        told.append(total_steps)
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

    preflight(tiny_task(scheduler=scheduler, epochs=25), num_steps=10)
    preflight(tiny_task(scheduler=scheduler, epochs=1), num_steps=10)

    assert told == [100, 12]


def test_how_far_batch_norm_turns_the_gradient_is_measured():
    found = preflight(tiny_task(model=lambda: network(norm=True)), num_steps=10, micro_batch_size=2)

    check = check_of(found, "BatchNorm")
    assert check.verdict == "look"
    assert re.match(r'under batch_norm="merge" the gradient of 8 samples .* has a cosine of 0\.\d\d\d to', check.found)
    assert 'batch_norm="exact"' in check.advice
    assert found.go == all(other.verdict != "wrong" for other in found.checks), "It is no reason to stop."


@pytest.mark.parametrize("options", [dict(batch_norm="exact"), dict(model=network)], ids=["exact", "no BatchNorm"])
def test_where_the_step_is_exact_there_is_no_such_check(options):
    found = preflight(tiny_task(**{"model": lambda: network(norm=True), **options}), num_steps=10, micro_batch_size=2)

    assert "BatchNorm" not in [check.name for check in found.checks]
