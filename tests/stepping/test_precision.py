"""Autocast, loss scaling, parameters of 16 bits, and the dtype that gradients are added up in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import bigbatch as bb
from tests.reference import (
    RecordingSGD,
    assert_same_gradients,
    assert_same_weights,
    big_batch_gradients,
    gradient_error,
    gradients,
)

NUM_FEATURES = 8
MICRO_BATCH_SIZE = 4
SIZES = (4, 4, 3)
Batch = tuple[Tensor, Tensor]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def make_batch(num_samples: int = 11, dtype: torch.dtype = torch.float32, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return x.to(dtype), torch.randint(0, 3, (num_samples,), generator=generator)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def cut(batch: Batch) -> list[Batch]:
    return list(zip(batch[0].split(MICRO_BATCH_SIZE), batch[1].split(MICRO_BATCH_SIZE), strict=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_scaler(**options: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 2, **options})


def same_bits(found: nn.Module, expected: nn.Module) -> bool:
    pairs = zip(found.state_dict().values(), expected.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# Autocast


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", torch.bfloat16), (torch.bfloat16, torch.bfloat16), ("fp32", None), (torch.float32, None)],
)
def test_autocast_is_on_in_the_forward_and_off_in_backward(precision, dtype):
    seen: list[tuple[bool, torch.dtype]] = []

    def listening(model: nn.Module, batch: Batch) -> Tensor:
        hidden = model(batch[0])
        seen.append((torch.is_autocast_enabled("cpu"), hidden.dtype))
        hidden.register_hook(lambda g: seen.append((torch.is_autocast_enabled("cpu"), g.dtype)) or g)
        return F.cross_entropy(hidden.float(), batch[1])

    model = mlp()
    bb.accumulate(model, listening, make_batch(), micro_batch_size=MICRO_BATCH_SIZE, precision=precision)

    expected = dtype or torch.float32
    assert seen == [(dtype is not None, expected), (False, expected)] * 3
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_bf16_is_the_loop_written_by_hand():
    """Bit for bit, where the shares are powers of two: then it does not matter where they are multiplied in."""
    ours, theirs = mlp(), mlp()
    batch = make_batch(16)
    for part in cut(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(theirs, part)
        (loss / 4).backward()

    bb.accumulate(ours, loss_fn, batch, micro_batch_size=MICRO_BATCH_SIZE, precision="bf16")

    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    # Control: without autocast the bits are others.
    plain = mlp()
    bb.accumulate(plain, loss_fn, batch, micro_batch_size=MICRO_BATCH_SIZE)
    assert gradient_error(gradients(plain), gradients(theirs)) > 1e-3


def test_shares_keep_their_digits_under_autocast():
    """The loss of one sample of 3000, in bfloat16: its share is multiplied in with all its digits."""

    def in_bfloat16(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0]) * 3).sum(1).mean()  # stays in bfloat16 up to the loss

    model = nn.Linear(NUM_FEATURES, 4)
    x = torch.ones(3000, NUM_FEATURES)
    truth = big_batch_gradients(model, lambda m, b: (m(b[0]) * 3).sum(1).mean(), (x,))

    bb.accumulate(model, in_bfloat16, (x,), micro_batch_size=1000, precision="bf16")

    assert_same_gradients(gradients(model), truth, tolerance=4e-3)


# Loss scaling


class Log:
    """Wraps the methods of a scaler and of optimizers, and notes the order of their calls."""

    def __init__(self, scaler: GradScaler, *optimizers: torch.optim.Optimizer):
        self.calls: list[str] = []
        for name in ("unscale_", "update"):
            self._wrap(scaler, name, name)
        for index, optimizer in enumerate(optimizers):
            self._wrap(optimizer, "step", f"step {index}")

    def _wrap(self, owner: Any, name: str, said: str) -> None:
        plain = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(said)
            return plain(*args, **kwargs)

        setattr(owner, name, wrapped)


def test_unscale_once_and_update_once_in_a_step():
    model, scaler = mlp(), make_scaler()
    optimizer = sgd(model)
    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=MICRO_BATCH_SIZE, precision=scaler, max_grad_norm=0.1)
    log = Log(scaler, optimizer)

    for _ in range(2):
        step(make_batch())

    assert log.calls == ["unscale_", "step 0", "update"] * 2


def test_unscale_once_for_each_optimizer_and_update_once():
    model, scaler = mlp(), make_scaler()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    step = bb.Step(model, loss_fn, optimizers, micro_batch_size=MICRO_BATCH_SIZE, precision=scaler)
    log = Log(scaler, *optimizers)

    step(make_batch())

    assert log.calls == ["unscale_", "unscale_", "step 0", "step 1", "update"]


def fp16_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, batch: Batch) -> bool:
    """The careful loop of torch's own examples; returns whether it stepped."""
    for part in cut(batch):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model, part)
        scaler.scale(loss * (len(part[0]) / len(batch[0]))).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale() >= before


def overflowing(batch: Batch) -> Batch:
    x = batch[0].clone()
    x[5] *= 1e6
    return x, batch[1]


def test_fp16_skips_and_scales_as_the_loop_written_by_hand():
    """With a scaler of one's own, scaled up to where it overflows by itself, and one batch that always does."""
    ours, theirs = mlp(), mlp()
    our_scaler, their_scaler = (make_scaler(init_scale=2.0**18, growth_interval=1) for _ in range(2))
    step = bb.Step(ours, loss_fn, sgd(ours), micro_batch_size=MICRO_BATCH_SIZE, precision=our_scaler, max_grad_norm=0.5)
    their_optimizer = sgd(theirs)

    our_history, their_history = [], []
    for seed in range(12):
        batch = make_batch(seed=seed) if seed != 6 else overflowing(make_batch())
        our_history.append((not step(batch).skipped, our_scaler.get_scale()))
        their_history.append((fp16_by_hand(theirs, their_optimizer, their_scaler, batch), their_scaler.get_scale()))

    assert our_history == their_history
    assert not our_history[6][0]
    assert {stepped for stepped, _ in our_history} == {True, False}
    assert our_scaler.state_dict() == their_scaler.state_dict()
    assert_same_weights(ours, theirs, tolerance=1e-3)
    assert step.num_steps == sum(stepped for stepped, _ in our_history)
    assert step.num_skipped == 12 - step.num_steps


def test_the_gradient_that_is_clipped_is_the_unscaled_one():
    model = mlp()
    optimizer = RecordingSGD(model)
    step = bb.Step(
        model, loss_fn, optimizer, micro_batch_size=MICRO_BATCH_SIZE, precision=make_scaler(), max_grad_norm=0.01
    )

    result = step(make_batch())

    truth = big_batch_gradients(mlp(), loss_fn, make_batch())
    norm = torch.stack([g.norm() for g in truth.values()]).norm()
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-2)
    clipped = torch.stack([g.norm() for g in optimizer.seen[0].values()]).norm()
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)


def test_a_scaler_that_is_switched_off_leaves_autocast():
    model, theirs = mlp(), mlp()
    scaler = GradScaler("cpu", enabled=False)
    step = bb.Step(model, loss_fn, sgd(model), micro_batch_size=MICRO_BATCH_SIZE, precision=scaler)
    by_hand = sgd(theirs)
    for seed in range(3):
        step(make_batch(16, seed=seed))
        for part in cut(make_batch(16, seed=seed)):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(theirs, part)
            (loss / 4).backward()
        by_hand.step()
        by_hand.zero_grad()

    assert_same_weights(model, theirs, tolerance=1e-6)
    assert step.state_dict()["scaler"] is None


def test_accumulate_with_a_scaler_gives_scaled_gradients():
    """For a loop of one's own, which unscales and steps."""
    model, scaler = mlp(), make_scaler()
    optimizer = sgd(model)
    log = Log(scaler, optimizer)

    bb.accumulate(model, loss_fn, make_batch(), micro_batch_size=MICRO_BATCH_SIZE, precision=scaler)

    assert log.calls == []
    truth = big_batch_gradients(mlp(), loss_fn, make_batch())
    scaled = {name: g * 2.0**10 for name, g in truth.items()}
    assert_same_gradients(gradients(model), scaled, tolerance=1e-2)
    scaler.unscale_(optimizer)
    assert_same_gradients(gradients(model), truth, tolerance=1e-2)


def test_accumulate_with_fp16_and_no_scaler_says_to_give_one():
    with pytest.raises(bb.OptionError, match="precision=scaler"):
        bb.accumulate(mlp(), loss_fn, make_batch(), precision="fp16")


def test_small_gradients_survive_in_fp16_and_vanish_without_the_scale():
    """Ratios are divided by a number of about their own size, or the scale would have nothing to save."""

    def tiny(model: nn.Module, batch: Batch) -> Any:
        return bb.Ratio(model(batch[0]).float().square().sum() * 1e-8, float(len(batch[0])))

    def gradient_with(scale: float) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(NUM_FEATURES, 2)
        scaler = make_scaler(init_scale=scale)
        optimizer = RecordingSGD(model)
        bb.Step(model, tiny, optimizer, micro_batch_size=MICRO_BATCH_SIZE, precision=scaler)(make_batch())
        return optimizer.seen[0]["weight"]

    torch.manual_seed(1)
    truth = big_batch_gradients(
        nn.Linear(NUM_FEATURES, 2), lambda m, b: m(b[0]).square().sum() * 1e-8 / len(b[0]), make_batch()
    )["weight"]
    errors = [float((gradient_with(scale).double() - truth).norm() / truth.norm()) for scale in (2.0**16, 1.0)]

    assert errors[0] < 1e-2
    assert errors[1] > 0.1


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "fp16"])
def test_several_optimizers_and_one_inf_move_nothing(scaled):
    """torch's scaler would step those optimizers whose own gradients are finite."""
    precision = make_scaler() if scaled else "fp32"
    model = nn.ModuleDict(dict(bad=nn.Linear(NUM_FEATURES, 1), good=nn.Linear(NUM_FEATURES, 1)))

    def two_heads(model: Any, batch: Batch) -> Tensor:
        bad, good = (model[name](batch[0]).float().square().mean() for name in ("bad", "good"))
        return bad * (torch.inf if len(batch[0]) == 3 else 1.0) + good

    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1, momentum=0.9) for name in ("bad", "good")]
    step = bb.Step(
        model, two_heads, optimizers, micro_batch_size=MICRO_BATCH_SIZE, precision=precision, on_non_finite="skip"
    )
    step(make_batch(8))
    before, states = copy.deepcopy(model), copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])

    result = step(make_batch(11))

    assert result.skipped
    assert same_bits(model, before)
    for optimizer, state in zip(optimizers, states, strict=True):
        for now, then in zip(optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
            assert torch.equal(now["momentum_buffer"], then["momentum_buffer"])
    assert step.num_steps == 1
    assert not step(make_batch(8)).skipped


def test_torchs_scaler_alone_moves_the_other_optimizer():
    """Control."""
    layers = [nn.Linear(NUM_FEATURES, 1) for _ in range(2)]
    before = copy.deepcopy(layers[1])
    scaler = make_scaler()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    losses = [layer(make_batch()[0]).square().mean() for layer in layers]
    scaler.scale(losses[0] * torch.inf + losses[1]).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)

    assert not same_bits(layers[1], before)


def test_a_step_that_fails_after_unscaling_can_be_made_again():
    """The scaler refuses a second ``unscale_`` before an ``update``."""
    model, scaler = mlp(), make_scaler()

    class Fails(torch.optim.SGD):
        fail = True

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise RuntimeError("as if")
            return super().step(closure)

    optimizer = Fails(model.parameters(), lr=0.1)
    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=MICRO_BATCH_SIZE, precision=scaler)
    before, state = copy.deepcopy(model), copy.deepcopy(scaler.state_dict())
    with pytest.raises(RuntimeError, match="as if"):
        step(make_batch())
    assert same_bits(model, before)
    assert scaler.state_dict() == state

    optimizer.fail = False
    assert not step(make_batch()).skipped


# Parameters of 16 bits


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, **options)


ADAMW: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "loop": lambda model: adamw(model, foreach=False),
    "foreach": lambda model: adamw(model, foreach=True),
    "fused": lambda model: adamw(model, fused=True),
}


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("kind", list(ADAMW))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_parameters_of_16_bits_with_adamw_and_with_a_scaler(dtype, kind, scaled):
    """torch alone raises on the gradient that is in float32, and on unscaling one in float16."""
    model, theirs = mlp(dtype), mlp(dtype)
    options: dict[str, Any] = dict(precision=make_scaler()) if scaled else {}
    step = bb.Step(model, loss_fn, ADAMW[kind](model), micro_batch_size=MICRO_BATCH_SIZE, **options)
    reference = ADAMW[kind](theirs)

    for seed in range(3):
        batch = make_batch(dtype=dtype, seed=seed)
        step(batch)
        # The true gradient, rounded once, and torch's own optimizer in that dtype: with its own losses of digits.
        for p, truth in zip(theirs.parameters(), big_batch_gradients(theirs, loss_fn, batch).values(), strict=True):
            p.grad = truth.to(dtype)
        reference.step()

    assert all(p.dtype == dtype for p in model.parameters())
    assert_same_weights(model, theirs, tolerance=3e-2)
    assert step.num_steps == 3
    assert all(p.grad is None and p.grad_dtype in (None, dtype) for p in model.parameters())


def test_torch_alone_raises_on_fp16_parameters_with_a_scaler():
    """Control."""
    model, scaler = mlp(torch.float16), make_scaler()
    scaler.scale(loss_fn(model, make_batch(dtype=torch.float16))).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(sgd(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_fp16_parameters_with_an_overflow_are_skipped(dtype):
    model, scaler = mlp(dtype), make_scaler()
    step = bb.Step(model, loss_fn, sgd(model), micro_batch_size=MICRO_BATCH_SIZE, precision=scaler)
    before = copy.deepcopy(model)
    batch = make_batch(dtype=dtype)

    result = step((torch.where(torch.arange(11)[:, None] == 5, torch.inf, batch[0]), batch[1]))

    assert result.skipped
    assert same_bits(model, before)
    assert scaler.get_scale() == 2.0**9
    assert not step(batch).skipped


def test_gradients_are_in_the_dtype_of_their_parameters_after_accumulate():
    """Some in bfloat16, some in float32: and what was there before is in the sum."""
    model = mlp()
    model[0].bfloat16()

    def mixed(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model[2](torch.tanh(model[0](batch[0].bfloat16()).float())), batch[1])

    for _ in range(2):
        bb.accumulate(model, mixed, make_batch(), micro_batch_size=MICRO_BATCH_SIZE)
    twice = gradients(model)
    model.zero_grad()
    bb.accumulate(model, mixed, make_batch(), micro_batch_size=MICRO_BATCH_SIZE)

    assert [p.grad.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert_same_gradients(twice, {name: 2 * g for name, g in gradients(model).items()}, tolerance=1e-2)


# The dtype that gradients are added up in

NUM_MICRO_BATCHES = 256


def worst_case() -> tuple[nn.Module, Tensor]:
    """256 samples with nearly the same gradient: in bfloat16 the sum stops growing."""
    torch.manual_seed(20)
    return nn.Linear(NUM_FEATURES, 4).bfloat16(), (torch.rand(NUM_MICRO_BATCHES, NUM_FEATURES) + 0.5).bfloat16()


def linear_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 3).mean()


def error_of_256(accumulation_dtype: Any, **options: Any) -> float:
    model, x = worst_case()
    truth = big_batch_gradients(model, linear_loss, x)
    bb.accumulate(model, linear_loss, x, micro_batch_size=1, accumulation_dtype=accumulation_dtype, **options)
    return gradient_error(gradients(model), truth)


@pytest.mark.parametrize("dtype", [None, "float32", torch.float32, "float64"], ids=str)
def test_256_micro_batches_in_a_wide_dtype_lose_one_rounding(dtype):
    assert error_of_256(dtype) < 4e-3  # bfloat16 has 8 bits


def test_256_micro_batches_in_bfloat16_lose_much():
    """Control, and what the option gives who asks for it."""
    model, x = worst_case()
    truth = big_batch_gradients(model, linear_loss, x)
    for part in x.split(1):
        (linear_loss(model, part) / NUM_MICRO_BATCHES).backward()

    assert gradient_error(gradients(model), truth) > 8e-3
    assert error_of_256("bfloat16") > 8e-3


class Recording(torch.optim.SGD):
    """Keeps the gradient that it was given."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        return super().step(closure)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_dtype_for_any_parameters(parameter_dtype, dtype):
    """The optimizer gets the dtype of the parameter, whatever the sum was made in."""
    model = mlp(parameter_dtype)
    optimizer = Recording(model.parameters(), lr=0.1)
    batch = make_batch(dtype=parameter_dtype)
    truth = big_batch_gradients(model, loss_fn, batch)
    plan = bb.Plan(micro_batch_size=MICRO_BATCH_SIZE, accumulation_dtype=dtype)

    bb.Step(model, loss_fn, optimizer, plan=plan)(batch)

    assert {g.dtype for g in optimizer.seen} == {parameter_dtype}
    found = dict(zip(truth, optimizer.seen, strict=True))
    narrowest = torch.bfloat16 if dtype == "bfloat16" else parameter_dtype
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-6}[narrowest]  # the loss is in float32
    assert_same_gradients(found, truth, tolerance=tolerance)


def test_float64_sums_are_closer_than_float32_sums():
    """2048 micro-batches of float32 gradients; one rounding at the end instead of one for each."""
    torch.manual_seed(2)
    model = nn.Linear(4, 1)
    x = torch.rand(2048, 4) + 0.1
    truth = big_batch_gradients(model, lambda m, b: m(b).mean(), x)
    errors = {}
    for dtype in ("float32", "float64"):
        model.zero_grad()
        bb.accumulate(model, lambda m, b: m(b).mean(), x, micro_batch_size=1, accumulation_dtype=dtype)
        errors[dtype] = gradient_error(gradients(model), truth)

    assert errors["float64"] < 1e-7 < errors["float32"]


@pytest.mark.parametrize("dtype", ["int32", "float33", torch.int64, 32])
def test_no_such_accumulation_dtype(dtype):
    with pytest.raises(bb.OptionError, match="accumulation_dtype=.*floating point"):
        bb.accumulate(mlp(), loss_fn, make_batch(), accumulation_dtype=dtype)


@pytest.mark.parametrize(
    ("precision", "hint"),
    [
        ("bf16-mixed", '"bf16"'),
        ("16-mixed", '"fp16"'),
        ("fp8", "GradScaler"),
        (torch.int8, "GradScaler"),
        (16, "fp32"),
        (None, "fp32"),
    ],
    ids=str,
)
def test_no_such_precision(precision, hint):
    model = mlp()
    with pytest.raises(bb.OptionError, match=hint):
        bb.Step(model, loss_fn, sgd(model), precision=precision)


@pytest.mark.parametrize("fail_at", [0, 2])
def test_after_a_failure_the_parameters_have_no_foreign_gradient_dtype(fail_at):
    """The wide dtype of the sum belongs to the step."""
    model = mlp(torch.bfloat16)
    dtypes, calls = [p.grad_dtype for p in model.parameters()], []

    def fails(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(0)
        if len(calls) > fail_at:
            raise RuntimeError("as if")
        return loss_fn(model, batch)

    with pytest.raises(RuntimeError, match="as if"):
        bb.accumulate(model, fails, make_batch(dtype=torch.bfloat16), micro_batch_size=MICRO_BATCH_SIZE)

    assert [p.grad_dtype for p in model.parameters()] == dtypes
    loss_fn(model, make_batch(dtype=torch.bfloat16)).backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


@pytest.fixture
def no_room_for_the_second_tensor(monkeypatch):
    """Of a scaler, which makes its scale and then its counter of steps without overflow."""
    full, calls = torch.full, []

    def short_of_memory(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return full(*args, **kwargs)

    monkeypatch.setattr("torch.amp.grad_scaler.torch.full", short_of_memory)


def test_memory_that_runs_out_while_a_scaler_is_made_loses_nothing(no_room_for_the_second_tensor):
    model, batch = mlp(), make_batch()
    scaler = GradScaler("cpu", init_scale=4.0)
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), precision=scaler, micro_batch_size=4)
    result = step(batch)
    assert (result.retries, result.skipped, scaler.get_scale()) == (1, False, 4.0)


def test_torchs_scaler_alone_is_half_made_when_memory_ran_out(no_room_for_the_second_tensor):
    scaler = GradScaler("cpu")
    with pytest.raises(torch.OutOfMemoryError):
        scaler.scale(torch.ones(()))
    scaler.scale(torch.ones(()))
    assert scaler._growth_tracker is None
