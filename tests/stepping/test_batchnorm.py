"""BatchNorm in a step: its running statistics are those of the whole batch, updated once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.reference import assert_same_gradients, gradient_error, gradients

# A mean over the batch, and one over means of its parts, differ in the last digit or two of float64.
TOLERANCE = 1e-15
CHANNELS = 3
Inputs = list[Tensor]


def inputs(num_dims: int, num_samples: int, num_steps: int = 3, mean: float = 0.5) -> Inputs:
    """One tensor a step, ``(N, C)``, ``(N, C, 4)``, ...; channels and samples differ: no part is like another."""
    generator = torch.Generator().manual_seed(num_samples)
    shape = num_samples, CHANNELS, *(4, 3, 2)[:num_dims]
    found = []
    for step in range(num_steps):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) + mean + step
        drift = torch.linspace(-2, 2, num_samples, dtype=torch.float64)
        found.append(
            x * torch.tensor([1.0, 3.0, 0.2]).view(-1, *[1] * num_dims) + drift.view(-1, *[1] * (num_dims + 1))
        )
    return found


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Differs for each sample and channel, so that no gradient is zero by symmetry."""
    return model(x).flatten(1).sin().square().sum(1).mean()


class Scaled(nn.Module):
    """A parameter after the norm, so that there is something to train whatever the norm is."""

    def __init__(self, *norms: nn.Module):
        super().__init__()
        self.norm = nn.Sequential(*norms)
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale


def run_steps(model: nn.Module, batches: Inputs, micro_batch_size: int | None, **options: Any) -> bb.Step:
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    step.micro_batch_size = micro_batch_size
    for batch in batches:
        step(batch)
    return step


def run_big_batches(model: nn.Module, batches: Inputs) -> None:
    """Plain torch: one forward and backward of the whole batch for each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()


def run_by_hand(model: nn.Module, batches: Inputs, micro_batch_size: int) -> None:
    """Plain torch in micro-batches: K updates of the running statistics for each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.split(micro_batch_size):
            (loss_fn(model, part) * (len(part) / len(batch))).backward()
        optimizer.step()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(("running_mean", "running_var"))}


def statistics_error(found: nn.Module, expected: nn.Module) -> float:
    """Largest distance of a running statistic, relative to its own size."""
    pairs = zip(statistics(found).values(), statistics(expected).values(), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)) for a, b in pairs)


def counts(model: nn.Module) -> list[int]:
    return [int(buffer) for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")]


LAYERS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


@pytest.mark.parametrize("momentum", [0.1, 0.7, 1.0, None, 0.0])
@pytest.mark.parametrize("micro_batch_size", [3, 4, 7, 10, 99])
@pytest.mark.parametrize("num_dims", [0, 1, 2, 3])
def test_running_statistics_are_those_of_the_big_batch(num_dims, micro_batch_size, momentum):
    layer = LAYERS[max(num_dims - 1, 0)](CHANNELS, momentum=momentum).double()
    ours, truth = Scaled(layer), copy.deepcopy(Scaled(layer))
    batches = inputs(num_dims, 21)

    run_steps(ours, batches, micro_batch_size)
    run_big_batches(truth, batches)

    assert statistics_error(ours, truth) <= TOLERANCE
    if momentum != 0:
        assert counts(ours) == counts(truth) == [3]


def test_with_momentum_zero_the_batches_are_counted_all_the_same():
    ours = Scaled(nn.BatchNorm1d(CHANNELS, momentum=0.0)).double()

    run_steps(ours, inputs(1, 12), 4)

    assert counts(ours) == [3]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("policy", ["merge", "exact"])
def test_a_layer_that_counts_no_batches_does_as_torch_does(policy, momentum):
    """A cumulative average needs the count, and without it torch leaves the statistics as they are."""
    layer = nn.BatchNorm1d(CHANNELS, momentum=momentum).double()
    layer.num_batches_tracked = None
    ours, truth = Scaled(layer), copy.deepcopy(Scaled(layer))
    batches = inputs(1, 21)

    run_steps(ours, batches, 4, batch_norm=policy)
    run_big_batches(truth, batches)

    assert statistics_error(ours, truth) <= 1e-14
    assert counts(ours) == counts(truth)
    assert torch.equal(layer.running_mean, torch.zeros_like(layer.running_mean)) == (momentum is None)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_update_for_each_micro_batch_is_far_outside(momentum):
    """Control: what torch does by itself."""
    layer = nn.BatchNorm1d(CHANNELS, momentum=momentum).double()
    by_hand, truth = Scaled(layer), copy.deepcopy(Scaled(layer))
    batches = inputs(1, 21)

    run_by_hand(by_hand, batches, 4)
    run_big_batches(truth, batches)

    assert statistics_error(by_hand, truth) > 1e-2
    assert counts(by_hand) == [18]


@pytest.mark.parametrize("options", [dict(affine=False), dict(eps=0.1), dict(track_running_stats=False)], ids=str)
def test_layers_of_other_kinds(options):
    layer = nn.BatchNorm2d(CHANNELS, **options).double()
    ours, truth = Scaled(layer), copy.deepcopy(Scaled(layer))
    batches = inputs(2, 10)

    step = run_steps(ours, batches, 4)
    run_big_batches(truth, batches)

    if layer.track_running_stats:
        assert statistics_error(ours, truth) <= TOLERANCE
    assert counts(ours) == counts(truth)
    assert step(batches[0]).exactness == "approximate"


class CalledThreeTimes(nn.Module):
    """One layer for three inputs of different sizes, as in a shared head."""

    def __init__(self, momentum: float | None = 0.1):
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS, momentum=momentum).double()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.norm(x), self.norm(x[:, :, 1:] * 3 + 1), self.norm(x[:, :, :2] - 2)
        return torch.cat([part.flatten(1) for part in parts], 1)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_called_three_times_is_updated_three_times(momentum):
    ours = CalledThreeTimes(momentum)
    truth, by_hand = copy.deepcopy(ours), copy.deepcopy(ours)
    batches = inputs(1, 11)

    run_steps(ours, batches, 3)
    run_big_batches(truth, batches)
    run_by_hand(by_hand, batches, 3)

    assert statistics_error(ours, truth) <= TOLERANCE
    assert counts(ours) == counts(truth) == [9]
    assert statistics_error(by_hand, truth) > 1e-2


def test_two_layers_side_by_side_are_both_exact():
    """Neither sees what the other has normalised."""

    class SideBySide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm1d(CHANNELS, momentum=m).double() for m in (0.1, 0.3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([norm(x * (1 + i)) for i, norm in enumerate(self.norms)], 1)

    ours = SideBySide()
    truth, batches = copy.deepcopy(ours), inputs(1, 13)

    run_steps(ours, batches, 5)
    run_big_batches(truth, batches)

    assert statistics_error(ours, truth) <= TOLERANCE


def test_deeper_layers_are_close_and_the_step_says_approximate(caplog):
    """They see what was normalised by micro-batch. Torch's own updates are a hundred times as far off."""

    def deep() -> nn.Module:
        torch.manual_seed(2)
        blocks = [
            nn.Sequential(nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm1d(CHANNELS)) for _ in range(4)
        ]
        return nn.Sequential(*blocks).double()

    ours, truth, by_hand = deep(), deep(), deep()
    batches = [x[torch.randperm(len(x))] for x in inputs(1, 64)]

    step = run_steps(ours, batches, 16)
    run_big_batches(truth, batches)
    run_by_hand(by_hand, batches, 16)

    assert statistics_error(ours, truth) < 0.1 * statistics_error(by_hand, truth)
    assert step(batches[0]).exactness == "approximate"
    assert [r.message.startswith("The step is approximate: BatchNorm") for r in caplog.records] == [True]


def test_a_mean_of_1000_keeps_its_digits_in_float32():
    layer = nn.BatchNorm1d(CHANNELS)
    ours, truth = Scaled(layer).float(), Scaled(copy.deepcopy(layer)).double()
    exact = [x / 100 + 1000 for x in inputs(1, 21, mean=0.0)]
    batches = [x.float() for x in exact]

    run_steps(ours, batches, 4)
    run_big_batches(truth, [x.double() for x in batches])

    assert statistics_error(ours, truth) < 1e-4
    # Control: the sum of squares less the square of the sum, as several libraries do it, has no digit left.
    x = batches[0].transpose(0, 1).flatten(1)
    squares = sum((part.square().sum(1) for part in x.split(16, 1)), start=torch.zeros(CHANNELS))
    by_sums = squares / x.shape[1] - (x.sum(1) / x.shape[1]).square()
    assert float((by_sums - x.double().var(1, unbiased=False)).norm() / x.double().var(1).norm()) > 0.1


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_instance_norm_with_running_statistics(momentum, affine):
    """Its statistics are means over the samples; torch never counts its batches."""
    layer = nn.InstanceNorm1d(CHANNELS, momentum=momentum, affine=affine, track_running_stats=True).double()
    ours, truth = Scaled(layer), copy.deepcopy(Scaled(layer))
    by_hand = copy.deepcopy(ours)
    batches = inputs(1, 11)

    step = run_steps(ours, batches, 4)
    run_big_batches(truth, batches)
    run_by_hand(by_hand, batches, 4)

    assert statistics_error(ours, truth) <= TOLERANCE
    assert counts(ours) == counts(truth)
    # A sample is normalised by itself alone, so the gradient is that of the big batch.
    assert step(batches[0]).exactness == "exact"
    if momentum is not None:
        assert statistics_error(by_hand, truth) > 1e-2


def test_half_precision_buffers():
    """The layer itself rounds what it leaves in them."""
    layer = nn.BatchNorm1d(CHANNELS)
    ours, truth = Scaled(layer).bfloat16(), Scaled(copy.deepcopy(layer)).double()
    batches = [x.bfloat16() for x in inputs(1, 21)]

    run_steps(ours, batches, 4)
    run_big_batches(truth, [x.double() for x in batches])

    assert statistics_error(ours, truth) < 1e-2
    assert all(buffer.dtype == torch.bfloat16 for buffer in statistics(ours).values())


def test_under_autocast_the_statistics_are_of_what_the_layer_saw():
    layer = nn.BatchNorm1d(CHANNELS)
    ours, truth = Scaled(layer).float(), Scaled(copy.deepcopy(layer)).float()
    batches = [x.float() for x in inputs(1, 21)]

    run_steps(ours, batches, 4, precision="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_big_batches(truth, batches)

    assert statistics_error(ours, truth) < 1e-6


# Who is left alone


def test_layers_in_eval_mode_are_not_touched():
    model = Scaled(nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS)).double()
    run_big_batches(model, inputs(1, 8))
    model.norm[0].eval()
    before, versions = copy.deepcopy(model), [buffer._version for buffer in model.norm[0].buffers()]

    run_steps(model, inputs(1, 8), 3)

    for name, buffer in model.norm[0].named_buffers():
        assert torch.equal(buffer, before.norm[0].get_buffer(name))
    assert [buffer._version for buffer in model.norm[0].buffers()] == versions
    assert not torch.equal(model.norm[1].running_mean, before.norm[1].running_mean)


def test_with_all_layers_in_eval_mode_the_step_is_exact():
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    run_big_batches(model, inputs(1, 8))
    model.eval()
    (batch,) = inputs(1, 9, num_steps=1)
    truth = copy.deepcopy(model)
    loss_fn(truth, batch).backward()

    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=4)

    assert result.exactness == "exact"
    assert result.micro_batch_sizes == (4, 4, 1)  # A rest of one is no trouble for them.
    assert_same_gradients(gradients(model), gradients(truth))


class OwnNorm(nn.BatchNorm1d):
    """What it does to its statistics is its own affair: here twice the update that torch makes."""

    def forward(self, input: Tensor) -> Tensor:
        super().forward(input)
        return super().forward(input)


def test_a_subclass_with_a_forward_of_its_own_is_left_alone():
    ours = Scaled(OwnNorm(CHANNELS)).double()
    by_hand, batches = copy.deepcopy(ours), inputs(1, 12)

    run_steps(ours, batches, 4)
    run_by_hand(by_hand, batches, 4)

    assert statistics_error(ours, by_hand) <= TOLERANCE
    assert counts(ours) == counts(by_hand) == [18]


class NamedNorm(nn.BatchNorm1d):
    """A subclass that changes nothing in the forward."""


def test_a_subclass_with_the_forward_of_torch_is_merged():
    ours = Scaled(NamedNorm(CHANNELS)).double()
    truth, batches = copy.deepcopy(ours), inputs(1, 12)

    run_steps(ours, batches, 4)
    run_big_batches(truth, batches)

    assert statistics_error(ours, truth) <= TOLERANCE


def test_sync_batch_norm_is_left_alone():
    """It runs on accelerators only; that a step does not stand in its way is what can be seen here."""
    layer = nn.SyncBatchNorm(CHANNELS).double()
    layer.eval()
    model = Scaled(layer)
    before = copy.deepcopy(model)

    run_steps(model, inputs(1, 12), 4)

    assert statistics_error(model, before) == 0


# Recomputing


class UserCheckpoint(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def recomputed_by_plan(layer: nn.Module) -> nn.Module:
    model = Scaled(nn.Sequential(nn.Tanh(), layer), nn.Tanh())
    bb.apply(bb.Plan(micro_batch_size=4, recompute=("norm.0",)), model)
    return model


def recomputed_as_a_group(layer: nn.Module) -> nn.Module:
    model = Scaled(nn.Tanh(), layer, nn.Tanh())
    bb.apply(bb.Plan(micro_batch_size=4, recompute=(("norm.0", "norm.1"),)), model)
    return model


def recomputed_by_the_user(layer: nn.Module) -> nn.Module:
    return Scaled(UserCheckpoint(nn.Sequential(nn.Tanh(), layer)), nn.Tanh())


RECOMPUTED: list[Callable[[nn.Module], nn.Module]] = [recomputed_by_plan, recomputed_as_a_group, recomputed_by_the_user]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("micro_batch_size", [4, 99])
@pytest.mark.parametrize("make_model", RECOMPUTED)
def test_a_recomputed_layer_is_counted_once(make_model, micro_batch_size, momentum):
    layer = nn.BatchNorm1d(CHANNELS, momentum=momentum).double()
    truth = Scaled(nn.Tanh(), copy.deepcopy(layer), nn.Tanh())
    ours, batches = make_model(layer), inputs(1, 13)
    for p in ours.norm.parameters():
        p.requires_grad_(True)
    # Something before the checkpoint must need a gradient, or nothing would be recomputed.
    batches = [batch.requires_grad_() for batch in batches]

    run_steps(ours, batches, micro_batch_size)
    run_big_batches(truth, batches)

    assert statistics_error(ours, truth) <= TOLERANCE
    assert counts(ours) == counts(truth) == [3]


def test_a_recomputed_layer_without_us_is_counted_twice():
    """Control: https://github.com/pytorch/pytorch/issues/96136."""
    layer = nn.BatchNorm1d(CHANNELS).double()
    truth = Scaled(nn.Tanh(), copy.deepcopy(layer), nn.Tanh())
    theirs, batches = recomputed_by_the_user(layer), inputs(1, 13)

    run_big_batches(theirs, batches)
    run_big_batches(truth, batches)

    assert counts(theirs) == [6]
    assert statistics_error(theirs, truth) > 1e-2


# Weights, failures, other policies


def weighted_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = model(batch["x"]).flatten(1).sin().square().sum(1)
    return (losses * batch["w"]).sum() / batch["w"].sum()


def test_a_micro_batch_of_weight_zero_is_still_seen():
    ours = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    truth, (x,) = copy.deepcopy(ours), inputs(1, 12, num_steps=1)
    w = torch.ones(12, dtype=torch.float64)
    w[4:8] = 0
    batch = dict(x=x, w=w)
    step = bb.Step(
        ours,
        weighted_loss,
        torch.optim.SGD(ours.parameters(), lr=0.1),
        micro_batch_size=4,
        weight=lambda part: part["w"].sum(),
    )

    step(batch)
    weighted_loss(truth, batch)

    assert statistics_error(ours, truth) <= TOLERANCE
    assert counts(ours) == [1]
    without = copy.deepcopy(truth)
    without.norm[0].reset_running_stats()
    without(x[torch.cat([torch.arange(4), torch.arange(8, 12)])])
    assert statistics_error(ours, without) > 1e-2  # Control: as if they had not been there.


def fails_at(index: int, model: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    calls: Iterator[int] = iter(range(100))

    def fails(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_fn(model, x)
        if next(calls) == index:
            raise RuntimeError("as if")
        return loss

    return fails


@pytest.mark.parametrize("policy", ["merge", "native", "frozen"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_after_a_failure_the_buffers_are_as_they_were(index, policy):
    model = nn.Sequential(Scaled(nn.BatchNorm1d(CHANNELS)), Scaled(nn.BatchNorm1d(CHANNELS, momentum=None))).double()
    run_big_batches(model, inputs(1, 12))
    before, ids = copy.deepcopy(model.state_dict()), [id(buffer) for buffer in model.buffers()]
    modes = [module.training for module in model.modules()]

    with pytest.raises(RuntimeError, match="as if"):
        bb.accumulate(model, fails_at(index, model), inputs(1, 12)[0], micro_batch_size=4, batch_norm=policy)

    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [id(buffer) for buffer in model.buffers()] == ids
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_nothing_is_left_on_the_model():
    model = Scaled(nn.BatchNorm1d(CHANNELS), nn.InstanceNorm1d(CHANNELS, track_running_stats=True)).double()
    fresh = copy.deepcopy(model)

    step = run_steps(model, inputs(1, 12), 4)

    for ours, theirs in zip(model.modules(), fresh.modules(), strict=True):
        assert not ours._forward_pre_hooks
        assert not ours._forward_hooks
        assert vars(ours).keys() == vars(theirs).keys()
        assert type(ours) is type(theirs)
    copied = copy.deepcopy(model)
    before = statistics(copied)["norm.0.running_mean"].clone()
    step(inputs(1, 12)[0])
    assert torch.equal(statistics(copied)["norm.0.running_mean"], before)
    assert model.state_dict().keys() == fresh.state_dict().keys()


def test_an_average_has_the_statistics_of_the_step():
    """``AveragedModel`` copies the model when it is made, and its buffers at each update with ``use_buffers``."""
    ours = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    truth, batches = copy.deepcopy(ours), inputs(1, 13)
    average, true_average = (AveragedModel(model, use_buffers=True) for model in (ours, truth))

    run_steps(ours, batches, 5, ema=average)
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(truth, batch).backward()
        optimizer.step()
        true_average.update_parameters(truth)

    found, expected = (statistics(a.module) for a in (average, true_average))
    assert all(torch.allclose(found[name], expected[name], rtol=1e-14, atol=0) for name in expected)
    assert counts(average.module) == counts(true_average.module)


def test_frozen_uses_the_running_statistics_and_is_exact():
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    run_big_batches(model, inputs(1, 12))
    (batch,) = inputs(1, 9, num_steps=1)
    truth, before = copy.deepcopy(model).eval(), copy.deepcopy(model.state_dict())
    loss_fn(truth, batch).backward()

    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=4, batch_norm="frozen")

    assert_same_gradients(gradients(model), gradients(truth))
    assert result.exactness == "exact"
    assert result.micro_batch_sizes == (4, 4, 1)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_frozen_leaves_layers_without_statistics_as_they_are():
    model = Scaled(nn.BatchNorm1d(CHANNELS, track_running_stats=False)).double()
    (batch,) = inputs(1, 9, num_steps=1)

    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=4, batch_norm="frozen")

    assert result.exactness == "approximate"


@pytest.mark.parametrize("micro_batch_size", [3, 4, 12])
def test_native_is_an_update_for_each_micro_batch(micro_batch_size):
    ours = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    by_hand, batches = copy.deepcopy(ours), inputs(1, 12)

    step = run_steps(ours, batches, micro_batch_size, batch_norm="native")
    run_by_hand(by_hand, batches, micro_batch_size)

    assert statistics_error(ours, by_hand) <= TOLERANCE
    assert counts(ours) == counts(by_hand) == [3 * 12 // micro_batch_size]
    assert step(batches[0]).exactness == ("exact" if micro_batch_size == 12 else "approximate")


@pytest.mark.parametrize("policy", ["merge", "native"])
def test_one_micro_batch_is_exact_and_the_gradient_too(policy):
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    truth, (batch,) = copy.deepcopy(model), inputs(1, 9, num_steps=1)
    loss_fn(truth, batch).backward()

    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=9, batch_norm=policy)

    assert result.exactness == "exact"
    assert_same_gradients(gradients(model), gradients(truth))
    assert statistics_error(model, truth) <= TOLERANCE


def test_the_gradient_in_micro_batches_is_not_that_of_the_big_batch():
    """That is why the step says "approximate": merging is about the running statistics alone."""
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    truth, (batch,) = copy.deepcopy(model), inputs(1, 9, num_steps=1)
    loss_fn(truth, batch).backward()

    bb.accumulate(model, loss_fn, batch, micro_batch_size=3)

    assert gradient_error(gradients(model), gradients(truth)) > 1e-2


# The cut


@pytest.mark.parametrize(
    ("num_samples", "micro_batch_size", "sizes"),
    [(9, 4, (3, 3, 3)), (10, 4, (4, 4, 2)), (13, 4, (4, 3, 3, 3)), (8, 4, (4, 4)), (5, 4, (3, 2)), (3, 8, (3,))],
)
def test_a_rest_of_one_is_never_made(num_samples, micro_batch_size, sizes):
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    truth, (batch,) = copy.deepcopy(model), inputs(0, num_samples, num_steps=1)
    loss_fn(truth, batch)

    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=micro_batch_size)

    assert result.micro_batch_sizes == sizes
    assert statistics_error(model, truth) <= TOLERANCE


def test_torch_refuses_a_rest_of_one():
    """Control."""
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        run_by_hand(model, inputs(0, 9), 4)


def test_micro_batches_of_one_are_refused_with_what_to_do():
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(bb.BatchError, match=r"one value per channel.*micro_batch_size of at least 2"):
        bb.accumulate(model, loss_fn, inputs(0, 4)[0], micro_batch_size=1)

    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_micro_batches_of_one_image_have_many_values_per_channel():
    model = Scaled(nn.BatchNorm2d(CHANNELS)).double()
    truth, batches = copy.deepcopy(model), inputs(2, 5)

    run_steps(model, batches, 1)
    run_big_batches(truth, batches)

    assert statistics_error(model, truth) <= TOLERANCE


def test_two_samples_at_a_time_leave_no_cut_for_an_odd_batch():
    """9 samples cannot be cut into pieces of 2: the error says that it is the rest, and what to give."""
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()

    with pytest.raises(bb.BatchError, match="one value per channel.*at least 3"):
        bb.accumulate(model, loss_fn, inputs(0, 9)[0], micro_batch_size=2)


def test_a_model_switched_between_train_and_eval_is_followed():
    model = Scaled(nn.BatchNorm1d(CHANNELS)).double()
    step = run_steps(model, inputs(1, 9), 4)
    model.eval()
    before = copy.deepcopy(model.state_dict())

    evaluated = step(inputs(1, 9)[0])
    buffers_in_eval = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    trained = step(inputs(1, 9)[0])

    assert (evaluated.exactness, trained.exactness) == ("exact", "approximate")
    assert (evaluated.micro_batch_sizes, trained.micro_batch_sizes) == ((4, 4, 1), (3, 3, 3))
    assert all(torch.equal(before[name], buffer) for name, buffer in buffers_in_eval.items())
    assert not torch.equal(model.norm[0].running_mean, before["norm.0.running_mean"])


def test_a_model_that_moves_to_another_dtype_after_the_step_was_made():
    model = Scaled(nn.BatchNorm1d(CHANNELS))
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch_size=4)
    model.double()
    truth, batches = copy.deepcopy(model), inputs(1, 9)

    for batch in batches:
        step(batch)
    run_big_batches(truth, batches)

    assert statistics_error(model, truth) <= TOLERANCE


def test_a_layer_that_joins_the_model_after_the_step_was_made():
    model = Scaled(nn.Identity())
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch_size=4)
    model.norm[0] = nn.BatchNorm1d(CHANNELS).double()
    truth, (batch,) = copy.deepcopy(model), inputs(1, 12, num_steps=1)
    truth(batch)

    result = step(batch)

    assert statistics_error(model, truth) <= TOLERANCE
    assert result.exactness == "approximate"


def test_functional_batch_norm():
    """A functional call on buffers of one's own is not a layer: its buffers change as torch changes them."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(CHANNELS, dtype=torch.float64))
            self.register_buffer("running_var", torch.ones(CHANNELS, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.running_mean, self.running_var, training=True)

    ours = Scaled(Functional())
    by_hand, batches = copy.deepcopy(ours), inputs(1, 12)

    run_steps(ours, batches, 4)
    run_by_hand(by_hand, batches, 4)

    assert statistics_error(ours, by_hand) <= TOLERANCE
