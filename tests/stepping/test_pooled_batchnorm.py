"""batch_norm="exact": loss, gradient and running statistics of the big batch, whatever the cut."""

from __future__ import annotations

import contextlib
import copy
import signal
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes
from bigbatch.memory.offloading import MeteredHost, pretend_host
from bigbatch.stepping.normalization.lockstep import this_worker
from tests.reference import assert_same_gradients, gradient_error, gradients
from tests.stepping.pooled_models import (
    Batch,
    big_batch,
    buffers_error,
    dcgan_discriminator,
    images,
    loss_fn,
    resnet,
    transformers_resnet,
)

GRADIENT, STATISTICS = 1e-10, 1e-12

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "transformers": transformers_resnet,
    "dcgan": dcgan_discriminator,
}


def make(name: str = "resnet") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def assert_is_the_big_batch(
    model: nn.Module, batch: Any, micro_batch_size: int, *, loss=loss_fn, like: nn.Module | None = None, **options: Any
) -> None:
    """Run it on ``model``, and compare loss, each gradient and each buffer with the big batch on ``like``, or on it."""
    big = big_batch(like or model, batch, loss)
    options = {"batch_norm": "exact", **options}
    result = bb.accumulate(model, loss, batch, micro_batch_size=micro_batch_size, **options)
    assert len(result.micro_batch_sizes) > 1
    assert float(result.loss) == pytest.approx(big.loss, rel=1e-12)
    assert_same_gradients(gradients(model), big.gradients, tolerance=GRADIENT)
    assert buffers_error(model, big) <= STATISTICS
    assert result.exactness == "exact"


# The gradient, the loss and the running statistics.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro_batch_size", [4, 5, 11], ids=["equal", "uneven", "rest of 1"])
def test_it_is_the_big_batch(name, micro_batch_size):
    num_samples = {4: 12, 5: 12, 11: 12}[micro_batch_size]

    assert_is_the_big_batch(make(name), images(num_samples), micro_batch_size)


@pytest.mark.parametrize("name", MODELS)
def test_merge_with_the_same_cut_is_far_outside(name):
    """Control."""
    model, batch = make(name), images(12)
    big = big_batch(model, batch)

    bb.accumulate(model, loss_fn, batch, micro_batch_size=4, batch_norm="merge")

    assert gradient_error(gradients(model), big.gradients) > 0.1
    assert buffers_error(model, big) > 1e-5


def test_micro_batches_of_one():
    assert_is_the_big_batch(make(), images(5), 1)


def test_vectors_of_one_value_per_channel():
    """Torch refuses a micro-batch of 1 here, for its variance is none; that of the batch is one."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)).double()
    x, y = images(7)

    assert_is_the_big_batch(model, (x[:, 0, 0, :4], y), 2)


@pytest.mark.parametrize(
    "make_layer",
    [
        lambda: nn.BatchNorm2d(8, momentum=None),
        lambda: nn.BatchNorm2d(8, momentum=0.3, eps=1e-2),
        lambda: nn.BatchNorm2d(8, affine=False),
        lambda: nn.BatchNorm2d(8, track_running_stats=False),
        lambda: nn.SyncBatchNorm(8),
    ],
    ids=["average of all", "momentum", "no weights", "no statistics", "sync"],
)
def test_layers_of_other_kinds(make_layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), make_layer(), nn.ReLU(), nn.Conv2d(8, 8, 3), make_layer(), nn.Flatten())
    model.append(nn.Linear(8 * 4 * 4, 5)).double()
    batch = images(9, size=8)
    if not isinstance(model[1], nn.SyncBatchNorm):
        assert_is_the_big_batch(model, batch, 4)
        return
    plain = copy.deepcopy(model)
    plain[1], plain[4] = nn.BatchNorm2d(8).double(), nn.BatchNorm2d(8).double()  # the one of ranks runs on a card only
    big = big_batch(plain, batch)
    bb.accumulate(model, loss_fn, batch, micro_batch_size=4, batch_norm="exact")
    assert_same_gradients(gradients(model), big.gradients, tolerance=GRADIENT)
    assert buffers_error(model, big) <= STATISTICS


class TwoViews(nn.Module):
    """Two views of each sample through one encoder."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        self.recompute = recompute

    def forward(self, views: Tensor) -> tuple[Tensor, ...]:
        run = (lambda x: checkpoint(self.encoder, x, use_reentrant=False)) if self.recompute else self.encoder
        return tuple(run(view) for view in views.unbind(1))


def loss_of_views(model: Any, batch: Batch) -> Tensor:
    one, other = model(batch[0])
    return (one - other.sin()).square().sum(1).mean() + one.exp().mean()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("are_the_same", [False, True])
def test_two_views_that_are_the_same_in_one_micro_batch(recompute, are_the_same):
    """When they are recomputed nobody can tell which call it is, and the statistics of the two calls differ."""
    torch.manual_seed(0)
    model, views = TwoViews(recompute=recompute).double(), torch.randn(12, 2, 4).double()
    if are_the_same:
        views[4:8, 1] = views[4:8, 0]
    big = big_batch(model, (views, torch.zeros(12)), loss_of_views)

    def run() -> None:
        bb.accumulate(model, loss_of_views, (views, torch.zeros(12)), micro_batch_size=4, batch_norm="exact")

    if recompute and are_the_same:
        with pytest.raises(bb.LossError, match=r"'encoder\.1' is called several times .* cannot be told apart"):
            run()
        assert all(p.grad is None for p in model.parameters())
    else:
        run()
        assert_same_gradients(gradients(model), big.gradients, tolerance=GRADIENT)


def test_a_layer_told_later_not_to_track_keeps_its_running_statistics():
    """People switch it off on a layer that has them; torch then leaves them alone in train mode."""
    model = make()
    model[1].track_running_stats = False
    before = [model[1].running_mean.clone(), model[1].running_var.clone()]

    assert_is_the_big_batch(model, images(9), 4)

    assert torch.equal(model[1].running_mean, before[0])
    assert torch.equal(model[1].running_var, before[1])
    assert not torch.equal(model[3].bn2.running_mean, torch.zeros_like(model[3].bn2.running_mean))  # control


def test_layers_in_eval_mode_use_their_statistics():
    model = make()
    model[1].eval()
    model[3].bn2.eval()

    assert_is_the_big_batch(model, images(9), 4)


def test_with_all_layers_in_eval_mode_the_micro_batches_run_one_by_one():
    model = make().eval()
    seen: list[bool] = []

    def loss(m, b):
        seen.append(this_worker() is None)
        return loss_fn(m, b)

    bb.accumulate(model, loss, images(9), micro_batch_size=4, batch_norm="exact")

    assert seen == [True] * 3
    model.train()
    bb.accumulate(model, loss, images(9), micro_batch_size=4, batch_norm="exact")
    assert seen == [True] * 3 + [False] * 3


class CalledThreeTimes(nn.Module):
    """One layer that sees three different inputs; ``recompute`` wraps the second and third."""

    def __init__(self, recompute: Callable[..., Any] = lambda function, x: function(x)):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)
        self.conv, self.bn = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=0.2)
        self.recompute = recompute

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.bn(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(self.first(x))
        return self.last(self.recompute(lambda x: self.part(self.part(x)), x).mean((2, 3)))


def by_the_user(function, x):
    return checkpoint(function, x, use_reentrant=False)


def by_us(function, x):
    return bb.recompute(function)(x)


@pytest.mark.parametrize("recompute", [None, by_the_user, by_us])
def test_a_shared_layer(recompute):
    """Torch's own recompute counts a batch twice in the running statistics (pytorch/pytorch#96136)."""
    torch.manual_seed(0)
    plain = CalledThreeTimes().double()
    model = copy.deepcopy(plain)
    model.recompute = recompute or plain.recompute

    assert_is_the_big_batch(model, images(9, size=8), 4, like=plain)


# Recomputed in backward.


@pytest.mark.parametrize(
    "recompute",
    [("3", "4"), (("3", "4", "5"),), ("3.bn1", "3.bn2"), ("3.conv2", "4.bn1", "1")],
    ids=["blocks", "a group", "the layers themselves", "parts"],
)
@pytest.mark.parametrize("micro_batch_size", [4, 11])
def test_recomputed_regions(recompute, micro_batch_size):
    model = make()
    expected = copy.deepcopy(model)

    with bb.apply(bb.Plan(micro_batch_size=4, recompute=recompute), model):
        big = big_batch(expected, images(12))
        bb.accumulate(model, loss_fn, images(12), micro_batch_size=micro_batch_size, batch_norm="exact")

    assert_same_gradients(gradients(model), big.gradients, tolerance=GRADIENT)
    assert buffers_error(model, big) <= STATISTICS


@pytest.mark.parametrize("recompute", ["all", "transformers"])
def test_recomputed_models_of_transformers(recompute):
    model = make("transformers")
    big = big_batch(model, images(9))
    names = [name for name, m in model.named_modules() if type(m).__name__ == "ResNetBottleNeckLayer"]

    with bb.apply(bb.Plan(micro_batch_size=4, recompute=tuple(names)), model):
        bb.accumulate(model, loss_fn, images(9), micro_batch_size=4, batch_norm="exact")

    assert_same_gradients(gradients(model), big.gradients, tolerance=GRADIENT)
    assert buffers_error(model, big) <= STATISTICS


class Dropped(nn.Module):
    """Dropout and BatchNorm in one region."""

    def __init__(self, recompute: Callable[..., Any] | None):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)
        self.conv, self.bn = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
        self.recompute = recompute

    def part(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.bn(F.dropout(self.conv(x), 0.3))), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last((self.recompute(self.part, x) if self.recompute else self.part(x)).mean((2, 3)))


@pytest.mark.parametrize("recompute", [by_the_user, by_us])
def test_a_recomputed_region_draws_the_random_numbers_of_its_own_micro_batch(recompute):
    """Other micro-batches draw theirs between its begin and its end."""
    found = []
    for how in (None, recompute):
        torch.manual_seed(0)
        model = Dropped(how).double()
        torch.manual_seed(1)
        result = bb.accumulate(model, loss_fn, images(9, size=8), micro_batch_size=4, batch_norm="exact")
        found.append((gradients(model), torch.get_rng_state()))
        assert result.exactness == "same in distribution"

    assert_same_gradients(found[1][0], found[0][0], tolerance=1e-12)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("recompute", [None, by_the_user, by_us])
@pytest.mark.parametrize("on_host", [False, True])
def test_with_dropout_by_sample_it_is_the_big_batch(recompute, on_host):
    """The big batch is one micro-batch with the same masks."""
    found = []
    for micro_batch_size in (None, 4, 3):
        torch.manual_seed(0)
        model = Dropped(recompute if micro_batch_size else None).double()
        torch.manual_seed(1)
        options = dict(batch_norm="exact", dropout="per-sample", micro_batch_size=micro_batch_size)
        with pretend_host(MeteredHost()) if on_host else contextlib.nullcontext():
            result = bb.accumulate(model, loss_fn, images(9, size=8), **options)  # pyright: ignore[reportArgumentType]
        found.append((gradients(model), model.bn.running_var))
        assert result.exactness == "exact"

    for gradient, variance in found[1:]:
        assert_same_gradients(gradient, found[0][0], tolerance=GRADIENT)
        torch.testing.assert_close(variance, found[0][1], rtol=STATISTICS, atol=0)


def test_each_micro_batch_and_each_step_draws_other_random_numbers():
    drawn: list[Tensor] = []

    def loss(model, batch):
        drawn.append(torch.rand(4))
        value = loss_fn(model, batch)
        drawn.append(torch.rand(4))
        return value

    model = make()
    for _ in range(2):
        bb.accumulate(model, loss, images(9), micro_batch_size=3, batch_norm="exact")

    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn) == 12


def test_a_model_that_draws_nothing_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    bb.accumulate(make(), loss_fn, images(9), micro_batch_size=3, batch_norm="exact")
    fresh = make()
    torch.set_rng_state(before)

    bb.accumulate(fresh, loss_fn, images(9), micro_batch_size=3, batch_norm="exact")

    assert torch.equal(torch.get_rng_state(), before)


# Losses, weights and precision.


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=-100)


def num_labels(batch: Batch) -> Tensor:
    return (batch[1] != -100).sum()


@pytest.mark.parametrize("ignored", [slice(0, 5), slice(4, 8), slice(1, 3)], ids=["first", "a whole one", "some"])
def test_samples_that_do_not_count_are_in_the_statistics(ignored):
    """Their part of the gradient comes through the statistics, so they need a graph."""
    x, y = images(12)
    y[ignored] = -100

    assert_is_the_big_batch(make(), (x, y), 4, loss=token_loss, weight=num_labels)


CLASS_WEIGHTS = torch.linspace(1, 3, 5, dtype=torch.float64)


def test_denominators_that_are_known_late():
    def ratios(model, batch):
        logits, weights = model(batch[0]), CLASS_WEIGHTS[batch[1]]
        each = F.cross_entropy(logits, batch[1], reduction="none")
        even = (batch[1] % 2 == 0).double()
        return {
            "a": bb.Ratio((each * weights).sum(), weights.sum()),
            "b": bb.Ratio((each.square() * even).sum(), even.sum()),
            "c": bb.Sum(logits.square().sum()),
            "d": bb.Constant(model[0].weight.square().sum()),
        }

    def plain(model, batch):
        terms = ratios(model, batch)
        return sum(bb_value(term) for term in terms.values())

    def bb_value(term):
        if isinstance(term, bb.Ratio):
            return term.numerator / term.denominator
        return term.term

    model, batch = make(), images(12)
    big = big_batch(model, batch, plain)

    result = bb.accumulate(model, ratios, batch, micro_batch_size=5, batch_norm="exact")

    assert float(result.loss) == pytest.approx(big.loss, rel=1e-12)
    assert_same_gradients(gradients(model), big.gradients, tolerance=GRADIENT)


@pytest.mark.parametrize("batch_of", [list, iter], ids=["list", "iterator"])
def test_a_batch_that_is_cut_already(batch_of):
    x, y = images(12)
    model = make()
    big = big_batch(model, (x, y))
    pieces = [(x[:7], y[:7]), (x[7:8], y[7:8]), (x[8:], y[8:])]

    result = bb.accumulate(model, loss_fn, bb.LogicalBatch(batch_of(pieces)), batch_norm="exact")

    assert result.micro_batch_sizes == (7, 1, 4)
    assert_same_gradients(gradients(model), big.gradients, tolerance=GRADIENT)
    assert buffers_error(model, big) <= STATISTICS


def test_gradients_of_some_parameters_alone():
    model = make()
    big = big_batch(model, images(9))

    bb.accumulate(model, loss_fn, images(9), micro_batch_size=4, batch_norm="exact", parameters=model[4].parameters())

    found = {name: g for name, g in gradients(model).items() if g is not None}
    assert sorted(found) == sorted(f"4.{name}" for name, _ in model[4].named_parameters())
    assert_same_gradients(found, {name: big.gradients[name] for name in found}, tolerance=GRADIENT)


def test_frozen_parameters_before_a_layer():
    model = make()
    for p in [*model[0].parameters(), model[1].weight]:
        p.requires_grad_(False)

    assert_is_the_big_batch(model, images(9), 4)


@pytest.mark.parametrize("outside", [False, True], ids=["precision=", "autocast around the step"])
def test_autocast_reaches_the_micro_batches(outside):
    """In bf16, both are compared with float64; ours is not farther off than the big batch in bf16."""
    truth = make()
    batch = images(16)
    exact = big_batch(truth, batch).gradients
    model = copy.deepcopy(truth).float()
    narrow = (batch[0].float(), batch[1])
    with torch.autocast("cpu", torch.bfloat16):
        theirs = gradient_error(big_batch(model, narrow).gradients, exact)
    dtypes: set[torch.dtype] = set()
    model[4].register_forward_hook(lambda m, a, out: dtypes.add(out.dtype))

    with torch.autocast("cpu", torch.bfloat16) if outside else contextlib.nullcontext():
        options = {} if outside else {"precision": "bf16"}
        bb.accumulate(model, loss_fn, narrow, micro_batch_size=5, batch_norm="exact", **options)

    assert dtypes == {torch.bfloat16}
    assert gradient_error(gradients(model), exact) < 2 * theirs < 1


def test_the_loss_scale_is_taken_out_again():
    model, batch = make().float(), images(9)
    big = big_batch(copy.deepcopy(model).double(), batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    bb.Step(model, loss_fn, optimizer, micro_batch_size=4, batch_norm="exact", precision=scaler)(
        (batch[0].float(), batch[1])
    )

    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    assert gradient_error(moved, big.gradients) < 0.2  # rounding of fp16; the scale is 1024 times that


def test_float32_with_a_mean_of_1000_keeps_its_digits():
    torch.manual_seed(0)
    truth = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    truth.double()
    x, y = images(8, size=8)
    batch = (x + 1000, y)
    big = big_batch(truth, batch)
    model = copy.deepcopy(truth).float()
    theirs = big_batch(model, (batch[0].float(), y))

    bb.accumulate(model, loss_fn, (batch[0].float(), y), micro_batch_size=3, batch_norm="exact")

    assert gradient_error(gradients(model), big.gradients) < 3 * gradient_error(theirs.gradients, big.gradients) < 1e-2
    private = copy.deepcopy(model)
    private.load_state_dict({**private.state_dict(), **theirs.buffers})
    assert buffers_error(model, big) < 3 * buffers_error(private, big) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits(dtype):
    truth = make("dcgan")
    for i, layer in enumerate(truth):
        if isinstance(layer, nn.LeakyReLU):
            truth[i] = nn.SiLU()  # a kink turns the smallest rounding into another gradient
    batch = images(16)
    exact = big_batch(truth, batch).gradients
    model, narrow = copy.deepcopy(truth).to(dtype), (batch[0].to(dtype), batch[1])
    theirs = gradient_error(big_batch(model, narrow).gradients, exact)

    bb.accumulate(model, loss_fn, narrow, micro_batch_size=5, batch_norm="exact")

    assert gradient_error(gradients(model), exact) < 2 * theirs < 2


# Whole steps.


def test_steps_go_where_those_of_the_big_batch_go():
    model = make()
    expected = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, expected)]
    step = bb.Step(model, loss_fn, optimizers[0], micro_batch_size=5, batch_norm="exact", max_grad_norm=1.0)

    for num_samples in (12, 11, 16):
        step(images(num_samples))
        loss_fn(expected, images(num_samples)).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()

    for (name, found), there in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(found, there, rtol=1e-9, atol=1e-11, msg=name)


def test_a_step_that_is_skipped_leaves_the_statistics():
    model = make()
    before = copy.deepcopy(model.state_dict())
    step = bb.Step(
        model,
        lambda m, b: loss_fn(m, b) * float("nan"),
        torch.optim.SGD(model.parameters(), lr=0.1),
        micro_batch_size=4,
        batch_norm="exact",
        on_non_finite="skip",
    )

    assert step(images(9)).skipped
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_after_running_out_of_memory_it_goes_on_with_smaller_ones():
    model = make()
    big = big_batch(model, images(12))
    seen: list[int] = []

    def loss(m, batch):
        value = loss_fn(m, batch)
        seen.append(len(batch[0]))
        if len(batch[0]) > 3 and len(seen) % 2 == 0:  # not in the first of them
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return value

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    result = bb.Step(model, loss, optimizer, micro_batch_size=6, batch_norm="exact")(images(12))

    assert result.retries == 1
    assert result.micro_batch_sizes == (3, 3, 3, 3)
    assert result.exactness == "exact"
    assert buffers_error(model, big) <= STATISTICS


# When something fails.


def fails_at(place: int, error: BaseException) -> Callable[[nn.Module, Batch], Tensor]:
    """A loss that raises at the n-th call of any BatchNorm layer, over all micro-batches; negative: in backward."""
    calls = [0]

    def hook(module, args, output):
        calls[0] += 1
        if calls[0] == place:
            raise error

    def grad_hook(gradient):
        raise error

    def loss(model, batch):
        handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        try:
            value = loss_fn(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        if place < 0:
            value.register_hook(grad_hook)
        return value

    return loss


@pytest.mark.parametrize("place", [1, 2, 5, 20, -1])
@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("on_host", [False, True])
def test_after_a_failure_all_is_as_it_was(place, error, on_host):
    model = make()
    torch.manual_seed(3)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}

    with pretend_host(MeteredHost()) if on_host else contextlib.nullcontext(), pytest.raises(type(error)):
        bb.accumulate(model, fails_at(place, error), images(9), micro_batch_size=4, batch_norm="exact")

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes


def test_ctrl_c_ends_all(request):
    import _thread

    # A shell starts what runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))

    def loss(model, batch):
        if len(batch[0]) == 1:
            _thread.interrupt_main()
        return loss_fn(model, batch)

    model = make()
    with pytest.raises(KeyboardInterrupt):
        bb.accumulate(model, loss, images(9), micro_batch_size=4, batch_norm="exact")

    assert_is_the_big_batch(model, images(9), 4)


def test_an_except_of_the_users_does_not_go_on_alone():
    def loss(model, batch):
        if len(batch[0]) == 1:
            raise ValueError("mine")
        try:
            return loss_fn(model, batch)
        except BaseException:
            return loss_fn(model, batch)

    with pytest.raises(ValueError, match="mine"):
        bb.accumulate(make(), loss, images(9), micro_batch_size=4, batch_norm="exact")


def test_the_failure_names_the_micro_batch():
    def loss(model, batch):
        value = loss_fn(model, batch)
        if len(batch[0]) == 1:
            raise ValueError("mine")
        return value

    with pytest.raises(ValueError, match="mine") as caught:
        bb.accumulate(make(), loss, images(9), micro_batch_size=4, batch_norm="exact")

    assert caught.value.__notes__ == ["In micro-batch 3 of 3, samples 8 to 8."]


class Skips(nn.Module):
    """Leaves a layer out for small micro-batches."""

    def __init__(self, last: bool):
        super().__init__()
        self.first, self.a, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if len(x) > 2 or self.last:
            x = self.a(x)
        return self.b(x) if len(x) > 2 or not self.last else x


@pytest.mark.parametrize(
    ("last", "places"), [(False, "the layer 'a' .* the layer 'b'"), (True, "the layer 'b' .* the end of its forward")]
)
def test_micro_batches_that_take_another_path(last, places):
    x, y = images(5)

    with pytest.raises(bb.LossError, match=f"Micro-batch 1 came to {places}"):
        bb.accumulate(Skips(last).double(), loss_fn, (x[:, 0, 0, :4], y), micro_batch_size=3, batch_norm="exact")


def test_one_value_in_the_whole_batch():
    x, y = images(2)
    y[1] = -100
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double()

    def loss(model, batch):
        return loss_fn(model, (batch[0][batch[1] >= 0], batch[1][batch[1] >= 0]))

    with pytest.raises(bb.BatchError, match="'1' got one value per channel in the whole batch"):
        bb.accumulate(model, loss, (x[:1, 0, 0, :4].expand(2, 4), y), micro_batch_size=1, batch_norm="exact")


# What it cannot do is said.


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_layer_with_a_forward_of_its_own_is_named():
    model = make()
    model[1] = OwnNorm(8).double()
    with pytest.raises(bb.OptionError, match=r"\['1'\] has a forward of its own"):
        bb.accumulate(model, loss_fn, images(9), micro_batch_size=4, batch_norm="exact")

    wrapped = make()
    wrapped[3].bn1.forward = lambda x: x
    with pytest.raises(bb.OptionError, match=r"\['3.bn1'\]"):
        bb.accumulate(wrapped, loss_fn, images(9), micro_batch_size=4, batch_norm="exact")


def test_a_loss_of_the_whole_batch_is_refused():
    whole = bb.WholeBatchLoss(lambda model, batch: model(batch[0]), lambda outputs, batch: outputs.square().mean())

    with pytest.raises(bb.OptionError, match='WholeBatchLoss and batch_norm="exact" do not go together'):
        bb.accumulate(make(), whole, images(9), micro_batch_size=4, batch_norm="exact")


def test_a_compiled_model_is_refused():
    model = make()
    model[4]._compiled_call_impl = model[4]._call_impl  # as compile() leaves it

    with pytest.raises(bb.OptionError, match="compiled code cannot"):
        bb.accumulate(model, loss_fn, images(9), micro_batch_size=4, batch_norm="exact")


def test_running_statistics_of_instance_norm_are_refused():
    model = make().append(nn.Identity())
    model[2] = nn.InstanceNorm2d(8, track_running_stats=True).double()

    with pytest.raises(bb.OptionError, match="InstanceNorm2d layers, and '2' has some"):
        bb.accumulate(model, loss_fn, images(9), micro_batch_size=4, batch_norm="exact")


def test_a_reentrant_checkpoint_is_refused():
    """Its forward has no graph, so that no gradient would come through the statistics."""
    model = CalledThreeTimes(lambda function, x: checkpoint(function, x, use_reentrant=True)).double()

    with pytest.raises(bb.LossError, match="Give use_reentrant=False"):
        bb.accumulate(model, loss_fn, images(9, size=8), micro_batch_size=4, batch_norm="exact")

    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_penalty_through_the_layers_is_refused(create_graph):
    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        value = loss_fn(model, (x, batch[1]))
        (gradient,) = torch.autograd.grad(value, x, create_graph=create_graph)
        return value + gradient.square().sum()

    with pytest.raises(bb.LossError, match="a gradient penalty"):
        bb.accumulate(make(), loss, images(9), micro_batch_size=4, batch_norm="exact")


class Remembers(nn.Module):
    """Keeps an activation for a later layer, which in lock-step is that of another micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.first(x)
        return self.last(self.bn(self.kept))


def test_an_activation_kept_on_a_module_is_warned_of_once():
    model = Remembers().double()
    x, y = images(9)
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters()), micro_batch_size=4, batch_norm="exact")

    with pytest.warns(bb.BigBatchWarning, match="keeps an activation in its attribute 'kept'"):
        step((x[:, 0, 0, :4], y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step((x[:, 0, 0, :4], y))


# In host memory.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro_batch_size", [4, 11])
def test_what_is_saved_may_lie_on_the_host(name, micro_batch_size):
    host = MeteredHost()
    with pretend_host(host):
        assert_is_the_big_batch(make(name), images(12), micro_batch_size)

    assert host.moved_bytes > 2 * host.most_bytes > 0
    assert host._bytes == 0, "All of it is let go."


@pytest.mark.parametrize("recompute", [("3", "4"), (("3", "4", "5"),), ("3.bn1", "3.bn2")])
def test_recomputed_regions_with_the_rest_on_the_host(recompute):
    model = make()
    big = big_batch(model, images(12))

    with bb.apply(bb.Plan(micro_batch_size=4, recompute=recompute), model), pretend_host(MeteredHost()):
        bb.accumulate(model, loss_fn, images(12), micro_batch_size=5, batch_norm="exact")

    assert_same_gradients(gradients(model), big.gradients, tolerance=GRADIENT)


def test_autocast_with_weights_that_micro_batches_share_on_the_host():
    """The cast weight is one for all micro-batches, and has the dimensions of an activation of 8 samples."""
    model, (x, y) = make().float(), images(24)
    here, there = copy.deepcopy(model), copy.deepcopy(model)
    bb.accumulate(here, loss_fn, (x.float(), y), micro_batch_size=8, batch_norm="exact", precision="bf16")

    with pretend_host(MeteredHost()):
        bb.accumulate(there, loss_fn, (x.float(), y), micro_batch_size=8, batch_norm="exact", precision="bf16")

    assert gradient_error(gradients(there), gradients(here)) < 0.05


def peak_of_activations(num_samples: int, micro_batch_size: int | None, host: MeteredHost | None, policy: str) -> int:
    model, batch = resnet(8, 5), images(num_samples, size=12)
    model.double()
    live = LiveBytes()
    live.track(model, batch)
    resident = live.current_bytes()
    with pretend_host(host) if host else contextlib.nullcontext(), live:
        bb.accumulate(model, loss_fn, batch, micro_batch_size=micro_batch_size, batch_norm=policy)
    return live.peak_bytes() - resident


def test_the_device_holds_about_one_micro_batch():
    """At N = 128 by 8: at most a quarter of the big batch, and three micro-batches. Counted: all but the host's."""
    host = MeteredHost()

    one, big = peak_of_activations(8, None, None, "native"), peak_of_activations(128, None, None, "native")
    found = peak_of_activations(128, 8, host, "exact")

    assert found <= 0.25 * big
    assert found <= 3 * one
    assert host.most_bytes > 0.8 * big
    assert peak_of_activations(128, 8, None, "exact") > 0.8 * big, "Control: without a host it is all here."


def test_the_device_bytes_grow_slowly_with_the_batch():
    found = [peak_of_activations(num_samples, 8, MeteredHost(), "exact") for num_samples in (32, 96)]

    assert found[1] - found[0] < 0.1 * peak_of_activations(64, None, None, "native")


@torch.library.custom_op("bigbatch_tests::called", mutates_args=())
def _called(x: torch.Tensor) -> torch.Tensor:
    return _INSIDE[-1](x).clone()


_INSIDE: list[nn.Module] = []


def in_a_custom_operator(model, x):
    _INSIDE.append(model)
    return _called(x)


def in_another_thread(model, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(model, x).result()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (in_a_custom_operator, r"'layer' is called in the body of a custom operator \(torch\.library\)"),
        (in_another_thread, "'layer' is called in another thread while the forwards of the micro-batches run"),
        (
            lambda model, x: torch.func.functional_call(model, {n: p * 2 for n, p in model.named_parameters()}, (x,)),
            r"other tensors are in the place of parameters or buffers of the model \(torch\.func\.functional_call\)",
        ),
    ],
)
def test_where_a_layer_cannot_wait_it_says_so_and_all_is_as_before(call, match):
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(layer=nn.BatchNorm1d(4), last=nn.Linear(4, 2))).double()
    before, tensors = copy.deepcopy(model.state_dict()), {name: id(p) for name, p in model.named_parameters()}

    with pytest.raises(bb.LossError, match=match):
        bb.accumulate(
            model, lambda m, x: call(m, x).mean(), torch.randn(9, 4).double(), micro_batch_size=4, batch_norm="exact"
        )

    assert {name: id(p) for name, p in model.named_parameters()} == tensors
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.is_leaf for p in model.parameters())


def test_a_teacher_in_inference_mode_is_that_of_the_big_batch():
    """And process-wide settings around a layer are each micro-batch's own."""

    class WithTeacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
            self.teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
                target = self.teacher(x)
            return (self.student(x) - target.clone()).square().sum(1)

    torch.manual_seed(0)
    model, x = WithTeacher().double(), torch.randn(9, 4).double()
    assert_is_the_big_batch(model, (x, x), 4, loss=lambda m, b: m(b[0]).mean())
    assert not torch.is_inference_mode_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
