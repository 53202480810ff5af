"""Peak memory, in counted bytes: of a step of any K, of a thousand steps, and what ``Step.measure`` says of it."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes, count_peak_bytes

MICRO_BATCH_SIZE = 4
NUM_FEATURES = 32
Batch = tuple[Tensor, Tensor]


def mlp(width: int = 64) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(NUM_FEATURES, width), *layers, nn.Linear(width, 5))


def cnn_with_batch_norm() -> nn.Module:
    layers = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)
    return nn.Sequential(nn.Unflatten(1, (2, 4, 4)), *layers)


def wide_activations() -> nn.Module:
    """Few parameters, and much that is saved for backward."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(NUM_FEATURES, 5)

        def forward(self, x: Tensor) -> Tensor:
            wide = x.repeat(1, 40)
            for _ in range(5):
                wide = torch.tanh(wide)
            return self.layer(wide.unflatten(1, (40, -1)).mean(1))

    return nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), Repeated())


def make_batch(num_samples: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator).to(dtype)
    return x, torch.randint(0, 5, (num_samples,), generator=generator)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw_foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=True)


def adamw_fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def peak_of_a_steady_step(step: bb.Step, batch: Any, *also: Any) -> int:
    """Peak of the third step: the optimizer has its state, and nothing is done for the first time."""
    for _ in range(2):
        step(batch)
    with count_peak_bytes("cpu", track=[step.model, *step.optimizers, batch, *also]) as peak:
        step(batch)
    return peak.peak_bytes


def peak_with(num_micro_batches: int, make_model: Any, make_optimizer: Any, dtype: torch.dtype, **options: Any) -> int:
    """Peak of a steady step, less what the batch itself takes."""
    torch.manual_seed(1)
    model = make_model().to(dtype)
    batch = make_batch(MICRO_BATCH_SIZE * num_micro_batches, dtype)
    step = bb.Step(model, loss_fn, make_optimizer(model), micro_batch_size=MICRO_BATCH_SIZE, **options)
    return peak_of_a_steady_step(step, batch) - num_bytes(*batch)


KINDS = [
    (mlp, sgd, torch.float32, {}),
    (mlp, adamw_foreach, torch.float32, dict(max_grad_norm=1.0)),
    (wide_activations, sgd, torch.float32, {}),
    (wide_activations, adamw_fused, torch.float32, dict(precision="bf16")),
    (mlp, sgd, torch.bfloat16, {}),
    (cnn_with_batch_norm, adamw_foreach, torch.float32, {}),
]
KIND_IDS = ["mlp", "clipped", "activations", "autocast", "bfloat16", "batch-norm"]


@pytest.mark.parametrize(("make_model", "make_optimizer", "dtype", "options"), KINDS, ids=KIND_IDS)
def test_the_peak_does_not_grow_with_the_number_of_micro_batches(make_model, make_optimizer, dtype, options):
    two = peak_with(2, make_model, make_optimizer, dtype, **options)

    for num_micro_batches in (3, 8, 64):
        peak = peak_with(num_micro_batches, make_model, make_optimizer, dtype, **options)
        # One number for each micro-batch, its loss, and once more when they are stacked and summed.
        assert peak - two <= 16 * num_micro_batches


@pytest.mark.parametrize(("make_model", "make_optimizer", "dtype", "options"), KINDS, ids=KIND_IDS)
def test_a_second_micro_batch_costs_no_more_than_the_gradients(make_model, make_optimizer, dtype, options):
    one, two = (peak_with(k, make_model, make_optimizer, dtype, **options) for k in (1, 2))

    # Gradients of 16-bit parameters are added up in float32.
    gradients = sum(p.numel() * max(p.element_size(), 4) for p in make_model().to(dtype).parameters())
    assert two - one <= gradients + 64


def peak_of_the_loop_that_keeps_graphs(num_micro_batches: int) -> int:
    model, batch = wide_activations(), make_batch(MICRO_BATCH_SIZE * num_micro_batches)
    with count_peak_bytes("cpu", track=[model, batch]) as peak:
        losses = [
            loss_fn(model, part) for part in zip(batch[0].split(MICRO_BATCH_SIZE), batch[1].split(4), strict=True)
        ]
        torch.stack(losses).mean().backward()
    return peak.peak_bytes - num_bytes(*batch)


def test_one_backward_for_all_micro_batches_does_grow():
    """Control: the loop that adds the losses up and calls backward once holds all graphs; the count sees it."""
    growth = peak_of_the_loop_that_keeps_graphs(8) - peak_of_the_loop_that_keeps_graphs(2)

    assert growth > 5 * 40 * NUM_FEATURES * 4 * MICRO_BATCH_SIZE


class Witness:
    """A loss function that looks, before each forward, for what the one before has left."""

    def __init__(self) -> None:
        self.alive: list[list[str]] = []
        self._left: dict[str, weakref.ref[Any]] = {}

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.alive.append([name for name, ref in self._left.items() if ref() is not None])
        output = model(batch[0])
        loss = F.cross_entropy(output, batch[1])
        node = _Hook()
        output.grad_fn.register_hook(node)  # A node of the graph cannot be watched itself; it holds its hook.
        left = dict(output=output, loss=loss, node=node)
        self._left = {name: weakref.ref(thing) for name, thing in left.items()}
        return loss


class _Hook:
    def __call__(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def no_garbage_collector() -> Iterator[None]:
    """What is freed in here was in no cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["mean", "ratios", "fp16", "scaled by hand", "batch norm", "watched", "recomputed"])
def test_nothing_of_a_micro_batch_is_alive_at_the_next_forward(kind):
    witness: Any = Witness()
    model = cnn_with_batch_norm() if kind == "batch norm" else mlp()
    options: dict[str, Any] = {"precision": "fp16"} if kind == "fp16" else {}
    returned = witness
    if kind == "ratios":
        # One object of each micro-batch is referred to by two terms.
        def returned(model: Any, batch: Any) -> Any:
            loss = witness(model, batch)
            return dict(a=bb.Ratio(loss, 1.0), b=bb.Ratio(loss * 2, 3.0))

    if kind == "scaled by hand":
        options["precision"] = torch.amp.GradScaler("cpu")
    if kind == "recomputed":
        bb.apply(bb.Plan(micro_batch_size=3, recompute=("0", "1")), model)
    step = bb.Step(model, returned, sgd(model), micro_batch_size=3, **options)
    if kind == "watched":
        step.on_micro_batch = lambda k, num: None

    with no_garbage_collector():
        for _ in range(2):
            step(make_batch(10))

    assert len(witness.alive) == 8
    assert witness.alive == [[]] * 8


def test_a_running_loss_with_its_graph_is_found():
    """Control: the loop of many tutorials."""
    witness, model, total = Witness(), mlp(), torch.zeros(())
    for part in zip(*(tensor.split(3) for tensor in make_batch(10)), strict=True):
        loss = witness(model, part)
        (loss / 4).backward()
        total = total + loss

    assert witness.alive[1] != []


def test_after_an_error_nothing_is_kept_but_by_its_traceback():
    model, refs = mlp(), []

    def fails_at_the_third(model: nn.Module, batch: Batch) -> Tensor:
        loss = loss_fn(model, batch)
        refs.append(weakref.ref(loss))
        if len(refs) == 3:
            raise RuntimeError("as if")
        return loss

    step = bb.Step(model, fails_at_the_third, sgd(model), micro_batch_size=3)
    with no_garbage_collector():
        with contextlib.suppress(RuntimeError):
            step(make_batch(10))

        assert len(refs) == 3
        assert [ref() for ref in refs] == [None] * 3


@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_a_thousand_steps_without_growth(kind):
    model = cnn_with_batch_norm() if kind == "everything" else nn.Linear(NUM_FEATURES, 5)
    options: dict[str, Any] = dict(micro_batch_size=2, max_grad_norm=1.0)
    if kind == "everything":
        options |= dict(precision="bf16", ema=AveragedModel(model), weight=lambda part: part[0][:, 0].abs().sum())
    step = bb.Step(model, loss_fn, sgd(model), **options)
    # Other numbers each time, and so other shares: a cache of them must end somewhere.
    batches = [make_batch(4 + i % 3) for i in range(100)]
    step(batches[0])

    def run(num_steps: int) -> None:
        for i in range(num_steps):
            step(batches[i % 100])

    tensors, objects, num_bytes_alive = [], [], []
    for num_steps in (180, 380, 380):
        run(num_steps)
        with LiveBytes() as live:  # Makes a step slower, so only some of them are counted.
            live.track(step, model, *step.optimizers, batches)
            run(20)
            num_bytes_alive.append(live.current_bytes())
        del live
        gc.collect()
        everything = gc.get_objects()
        tensors.append(sum(issubclass(type(thing), Tensor) for thing in everything))
        objects.append(len(everything))
        del everything

    assert step.num_steps == 1001
    assert len(set(num_bytes_alive)) == 1
    assert len(set(tensors)) == 1
    assert objects[2] - objects[1] < 20


# Measuring


MEASURED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], dict[str, Any]]] = {
    "sgd": (mlp, sgd, {}),
    "adamw foreach": (mlp, adamw_foreach, {}),
    "adamw fused": (mlp, adamw_fused, {}),
    "activations": (wide_activations, sgd, {}),
    "clipped": (mlp, adamw_foreach, dict(max_grad_norm=0.1)),
    "bf16": (wide_activations, adamw_foreach, dict(precision="bf16")),
    "fp16": (wide_activations, sgd, dict(precision="fp16")),
    "batch norm": (cnn_with_batch_norm, sgd, {}),
    "frozen batch norm": (cnn_with_batch_norm, sgd, dict(batch_norm="frozen")),
    "two ratios": (mlp, sgd, {}),
    "bfloat16 parameters": (lambda: mlp().bfloat16(), adamw_foreach, {}),
}


def two_ratios(model: nn.Module, batch: Batch) -> Any:
    loss = loss_fn(model, batch)
    return dict(a=bb.Ratio(loss * len(batch[1]), len(batch[1])), b=bb.Ratio(loss, batch[1].sum() + 1))


@pytest.mark.parametrize("num_samples", [4, 8, 22], ids=["K=1", "K=2", "K=6"])
@pytest.mark.parametrize("kind", list(MEASURED))
def test_what_is_measured_is_the_peak_of_a_steady_step(kind, num_samples):
    make_model, make_optimizer, options = MEASURED[kind]
    model = make_model()
    batch = make_batch(num_samples, next(model.parameters()).dtype)
    step = bb.Step(
        model,
        two_ratios if kind == "two ratios" else loss_fn,
        make_optimizer(model),
        micro_batch_size=MICRO_BATCH_SIZE,
        **options,
    )

    measured = step.measure(batch, MICRO_BATCH_SIZE)

    assert measured == pytest.approx(peak_of_a_steady_step(step, batch), rel=0.01)


def test_what_is_measured_tells_a_larger_micro_batch():
    """Control: the tolerance above sees one sample more."""
    model = wide_activations()
    step = bb.Step(model, loss_fn, sgd(model), micro_batch_size=4)
    batch = make_batch(24)

    assert step.measure(batch, 5) > 1.05 * step.measure(batch, 4)


def test_measuring_counts_the_average():
    model = mlp()
    batch, plain = make_batch(8), bb.Step(model, loss_fn, sgd(model), micro_batch_size=4)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn())  # in place: it adds nothing for a moment
    averaged = bb.Step(model, loss_fn, sgd(model), micro_batch_size=4, ema=average)

    added = averaged.measure(batch, 4) - plain.measure(batch, 4)

    assert added == pytest.approx(num_bytes(*model.parameters()), rel=0.01)


@pytest.mark.parametrize("how", ["mean", "function", "foreach"])
def test_measuring_counts_what_the_update_of_an_average_takes(how):
    """The first two make new tensors, while the gradients are still there."""
    functions: dict[str, dict[str, Any]] = {
        "mean": {},
        "function": dict(avg_fn=get_ema_avg_fn()),
        "foreach": dict(multi_avg_fn=get_ema_multi_avg_fn()),
    }
    model, batch = mlp(), make_batch(8)
    average = AveragedModel(model, **functions[how])
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4, ema=average)
    before = copy.deepcopy(average.state_dict())

    measured = step.measure(batch, 4)

    assert all(torch.equal(before[name], tensor) for name, tensor in average.state_dict().items())
    assert measured == pytest.approx(peak_of_a_steady_step(step, batch, average), rel=0.01)


def test_measuring_agrees_for_a_recomputed_model():
    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Tanh()) for _ in range(8)))

    plan = bb.Plan(micro_batch_size=128, recompute=("1", "2", ("3", "4"), "5", "6", "7"))
    model, plain_model, batch = deep(), deep(), make_batch(384)
    step = bb.Step(model, loss_fn, sgd(model), plan=plan)
    plain = bb.Step(plain_model, loss_fn, sgd(plain_model), micro_batch_size=128)

    measured = step.measure(batch, 128)

    assert measured == pytest.approx(peak_of_a_steady_step(step, batch), rel=0.01)
    assert measured < 0.8 * plain.measure(batch, 128)


def pad(samples: list[Tensor]) -> Batch:
    """Sequences of different lengths, padded to the longest of these."""
    x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return x, torch.zeros(len(samples), dtype=torch.long)


class OverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(1)


@pytest.mark.parametrize("longest", [0, 11], ids=["first", "last"])
def test_measuring_agrees_for_samples_that_are_collated(longest):
    """On CPU all micro-batches lie there from the beginning, and the longest sample may be in any of them."""
    torch.manual_seed(3)
    samples = [torch.randn(60 if i == longest else 5, NUM_FEATURES) for i in range(12)]
    model = OverTime()
    step = bb.Step(model, loss_fn, sgd(model), micro_batch_size=2, collate=pad)

    measured = step.measure(samples, 2)

    assert measured == pytest.approx(peak_of_a_steady_step(step, samples), rel=0.01)


def with_mask() -> tuple[nn.Module, int]:
    model = mlp()
    model.register_buffer("mask", torch.ones(300, 300))
    return model, num_bytes(model.mask)


def test_a_buffer_that_never_changes_is_not_copied_in_a_steady_step():
    model, mask_bytes = with_mask()
    plain_model, batch = mlp(), make_batch(8)
    step, plain = (bb.Step(m, loss_fn, sgd(m), micro_batch_size=4) for m in (model, plain_model))

    assert peak_of_a_steady_step(step, batch) == peak_of_a_steady_step(plain, batch) + mask_bytes


def test_a_buffer_that_never_changes_is_not_copied_after_measuring():
    model, mask_bytes = with_mask()
    plain_model, batch = mlp(), make_batch(8)
    step, plain = (bb.Step(m, loss_fn, sgd(m), micro_batch_size=4) for m in (model, plain_model))

    measured = [step.measure(batch, 4) for _ in range(2)]
    real = peak_of_a_steady_step(step, batch)

    assert real == peak_of_a_steady_step(plain, batch) + mask_bytes
    assert measured == [real] * 2


def test_measuring_counts_a_batch_that_is_cut_already():
    model, parts = mlp(), [make_batch(3), make_batch(5), make_batch(4)]
    step = bb.Step(model, loss_fn, sgd(model))
    batch = bb.LogicalBatch(parts)

    assert step.measure(batch, None) == pytest.approx(peak_of_a_steady_step(step, batch, parts), rel=0.01)


def test_measuring_the_whole_batch_at_once():
    model, batch = wide_activations(), make_batch(9)
    step = bb.Step(model, loss_fn, sgd(model))

    assert step.measure(batch, None) == step.measure(batch, 9)
    assert step.measure(batch, None) == pytest.approx(peak_of_a_steady_step(step, batch), rel=0.01)


@pytest.mark.parametrize("layout", ["shared", "transposed"])
def test_measuring_follows_the_layout_of_the_batch(layout):
    """A large tensor that all samples share is whole in the trial; samples along dimension 1 are cut there."""
    model = nn.Linear(NUM_FEATURES, 5)
    x, y = make_batch(40)
    if layout == "shared":
        batch: Any = dict(x=x, y=y, shared=torch.randn(500, NUM_FEATURES))
        options: dict[str, Any] = dict(batch_dims={"shared": None})
    else:
        batch, options = dict(x=x.T.contiguous(), y=y), dict(batch_dims={"x": 1})

    def loss_of(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        x = part["x"] + part["shared"].mean(0) if layout == "shared" else part["x"].T
        return F.cross_entropy(model(x), part["y"])

    step = bb.Step(model, loss_of, sgd(model), micro_batch_size=8, **options)
    measured = step.measure(batch, 8)

    assert measured == pytest.approx(peak_of_a_steady_step(step, batch), rel=0.01)


def test_a_deep_copy_is_what_the_trial_must_not_make():
    """Control: a copy of the model on the device would be seen."""
    model, batch = mlp(), make_batch(8)
    no_undo: dict[str, Any] = dict(on_out_of_memory="raise")  # its copies are as large as the model too
    step = bb.Step(
        model, lambda m, b: loss_fn(copy.deepcopy(m), b) + 0 * loss_fn(m, b), sgd(model), micro_batch_size=4, **no_undo
    )
    plain = bb.Step(model, loss_fn, sgd(model), micro_batch_size=4, **no_undo)

    assert step.measure(batch, 4) > plain.measure(batch, 4) + 0.9 * num_bytes(*model.parameters())
