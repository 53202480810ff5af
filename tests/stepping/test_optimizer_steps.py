"""Ten optimizer steps equal those of the big batch: weights, average, learning rates and reported numbers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bigbatch as bb
from tests.models import LOSSES, NETWORKS, NUM_SAMPLES, make_batch
from tests.reference import (
    RecordingSGD,
    assert_same_gradients,
    assert_same_weights,
    big_batch_gradients,
    cut_batch,
    gradient_error,
    gradients,
    micro_batch_sizes,
    train_with_big_batches,
)

NUM_STEPS = 10
MICRO_BATCH_SIZE = 3
TOLERANCE = 1e-10
MAX_GRAD_NORM = 0.05
Optimizers = Sequence[torch.optim.Optimizer]


def sgd_with_momentum(model: nn.Module) -> Optimizers:
    return (torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),)


def adamw_foreach(model: nn.Module) -> Optimizers:
    return (torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),)


def adamw_fused(model: nn.Module) -> Optimizers:
    return (torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),)


def adamw_loop(model: nn.Module) -> Optimizers:
    return (torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False, fused=False),)


def adafactor(model: nn.Module) -> Optimizers:
    return (torch.optim.Adafactor(model.parameters(), lr=0.01),)


def muon_and_adamw(model: nn.Module) -> Optimizers:
    """Matrices by Muon, everything else by AdamW."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


OPTIMIZERS = [sgd_with_momentum, adamw_foreach, adamw_fused, adamw_loop, adafactor, muon_and_adamw]


class OwnAverage:
    """An average of the weights as people write it; ``update`` takes nothing."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.module = copy.deepcopy(model)
        self.num_updates = 0

    def update(self) -> None:
        self.num_updates += 1
        with torch.no_grad():
            for average, parameter in zip(self.module.parameters(), self._model.parameters(), strict=True):
                average.lerp_(parameter, 0.2)


def averaged_model(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


def one_cycle(optimizers: Optimizers) -> list[Any]:
    total_steps = bb.total_steps(NUM_STEPS * NUM_SAMPLES, NUM_SAMPLES)
    return [OneCycleLR(optimizer, max_lr=0.05, total_steps=total_steps) for optimizer in optimizers]


class Run:
    """A model, its batches and all that is around them; the same at every call, for ours and for the big batch's.

    Args:
        make_optimizers: From the model.
        options: Which of clipping, ``"one_cycle"``, ``"averaged_model"`` and ``"own_average"`` take part.
    """

    def __init__(self, make_optimizers: Callable[[nn.Module], Optimizers], options: Sequence[str] = ()):
        # Adafactor divides a gradient by its own size. The true gradient of attention's key bias is zero, and what it
        # would divide there is rounding: two runs of the big batch itself, on other kernels, take other steps.
        self.network = NETWORKS["lstm" if make_optimizers is adafactor else "transformer"]
        self.loss = LOSSES["tokens"]
        self.model = self.network.make()
        self.optimizers = make_optimizers(self.model)
        self.batches = [make_batch(self.network, padded=True, seed=seed) for seed in range(NUM_STEPS)]
        self.max_grad_norm = MAX_GRAD_NORM if "clip" in options else None
        self.schedulers = one_cycle(self.optimizers) if "one_cycle" in options else []
        self.average: Any = None
        if "averaged_model" in options:
            self.average = averaged_model(self.model)
        if "own_average" in options:
            self.average = OwnAverage(self.model)

    def update_average(self) -> None:
        if isinstance(self.average, AveragedModel):
            self.average.update_parameters(self.model)
        elif self.average is not None:
            self.average.update()

    def with_big_batches(self) -> Any:
        return train_with_big_batches(
            self.model,
            self.loss.plain,
            self.batches,
            self.optimizers,
            max_grad_norm=self.max_grad_norm,
            schedulers=self.schedulers,
            update_average=self.update_average,
        )

    def make_step(self, **options: Any) -> bb.Step:
        return bb.Step(
            self.model,
            self.loss.ours,
            self.optimizers if len(self.optimizers) > 1 else self.optimizers[0],
            micro_batch_size=MICRO_BATCH_SIZE,
            max_grad_norm=self.max_grad_norm,
            grad_norm=True,
            scheduler=self.schedulers or None,
            ema=self.average,
            **self.loss.options,
            **options,
        )


COMBINATIONS = [
    (),
    ("clip",),
    ("one_cycle",),
    ("averaged_model",),
    ("own_average",),
    ("clip", "one_cycle", "averaged_model"),
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("make_optimizers", OPTIMIZERS)
def test_ten_steps_equal_those_of_the_big_batch(make_optimizers, options):
    if "one_cycle" in options and make_optimizers in (adafactor, muon_and_adamw):
        options = tuple(
            option for option in options if option != "one_cycle"
        )  # They have no momentum or betas to cycle.
    truth, ours = Run(make_optimizers, options), Run(make_optimizers, options)
    expected = truth.with_big_batches()
    step = ours.make_step()

    learning_rates, results = [], []
    for batch in ours.batches:
        learning_rates.append(ours.optimizers[0].param_groups[0]["lr"])
        results.append(step(batch))

    assert_same_weights(ours.model, truth.model, tolerance=TOLERANCE)
    assert [float(result.loss) for result in results] == pytest.approx(expected.losses, rel=TOLERANCE)
    assert [float(result.grad_norm) for result in results] == pytest.approx(expected.norms, rel=TOLERANCE)
    assert learning_rates == expected.learning_rates
    if ours.average is not None:
        assert_same_weights(ours.average.module, truth.average.module, tolerance=TOLERANCE)
    assert step.num_steps == NUM_STEPS
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    if "clip" in options:
        assert min(expected.norms) > 2 * MAX_GRAD_NORM, "nothing was clipped, so nothing was shown"


@pytest.mark.parametrize("make_optimizers", OPTIMIZERS)
def test_a_gradient_off_by_a_millionth_is_outside_the_tolerance(make_optimizers):
    """Control: optimizers that normalise the gradient would hide a wrong scale, but not a wrong share."""
    truth, wrong = Run(make_optimizers), Run(make_optimizers)
    truth.with_big_batches()

    for batch in wrong.batches:
        parts = cut_batch(batch, micro_batch_sizes(NUM_SAMPLES, MICRO_BATCH_SIZE))
        total = float((batch["labels"] != -100).sum())
        for index, part in enumerate(parts):
            share = float((part["labels"] != -100).sum()) / total
            (wrong.loss.plain(wrong.model, part) * (share * (1 + 1e-6) if index == 0 else share)).backward()
        for optimizer in wrong.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(AssertionError, match="gradient error"):
        assert_same_weights(wrong.model, truth.model, tolerance=TOLERANCE)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("mistake", ["scheduler", "average", "optimizer"])
def test_moving_on_at_every_micro_batch_is_outside_the_tolerance(mistake):
    """Control: the scheduler, the average or the optimizer, once per micro-batch instead of once per step."""
    options = ("one_cycle", "averaged_model")
    truth, wrong = Run(sgd_with_momentum, options), Run(sgd_with_momentum, options)
    truth.with_big_batches()
    (optimizer,) = wrong.optimizers
    if mistake == "scheduler":  # A schedule with room for all of its calls, or it would raise.
        wrong.schedulers = [OneCycleLR(optimizer, max_lr=0.05, total_steps=3 * NUM_STEPS)]

    for batch in wrong.batches:
        parts = cut_batch(batch, micro_batch_sizes(NUM_SAMPLES, MICRO_BATCH_SIZE))
        total = float((batch["labels"] != -100).sum())
        for part in parts:
            is_last = part is parts[-1]
            (wrong.loss.plain(wrong.model, part) * (float((part["labels"] != -100).sum()) / total)).backward()
            if is_last or mistake == "optimizer":
                optimizer.step()
                optimizer.zero_grad()
            if is_last or mistake == "scheduler":
                wrong.schedulers[0].step()
            if is_last or mistake == "average":
                wrong.average.update_parameters(wrong.model)

    with pytest.raises(AssertionError, match="gradient error"):
        assert_same_weights(wrong.average.module, truth.average.module, tolerance=1e-4)


@pytest.mark.parametrize("make_optimizers", OPTIMIZERS)
def test_one_micro_batch_is_the_plain_step_bit_for_bit(make_optimizers):
    """Where nothing is cut there is nothing to round differently: also in float32, without any tolerance."""
    network, loss = NETWORKS["lstm"], LOSSES["tokens"]
    plain, ours = network.make(torch.float32), network.make(torch.float32)
    batches = [make_batch(network, torch.float32, padded=True, seed=seed) for seed in range(NUM_STEPS)]
    train_with_big_batches(plain, loss.plain, batches, make_optimizers(plain))
    step = bb.Step(ours, loss.ours, tuple(make_optimizers(ours)), micro_batch_size=NUM_SAMPLES, **loss.options)

    for batch in batches:
        step(batch)

    for name, tensor in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def discriminator_loss(pair: Pair, batch: dict[str, Tensor]) -> Tensor:
    real, fake = pair.discriminator(batch["real"]), pair.discriminator(pair.generator(batch["noise"]))
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(pair: Pair, batch: dict[str, Tensor]) -> Tensor:
    return F.softplus(-pair.discriminator(pair.generator(batch["noise"]))).mean()


def make_pair() -> tuple[Pair, list[tuple[Any, ...]]]:
    torch.manual_seed(3)
    pair = Pair().double()
    rounds: list[tuple[Any, ...]] = [
        (loss_fn, parameters, torch.optim.AdamW(parameters, lr=0.01, betas=(0.5, 0.9)))
        for loss_fn, parameters in (
            (discriminator_loss, list(pair.discriminator.parameters())),
            (generator_loss, list(pair.generator.parameters())),
        )
    ]
    return pair, rounds


def gan_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "real": torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64) + 1,
            "noise": torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64),
        }
        for _ in range(NUM_STEPS)
    ]


def train_pair(backward: Callable[[Pair, Any, Any, list[nn.Parameter]], None]) -> Pair:
    """Discriminator and generator in turn; each optimizer clears its own parameters only."""
    pair, rounds = make_pair()
    for batch in gan_batches():
        for loss_fn, parameters, optimizer in rounds:
            backward(pair, loss_fn, batch, parameters)
            optimizer.step()
            optimizer.zero_grad()
    return pair


def big_batch_backward(pair: Pair, loss_fn: Any, batch: Any, parameters: list[nn.Parameter]) -> None:
    found = torch.autograd.grad(loss_fn(pair, batch), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def test_a_gan_takes_the_steps_of_the_big_batch():
    def ours(pair: Pair, loss_fn: Any, batch: Any, parameters: list[nn.Parameter]) -> None:
        bb.accumulate(pair, loss_fn, batch, micro_batch_size=MICRO_BATCH_SIZE, parameters=parameters)
        others = {id(parameter) for parameter in pair.parameters()} - {id(parameter) for parameter in parameters}
        assert all(parameter.grad is None for parameter in pair.parameters() if id(parameter) in others)

    assert_same_weights(train_pair(ours), train_pair(big_batch_backward), tolerance=TOLERANCE)


def test_without_parameters_the_gan_gets_gradients_of_the_other_loss():
    """Control: what the discriminator's loss leaves in the generator is added to the generator's own gradient."""

    def all_parameters(pair: Pair, loss_fn: Any, batch: Any, parameters: list[nn.Parameter]) -> None:
        bb.accumulate(pair, loss_fn, batch, micro_batch_size=MICRO_BATCH_SIZE)

    with pytest.raises(AssertionError, match="gradient error"):
        assert_same_weights(train_pair(all_parameters), train_pair(big_batch_backward), tolerance=1e-3)


def overflowing_batches(index: int = 4) -> list[dict[str, Tensor]]:
    """Ten batches for the MLP; one of them is too large for float16 in a few samples."""
    batches = [make_batch(NETWORKS["mlp"], torch.float32, seed=seed) for seed in range(NUM_STEPS)]
    batches[index]["x"][2] *= 1e6
    return batches


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)


class Fp16Run:
    """An MLP in float32 under autocast, with a scaler, a scheduler and an average."""

    def __init__(self) -> None:
        self.model = NETWORKS["mlp"].make(torch.float32)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.average = averaged_model(self.model)
        self.scaler = make_scaler()

    def by_hand(self, batches: list[dict[str, Tensor]]) -> tuple[list[bool], list[float]]:
        """Whether each step was skipped, and the scale after it."""
        skipped, scales = [], []
        for batch in batches:
            before = self.scaler.get_scale()
            parts = cut_batch(batch, micro_batch_sizes(NUM_SAMPLES, MICRO_BATCH_SIZE))
            for part in parts:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = LOSSES["mean"].plain(self.model, part)
                self.scaler.scale(loss * (len(part["x"]) / NUM_SAMPLES)).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            skipped.append(self.scaler.get_scale() < before)
            scales.append(self.scaler.get_scale())
            if not skipped[-1]:
                self.scheduler.step()
                self.average.update_parameters(self.model)
        return skipped, scales

    def make_step(self) -> bb.Step:
        return bb.Step(
            self.model,
            LOSSES["mean"].ours,
            self.optimizer,
            micro_batch_size=MICRO_BATCH_SIZE,
            max_grad_norm=MAX_GRAD_NORM,
            scheduler=self.scheduler,
            ema=self.average,
            precision=self.scaler,
        )


def test_fp16_with_an_overflow_in_the_middle_is_the_loop_written_by_hand():
    theirs, ours = Fp16Run(), Fp16Run()
    expected_skips, expected_scales = theirs.by_hand(overflowing_batches())
    step = ours.make_step()

    skips, scales = [], []
    for batch in overflowing_batches():
        skips.append(step(batch).skipped)
        scales.append(ours.scaler.get_scale())

    assert skips == expected_skips == [index == 4 for index in range(NUM_STEPS)]
    assert scales == expected_scales
    assert scales[3] > scales[0], "the scale grew"
    assert scales[4] < scales[3], "and shrank"
    assert_same_weights(ours.model, theirs.model, tolerance=1e-3)
    assert_same_weights(ours.average.module, theirs.average.module, tolerance=1e-3)
    assert step.num_steps == NUM_STEPS - 1
    assert ours.scheduler.last_epoch == theirs.scheduler.last_epoch == NUM_STEPS - 1
    assert int(ours.average.n_averaged) == NUM_STEPS - 1


def test_fp16_that_takes_the_overflowing_step_is_outside_the_tolerance():
    """Control: the batch that overflows matters; without it the weights are others."""
    theirs, other = Fp16Run(), Fp16Run()
    theirs.by_hand(overflowing_batches(4))
    other.by_hand(overflowing_batches(5))

    with pytest.raises(AssertionError, match="gradient error"):
        assert_same_weights(other.model, theirs.model, tolerance=1e-3)


def test_fp16_by_name_skips_the_same_step():
    """``precision="fp16"`` makes a scaler of its own, with torch's own settings."""
    ours = Fp16Run()
    ours.scaler = "fp16"
    step = ours.make_step()

    skips = [step(batch).skipped for batch in overflowing_batches()]

    assert skips == [index == 4 for index in range(NUM_STEPS)]
    assert step.state_dict()["scaler"]["scale"] == 2.0**15


def test_an_overflow_that_reaches_one_of_two_optimizers_stops_both():
    """A step is one step; a GradScaler of torch alone would skip the one and move the other."""
    torch.manual_seed(7)
    model = nn.ModuleDict(dict(good=nn.Linear(3, 1), bad=nn.Linear(3, 1)))
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("good", "bad")]
    before = copy.deepcopy(model.state_dict())
    scaler = make_scaler()

    def loss_fn(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        return dict(good=model["good"](x).square().mean(), bad=model["bad"](x * 1e5).square().mean())

    step = bb.Step(model, loss_fn, optimizers, micro_batch_size=2, precision=scaler)
    result = step(torch.randn(6, 3))

    assert result.skipped
    assert step.num_steps == 0
    assert scaler.get_scale() == 2.0**11
    assert_identical(dict(model.state_dict()), dict(before))


def test_bf16_autocast_is_the_loop_written_by_hand():
    theirs, ours = Fp16Run(), Fp16Run()
    batches = [make_batch(NETWORKS["mlp"], torch.float32, seed=seed) for seed in range(NUM_STEPS)]
    for batch in batches:
        for part in cut_batch(batch, micro_batch_sizes(NUM_SAMPLES, MICRO_BATCH_SIZE)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = LOSSES["mean"].plain(theirs.model, part)
            (loss * (len(part["x"]) / NUM_SAMPLES)).backward()
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()

    step = bb.Step(ours.model, LOSSES["mean"].ours, ours.optimizer, micro_batch_size=MICRO_BATCH_SIZE, precision="bf16")
    for batch in batches:
        step(batch)

    # One product is rounded at another place: the share is multiplied before or after the cast to bfloat16.
    assert_same_weights(ours.model, theirs.model, tolerance=1e-2)
    assert all(parameter.dtype == torch.float32 for parameter in ours.model.parameters())


def bf16_regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """256 samples whose gradients point the same way: the worst case for adding up in bfloat16."""
    torch.manual_seed(20)
    model = nn.Linear(8, 4).bfloat16()
    return model, ((torch.rand(256, 8) + 0.5).bfloat16(), torch.full((256, 4), 3.0).bfloat16())


def linear_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).mean()


@pytest.mark.parametrize("micro_batch_size", [1, 4, 37])
def test_gradients_of_bf16_parameters_are_added_up_in_float32(micro_batch_size):
    model, batch = bf16_regression()
    optimizer = RecordingSGD(model, lr=0.01)
    step = bb.Step(model, linear_loss, optimizer, micro_batch_size=micro_batch_size)

    step(batch)

    expected = big_batch_gradients(bf16_regression()[0], linear_loss, batch)
    assert_same_gradients(optimizer.seen[-1], expected, tolerance=4e-3)  # bfloat16 has 8 bits: one rounding is 2e-3.
    assert {gradient.dtype for gradient in optimizer.seen[-1].values()} == {torch.bfloat16}


def test_bf16_gradients_added_up_in_bf16_are_outside_the_tolerance():
    """Control: what torch does by itself."""
    model, batch = bf16_regression()
    for x, y in zip(batch[0].split(1), batch[1].split(1), strict=True):
        (linear_loss(model, (x, y)) / 256).backward()

    expected = big_batch_gradients(bf16_regression()[0], linear_loss, batch)
    assert gradient_error(gradients(model), expected) > 4e-3


@pytest.mark.parametrize(
    ("make_optimizers", "dtype"),
    [
        *((make, torch.bfloat16) for make in (sgd_with_momentum, adamw_foreach, adamw_fused, adamw_loop)),
        (sgd_with_momentum, torch.float16),  # AdamW's eps is 0 in float16: torch itself divides by zero.
    ],
    ids=lambda value: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value.__name__,
)
def test_parameters_of_16_bits_take_the_steps_of_any_optimizer(make_optimizers, dtype):
    """The gradient that the optimizer gets is in the dtype of its parameter; AdamW raises on any other."""
    model = NETWORKS["mlp"].make(dtype)
    (optimizer,) = make_optimizers(model)
    step = bb.Step(model, LOSSES["mean"].ours, optimizer, micro_batch_size=MICRO_BATCH_SIZE)
    before = copy.deepcopy(model)

    losses = [float(step(make_batch(NETWORKS["mlp"], dtype)).loss) for _ in range(NUM_STEPS)]

    assert losses[-1] < losses[0]
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    with pytest.raises(AssertionError, match="gradient error"):
        assert_same_weights(model, before, tolerance=1e-2)


class NormRun:
    """A network with BatchNorm and momentum, so that a skipped step has much that it must not move."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.average = averaged_model(self.model)

    def make_step(self, **options: Any) -> bb.Step:
        return bb.Step(
            self.model,
            LOSSES["mean"].ours,
            self.optimizer,
            micro_batch_size=MICRO_BATCH_SIZE,
            scheduler=self.scheduler,
            ema=self.average,
            **options,
        )

    def state(self, step: bb.Step) -> dict[str, Any]:
        """Everything that a step moves, but for the random numbers."""
        return copy.deepcopy(
            dict(
                model=self.model.state_dict(),
                optimizer=self.optimizer.state_dict(),
                scheduler=self.scheduler.state_dict(),
                average=self.average.state_dict(),
                num_steps=step.num_steps,
                gradients=gradients(self.model),
            )
        )


def assert_identical(found: Any, expected: Any, path: str = "") -> None:
    """Bit for bit, through dicts, lists and tuples."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for name in expected:
            assert_identical(found[name], expected[name], f"{path}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, inner in enumerate(expected):
            assert_identical(found[index], inner, f"{path}.{index}")
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected), path
    elif not callable(expected):
        assert found == expected, path


def clean_batches() -> list[dict[str, Tensor]]:
    return [make_batch(NETWORKS["mlp"], seed=seed) for seed in range(5)]


def spoiled(batch: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    """The last sample has a feature that is not finite, so that the micro-batches before it are good."""
    x = batch["x"].clone()
    x[-1, 3] = value
    return {**batch, "x": x}


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_skipped_step_moves_nothing(value):
    run = NormRun()
    step = run.make_step(on_non_finite="skip")
    for batch in clean_batches()[:2]:
        step(batch)
    before = run.state(step)

    result = step(spoiled(clean_batches()[2], value))

    assert result.skipped
    assert_identical(run.state(step), before)


def test_a_step_skipped_for_an_overflow_in_fp16_moves_nothing_but_the_scale():
    run = NormRun()
    run.model.float()
    run.average = averaged_model(run.model)
    scaler = make_scaler()
    step = run.make_step(precision=scaler)
    batches = overflowing_batches(index=2)
    for batch in batches[:2]:
        step(batch)
    before, scale = run.state(step), scaler.get_scale()

    result = step(batches[2])

    assert result.skipped
    assert step.num_steps == 2
    assert scaler.get_scale() == scale / 2
    assert_identical(run.state(step), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_step_that_is_not_finite_raises_and_moves_nothing(value):
    run = NormRun()
    step = run.make_step()
    for batch in clean_batches()[:2]:
        step(batch)
    before = run.state(step)

    with pytest.raises(bb.NonFiniteError, match="Not finite") as caught:
        step(spoiled(clean_batches()[2], value))

    assert caught.value.names
    assert_identical(run.state(step), before)


def test_after_a_skipped_step_the_run_goes_on_as_if_it_had_not_been():
    with_a_bad_batch, without = NormRun(), NormRun()
    step, clean_step = with_a_bad_batch.make_step(on_non_finite="skip"), without.make_step()
    batches = clean_batches()

    for index, batch in enumerate(batches):
        if index == 2:
            step(spoiled(batch, float("nan")))
        step(batch)
        clean_step(batch)

    assert_identical(with_a_bad_batch.state(step), without.state(clean_step))


def test_a_good_step_moves_all_of_it():
    """Control: the comparison above can see each of the states move."""
    run = NormRun()
    step = run.make_step()
    step(clean_batches()[0])
    before = run.state(step)

    step(clean_batches()[1])

    after = run.state(step)
    for name in ("model", "optimizer", "scheduler", "average", "num_steps"):
        with pytest.raises(AssertionError):
            assert_identical(after[name], before[name])


def through_a_file(state: Any) -> Any:
    """Saved and read again, as a checkpoint would be."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def interrupted_run(*, with_state_of_step: bool) -> tuple[Fp16Run, bb.Step]:
    """Six steps, a checkpoint, a new process as far as a test can have one, and four steps more."""
    first, second = Fp16Run(), Fp16Run()
    step = first.make_step()
    for batch in overflowing_batches()[:6]:
        step(batch)
    saved = through_a_file(
        dict(
            model=first.model.state_dict(),
            optimizer=first.optimizer.state_dict(),
            scheduler=first.scheduler.state_dict(),
            step=step.state_dict(),
        )
    )
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    second.scheduler.load_state_dict(saved["scheduler"])
    step = second.make_step()
    if with_state_of_step:
        step.load_state_dict(saved["step"])
    for batch in overflowing_batches()[6:]:
        step(batch)
    return second, step


def run_without_a_break() -> Fp16Run:
    run = Fp16Run()
    step = run.make_step()
    for batch in overflowing_batches():
        step(batch)
    return run


def test_a_run_continues_identically_from_its_state():
    whole = run_without_a_break()

    continued, step = interrupted_run(with_state_of_step=True)

    assert step.num_steps == NUM_STEPS - 1
    assert_identical(continued.model.state_dict(), whole.model.state_dict())
    assert_identical(continued.optimizer.state_dict(), whole.optimizer.state_dict())
    assert_identical(continued.average.state_dict(), whole.average.state_dict())
    assert_identical(continued.scaler.state_dict(), whole.scaler.state_dict())


def test_a_run_that_forgets_the_state_of_its_step_is_another():
    """Control: the average and the loss scale are in the state of the step, and nowhere else."""
    whole = run_without_a_break()

    forgetful, step = interrupted_run(with_state_of_step=False)

    assert step.num_steps == 4
    assert forgetful.scaler.state_dict() != whole.scaler.state_dict()
    with pytest.raises(AssertionError):
        assert_identical(forgetful.average.state_dict(), whole.average.state_dict())


@pytest.mark.parametrize("zeros", [False, True], ids=["none", "zeros"])
def test_a_missing_gradient_is_left_to_the_choice_of_the_user(zeros):
    """An optimizer passes over a parameter without a gradient, and decays one with a gradient of zero."""
    network, loss = NETWORKS["mixture"], LOSSES["mean"]
    truth, ours = network.make(), network.make()
    batch = make_batch(network)
    theirs = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(NUM_STEPS):
        loss.plain(truth, batch).backward()
        for parameter in truth.parameters():
            if zeros and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        theirs.step()
        theirs.zero_grad()

    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    step = bb.Step(ours, loss.ours, optimizer, micro_batch_size=MICRO_BATCH_SIZE, zero_missing_gradients=zeros)
    for _ in range(NUM_STEPS):
        step(batch)

    assert_same_weights(ours, truth, tolerance=TOLERANCE)
    unused = "experts.3.weight"
    assert torch.equal(ours.state_dict()[unused], network.make().state_dict()[unused]) != zeros
