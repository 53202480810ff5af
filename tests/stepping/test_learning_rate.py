"""The learning rate and the length of the schedule when the batch size changes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader

import bigbatch as bb


def optimizer_with(*rates: float, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    """One parameter in each group."""
    return kind([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=99.0)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def scale(
    optimizer: torch.optim.Optimizer, from_batch_size: int = 64, to_batch_size: int = 256, **how
) -> LambdaLR | None:
    return bb.scale_learning_rate(optimizer, from_batch_size=from_batch_size, to_batch_size=to_batch_size, **how)


# ----- scale_learning_rate


@pytest.mark.parametrize(
    ("rule", "from_batch_size", "to_batch_size", "factor"),
    [
        ("linear", 64, 256, 4.0),
        ("sqrt", 64, 256, 2.0),
        ("linear", 256, 64, 0.25),
        ("sqrt", 256, 64, 0.5),
        ("linear", 32, 48, 1.5),
        ("sqrt", 32, 48, math.sqrt(1.5)),
        ("linear", 7, 7, 1.0),
        ("sqrt", 1, 3, math.sqrt(3)),
    ],
)
def test_every_group_is_scaled(rule, from_batch_size, to_batch_size, factor):
    optimizer = optimizer_with(0.1, 0.003)

    assert scale(optimizer, from_batch_size, to_batch_size, rule=rule) is None

    assert rates(optimizer) == pytest.approx([0.1 * factor, 0.003 * factor], rel=1e-15)


def test_the_default_is_the_square_root():
    optimizer = optimizer_with(0.1, kind=torch.optim.AdamW)

    scale(optimizer)

    assert rates(optimizer) == [0.2]


def test_nothing_else_is_scaled():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.01, betas=(0.8, 0.9))

    scale(optimizer, rule="linear")

    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.4, 0.01, (0.8, 0.9))


def test_a_rate_that_is_a_tensor_stays_one():
    """Optimizers that are captured or compiled want it."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1), foreach=False)

    scale(optimizer)

    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert rates(optimizer) == pytest.approx([0.2])


def test_a_schedule_made_afterwards_begins_at_the_new_rate():
    optimizer = optimizer_with(0.1)

    scale(optimizer, rule="linear")
    scheduler = CosineAnnealingLR(optimizer, T_max=10)

    assert scheduler.base_lrs == [0.4]


def test_what_a_scheduler_has_remembered_is_scaled_too():
    """Else a schedule made anew, as after a restart, would begin at the old rate."""
    optimizer = optimizer_with(0.1)
    CosineAnnealingLR(optimizer, T_max=10)

    scale(optimizer, rule="linear")

    assert LambdaLR(optimizer, lambda step: 1.0).base_lrs == [0.4]


def test_a_list_of_one_optimizer_is_one():
    optimizer = optimizer_with(0.1)

    bb.scale_learning_rate([optimizer], from_batch_size=1, to_batch_size=4)

    assert rates(optimizer) == [0.2]


# ----- warm-up


def walk(optimizer: torch.optim.Optimizer, scheduler: LambdaLR, num_steps: int) -> list[float]:
    """The rate of each optimizer step."""
    found = []
    for _ in range(num_steps):
        found.append(rates(optimizer)[0])
        optimizer.step()
        scheduler.step()
    return found


def test_a_warm_up_rises_to_the_new_rate_and_stays():
    optimizer = optimizer_with(0.1)

    scheduler = scale(optimizer, rule="linear", warmup_steps=4)

    assert scheduler is not None
    assert walk(optimizer, scheduler, 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_the_first_step_of_a_warm_up_already_moves():
    """Control: a warm-up from 0 wastes a step."""
    optimizer = optimizer_with(1.0)

    scheduler = scale(optimizer, 1, 1, warmup_steps=10)

    assert scheduler is not None
    assert rates(optimizer) == [0.1]


def test_a_warm_up_of_one_step_is_none():
    optimizer = optimizer_with(0.1)

    scheduler = scale(optimizer, warmup_steps=1)

    assert scheduler is not None
    assert walk(optimizer, scheduler, 3) == pytest.approx([0.2, 0.2, 0.2])


def test_a_warm_up_goes_into_a_step():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = scale(optimizer, rule="linear", warmup_steps=2)
    step = bb.Step(model, lambda m, b: m(b).square().mean(), optimizer, micro_batch_size=2, scheduler=scheduler)
    found = []

    for _ in range(3):
        found.append(rates(optimizer)[0])
        step(torch.randn(6, 3))

    assert found == pytest.approx([0.2, 0.4, 0.4]), "once per optimizer step, not per micro-batch"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(rule="cubic"), 'rule=\'cubic\'; it is "linear" .*SGD.* or "sqrt" .*Adam'),
        (dict(rule=None), "rule=None"),
        (dict(from_batch_size=0), "from_batch_size=0; it is a whole number of at least 1"),
        (dict(to_batch_size=-1), "to_batch_size=-1"),
        (dict(to_batch_size=2.5), "to_batch_size=2.5"),
        (dict(warmup_steps=-1), "warmup_steps=-1"),
        (dict(warmup_steps=1.5), "warmup_steps=1.5"),
        (dict(warmup_steps=None), "warmup_steps=None"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_scaled(how, message):
    optimizer = optimizer_with(0.1)

    with pytest.raises(bb.OptionError, match=message):
        scale(optimizer, **how)

    assert rates(optimizer) == [0.1]


# ----- total_steps


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "how", "wanted"),
    [
        (1797, 512, {}, 4),
        (1797, 512, dict(epochs=3), 12),
        (1797, 512, dict(drop_last=True), 3),
        (1797, 512, dict(drop_last=True, epochs=3), 9),
        (1024, 512, {}, 2),
        (1024, 512, dict(drop_last=True), 2),
        (1, 512, {}, 1),
        (512, 512, dict(drop_last=True), 1),
        (10, 1, {}, 10),
    ],
)
def test_steps_of_a_run(num_samples, batch_size, how, wanted):
    assert bb.total_steps(num_samples, batch_size, **how) == wanted


def test_samples_over_all_epochs_do_not_tell_the_steps():
    """Control: each epoch ends with a batch of its own."""
    assert bb.total_steps(10, 4, epochs=3) == 9
    assert math.ceil(3 * 10 / 4) == 8


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 3), st.booleans())
def test_steps_are_the_batches_of_a_loader(num_samples, batch_size, epochs, drop_last):
    per_epoch = len(DataLoader(range(num_samples), batch_size=batch_size, drop_last=drop_last))

    if per_epoch == 0:
        with pytest.raises(bb.OptionError, match=f"{num_samples} samples are fewer than a batch of {batch_size}"):
            bb.total_steps(num_samples, batch_size, epochs=epochs, drop_last=drop_last)
    else:
        assert bb.total_steps(num_samples, batch_size, epochs=epochs, drop_last=drop_last) == per_epoch * epochs


def test_a_schedule_of_that_many_steps_ends_with_the_run():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=bb.total_steps(10, 4, epochs=2)
    )
    step = bb.Step(model, lambda m, b: m(b).square().mean(), optimizer, micro_batch_size=3, scheduler=scheduler)
    data = torch.randn(10, 3)

    for _ in range(2):
        for batch in data.split(4):
            assert rates(optimizer)[0] > 0
            step(batch)

    assert rates(optimizer) == pytest.approx([0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10", 2), "num_samples='10'"),
        ((10.0, 2), "num_samples=10.0"),
        ((0, 2), "num_samples=0"),
        ((10, 0), "batch_size=0"),
        ((10, None), "batch_size=None"),
        ((10, True), "batch_size=True"),
    ],
)
def test_what_are_no_sizes_is_refused(arguments, message):
    with pytest.raises(bb.OptionError, match=f"{message}; it is a whole number of at least 1"):
        bb.total_steps(*arguments)
