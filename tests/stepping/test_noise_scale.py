"""The gradient noise scale, on a problem whose gradient covariance is known, and beside what is written out by hand."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

import bigbatch as bb

NUM_PARAMETERS = 200
STEPS = 200
TRACE = 112.0  # of the covariance
SIGNAL = TRACE / 136  # squared length of the true gradient; the noise scale is 136


class Linear(nn.Module):
    """Its loss is the mean of ``z @ weight``, so the gradient of a sample is its ``z``."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(NUM_PARAMETERS // 4).double())
        self.rest = nn.Parameter(torch.randn(NUM_PARAMETERS - NUM_PARAMETERS // 4).double())

    def forward(self, z):
        return z @ torch.cat([self.first, self.rest])


def samples(num_samples):
    deviations = torch.linspace(0.2, 1.0, NUM_PARAMETERS).double()
    deviations *= (TRACE / deviations.square().sum()).sqrt()
    true = torch.full((NUM_PARAMETERS,), math.sqrt(SIGNAL / NUM_PARAMETERS)).double()
    return true + torch.randn(num_samples, NUM_PARAMETERS).double() * deviations


def clear_samples(num_samples):
    """With so much signal that a few of them show it."""
    return samples(num_samples) + 0.5


def mean(model, z):
    return model(z).mean()


def step_of(loss_fn=mean, model=None, lr=0.0, **options):
    model = model or Linear()
    return bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=lr), **{"noise_scale": True, **options})


def equal_size_formula(batches):
    """What is usually written: micro-batches of one size, the mean of them."""
    noise = signal = 0.0
    for parts in batches:
        small, size = sum(part.mean(0).square().sum() for part in parts) / len(parts), sum(map(len, parts))
        large = torch.cat(parts).mean(0).square().sum()
        one_noise = (small - large) / (len(parts) / size - 1 / size)
        noise, signal = noise + one_noise, signal + large - one_noise / size
    return float(noise / signal)


def by_hand(batches):
    """The estimator written out with the gradients themselves: unbiased for any sizes."""
    noise = signal = 0.0
    for parts in batches:
        size, whole = sum(map(len, parts)), torch.cat(parts).mean(0).square().sum()
        parts_sum = sum(len(part) / size * part.mean(0).square().sum() for part in parts)
        one_noise = size / (len(parts) - 1) * (parts_sum - whole)
        noise, signal = noise + one_noise, signal + whole - one_noise / size
    return float(noise / signal)


@pytest.mark.parametrize("sizes", [(32, 32, 32, 32), (32, 32, 32, 1)])
def test_noise_scale_is_the_known_one_within_5_percent(sizes):
    step = step_of()
    batches = [samples(sum(sizes)).split(list(sizes)) for _ in range(STEPS)]

    result = [step(bb.LogicalBatch(list(parts))) for parts in batches][-1]

    assert float(result.noise_scale) == pytest.approx(136, rel=0.05)
    assert step.noise_scale.value == float(result.noise_scale)
    if len(set(sizes)) > 1:  # control: the formula for equal sizes is far outside
        assert abs(equal_size_formula(batches) / 136 - 1) > 0.4


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (5, 1), (3, 2, 2, 1, 1)])
def test_it_is_the_estimator_written_out(sizes):
    step = step_of()
    batches = [clear_samples(sum(sizes)).split(list(sizes)) for _ in range(7)]

    result = [step(bb.LogicalBatch(list(parts))) for parts in batches][-1]

    assert float(result.noise_scale) == pytest.approx(by_hand(batches), rel=1e-10)


def ratio(model, z):
    return bb.Ratio(model(z).sum(), len(z))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(max_grad_norm=1e-3),
        dict(loss_fn=ratio),
        dict(precision=torch.amp.GradScaler("cpu", init_scale=1024.0)),
        dict(weight=lambda z: len(z)),
    ],
    ids=["plain", "clipped", "ratio", "scaled", "weighed"],
)
def test_loss_scale_clipping_and_late_denominators_do_not_show(options):
    step = step_of(**options)
    batches = [clear_samples(12).split(5) for _ in range(3)]

    result = [step(bb.LogicalBatch(list(parts))) for parts in batches][-1]

    expected = by_hand(batches)
    tolerance = 0.05 if "precision" in options else 1e-6  # the forward of a scaled loss runs in float16
    assert float(result.noise_scale) == pytest.approx(expected, rel=tolerance)


def test_the_update_is_not_changed_by_measuring():
    found = []
    for noise_scale in (False, True):
        torch.manual_seed(3)
        step = step_of(lr=0.1, noise_scale=noise_scale, micro_batch_size=5, max_grad_norm=1.0)
        result = [step(samples(12)) for _ in range(3)][-1]
        found.append(torch.cat([p.detach() for p in step.model.parameters()]))
        assert (result.noise_scale is not None) == noise_scale

    assert torch.equal(*found)
    assert not any(p._backward_hooks for p in step.model.parameters())


def test_a_parameter_that_no_optimizer_has_does_not_count():
    model = Linear()
    optimizer = torch.optim.SGD([model.rest], lr=0.0)
    step = bb.Step(model, mean, optimizer, noise_scale=True)
    parts = clear_samples(12).split(4)

    result = step(bb.LogicalBatch(list(parts)))

    assert float(result.noise_scale) == pytest.approx(by_hand([[part[:, 50:] for part in parts]]), rel=1e-10)


def test_tied_parameters_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(NUM_PARAMETERS, 1, bias=False, dtype=torch.float64)
            self.b = self.a

        def forward(self, z):
            return (self.a(z) + self.b(z)).squeeze(1) / 2

    step, parts = step_of(model=Tied()), clear_samples(12).split(4)

    assert float(step(bb.LogicalBatch(list(parts))).noise_scale) == pytest.approx(by_hand([parts]), rel=1e-10)


def test_one_micro_batch_says_that_it_needs_two(caplog):
    step = step_of()
    with caplog.at_level(logging.WARNING):
        first, second = step(samples(8)), step(samples(8))

    assert first.noise_scale is None
    assert second.noise_scale is None
    assert [record.message for record in caplog.records if "it takes two" in record.message] == caplog.messages
    assert len(caplog.messages) == 1
    measured = step(bb.LogicalBatch(list(samples(8).split(4))))
    assert measured.noise_scale is not None
    assert float(step(samples(8)).noise_scale) == float(measured.noise_scale)


def test_a_skipped_step_does_not_count():
    step = step_of(micro_batch_size=4, on_non_finite="skip")
    step(samples(12))
    before = step.state_dict()["noise_scale"]

    result = step(torch.full((12, NUM_PARAMETERS), torch.nan).double())

    assert result.skipped
    assert step.state_dict()["noise_scale"] == before
    step(samples(12))
    assert step.state_dict()["noise_scale"]["num_steps"] == 2


def test_a_step_that_was_finished_in_two_attempts_does_not_count():
    runs_out = [False, True, False, False]

    def short_of_memory(model, z):
        if runs_out and runs_out.pop(0):
            raise torch.OutOfMemoryError("out of memory")
        return mean(model, z)

    step = step_of(short_of_memory, micro_batch_size=6)

    assert step(samples(12)).retries == 1
    assert step.state_dict()["noise_scale"]["num_steps"] == 0
    parts = clear_samples(12).split(3)
    result = step(torch.cat(parts))
    assert result.micro_batch_sizes == (3, 3, 3, 3)
    assert float(result.noise_scale) == pytest.approx(by_hand([parts]), rel=1e-10)


def test_a_step_that_fails_after_it_was_measured_does_not_count():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no")

    model = Linear()
    step = bb.Step(model, mean, Fails(model.parameters(), lr=0.0), micro_batch_size=4, noise_scale=True)

    with pytest.raises(ValueError, match="no"):
        step(samples(12))

    assert step.noise_scale.value is None


def test_a_run_that_goes_on_has_the_same_averages():
    step, other = step_of(micro_batch_size=5), step_of(micro_batch_size=5)
    step(samples(12))
    other.load_state_dict(step.state_dict())
    batch = samples(12)

    assert float(step(batch).noise_scale) == float(other(batch).noise_scale)
    with pytest.raises(bb.OptionError, match="noise_scale"):
        step_of(noise_scale=False).load_state_dict(step.state_dict())
    with pytest.raises(bb.OptionError, match="noise_scale="):
        step.load_state_dict({**step.state_dict(), "noise_scale": {"noise": 1.0}})


def test_json_holds_it_and_infinity_where_the_signal_is_lost():
    step = step_of(micro_batch_size=1)
    z = samples(2)
    z[1] = -z[0]

    result = step(z)

    assert math.isinf(float(result.noise_scale))
    assert math.isinf(bb.StepResult.from_json(result.to_json()).noise_scale)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda m, z: {"a": m(z).mean(), "b": bb.Constant(m.first.square().sum())},
        lambda m, z: {"a": bb.Ratio(m(z).sum(), len(z)), "b": bb.Ratio(m(z).sum(), 2 * len(z))},
    ],
    ids=["constant", "two ratios"],
)
def test_a_loss_whose_parts_cannot_be_told_apart_is_refused_and_nothing_moved(loss_fn):
    step = step_of(loss_fn, lr=0.1, micro_batch_size=4)
    before = [p.detach().clone() for p in step.model.parameters()]

    with pytest.raises(bb.LossError, match="noise_scale=True needs"):
        step(samples(12))

    assert all(torch.equal(p, was) for p, was in zip(step.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in step.model.parameters())


def test_accumulate_has_no_such_option():
    with pytest.raises(bb.OptionError, match="noise_scale"):
        bb.accumulate(Linear(), mean, samples(4), noise_scale=True)
