"""After an error nothing has moved: parameters, buffers, optimizer, scheduler, average, scale and random numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import bigbatch as bb
from tests.stepping.test_malformed import WAYS, Bad
from tests.stepping.world import NUM_SAMPLES, Switch, World, at_second, cut, digest, good_loss, make_batch, samples


def test_the_state_sees_every_kind_of_move():
    """Control: a state that sees nothing would pass every test that compares it."""
    moves: dict[str, Callable[[World], Any]] = {
        "parameter 0.weight": lambda world: world.model[0].weight.data.mul_(1 + 1e-6),
        "grad of parameter 4.bias": lambda world: setattr(world.model[4].bias, "grad", torch.zeros(2)),
        "hooks of parameter 0.bias": lambda world: world.model[0].bias.register_hook(lambda grad: None),
        "buffer 1.running_mean": lambda world: world.model[1].running_mean.add_(1e-6),
        "buffer 1.num_batches_tracked": lambda world: world.model[1].num_batches_tracked.add_(1),
        "module 2": lambda world: world.model[2].eval(),
        "module 3.1": lambda world: world.model[3][1].register_forward_pre_hook(lambda *_: None),
        "optimizer": lambda world: world.optimizer.state[world.model[0].weight]["step"].add_(1),
        "scheduler": lambda world: setattr(world.scheduler, "last_epoch", 7),
        "ema": lambda world: world.ema.n_averaged.add_(1),
        "scaler": lambda world: world.scaler.update(new_scale=3.0),
        "torch's random numbers": lambda world: torch.rand(()),
        "Python's random numbers": lambda world: random.random(),
        "NumPy's random numbers": lambda world: np.random.rand(),
    }
    for name, move in moves.items():
        world = World()
        before = world.state()
        world.scaler.scale(torch.ones(()))
        assert world.state() == before
        move(world)
        assert {other for other, value in world.state().items() if value != before[other]} == {name}


def test_a_good_step_moves_all_of_it():
    """Control: the run is one in which a step would have moved something everywhere."""
    world = World()
    step = world.step()
    before = world.state()

    step(make_batch())

    changed = {name.split(" ")[0] for name, value in world.state().items() if before[name] != value}
    assert changed == {"parameter", "buffer", "optimizer", "scheduler", "ema", "steps", "torch's"}


# ----- errors of the user's own


def draw_and_raise(*args: Any) -> Any:
    torch.rand(3)
    raise ZeroDivisionError("by the user")


def draw_python_and_raise(*args: Any) -> Any:
    random.random()
    np.random.rand()
    raise ZeroDivisionError("by the user")


def interrupt(*args: Any) -> Any:
    raise KeyboardInterrupt("by the user")


def change_and_raise(model: Any, batch: Any) -> Any:
    model(batch["x"]).sum().backward()
    return draw_and_raise()


def logical_and_raises() -> Any:
    yield from cut(make_batch())[:2]
    draw_and_raise()


OF_THE_USER = {
    "loss": Bad(ZeroDivisionError, "by the user", at_second(draw_and_raise)),
    "loss, at once": Bad(ZeroDivisionError, "by the user", lambda: draw_and_raise),
    "loss, with a backward of its own": Bad(ZeroDivisionError, "by the user", at_second(change_and_raise)),
    "loss, interrupted": Bad(KeyboardInterrupt, "by the user", at_second(interrupt)),
    "weight": Bad(ZeroDivisionError, "by the user", options=dict(weight=draw_and_raise)),
    "collate": Bad(ZeroDivisionError, "by the user", batch=samples, options=dict(collate=draw_and_raise)),
    "collate, with Python's random numbers": Bad(
        ZeroDivisionError, "by the user", batch=samples, options=dict(collate=draw_python_and_raise)
    ),
    "split": Bad(ZeroDivisionError, "by the user", options=dict(split=draw_and_raise)),
    "loader": Bad(
        ZeroDivisionError, "by the user", batch=lambda: bb.LogicalBatch(logical_and_raises(), weight=NUM_SAMPLES)
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("bad", OF_THE_USER.values(), ids=OF_THE_USER)
def test_an_error_of_the_user_comes_through_and_nothing_moved(bad, way):
    world = World()
    run = way(world, bad)
    before = world.state()

    with pytest.raises(bad.error, match="by the user"):
        run()

    assert world.state() == before


def test_an_error_in_the_loss_says_in_which_micro_batch():
    with pytest.raises(ZeroDivisionError, match="by the user") as found:
        World().accumulate(at_second(draw_and_raise)())

    assert found.value.__notes__ == ["In micro-batch 2 of 3, samples 2 to 3."]


@pytest.mark.parametrize(
    "swapped",
    [lambda batch, model: model(batch[0]).mean(), lambda batch, model: model(batch.x).mean()],
    ids=["TypeError", "AttributeError"],
)
@pytest.mark.parametrize("how", [{"micro_batch_size": 2}, {"memory_budget": "1MiB"}], ids=["cut", "planned"])
def test_an_error_of_swapped_arguments_says_how_the_loss_is_called(swapped, how):
    model = torch.nn.Linear(3, 1)
    step = bb.Step(model, swapped, torch.optim.SGD(model.parameters()), **how)

    with pytest.raises((TypeError, AttributeError)) as found:
        step((torch.randn(6, 3),))

    assert found.value.__notes__[-1] == "The loss is called as loss_fn(model, micro_batch), in this order."


def test_no_later_error_says_how_the_loss_is_called():
    """Control: once the loss has run, its arguments are in order."""
    model = torch.nn.Linear(3, 1)
    step = bb.Step(
        model, lambda m, b: m(b["x"]).mean(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2
    )
    step({"x": torch.randn(6, 3)})

    with pytest.raises(TypeError, match="list indices") as found:
        step([torch.randn(6, 3)])

    assert found.value.__notes__ == ["In micro-batch 1 of 3, samples 0 to 1."]


def test_an_error_of_a_progress_bar_moves_nothing():
    world = World()
    step = world.step()
    step.on_micro_batch = lambda k, count: draw_and_raise() if k == 2 else None
    before = world.state()

    with pytest.raises(ZeroDivisionError, match="by the user"):
        step(make_batch())

    assert world.state() == before


def test_an_optimizer_that_raises_moves_nothing():
    class Refuses(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError("by the user")

    world = World()
    step = world.step(optimizer=Refuses(world.model.parameters(), lr=0.1), scheduler=None)
    before = world.state()

    with pytest.raises(ZeroDivisionError, match="by the user"):
        step(make_batch())

    assert world.state() == before


# ----- buffers that somebody else updates


class OwnForward(nn.BatchNorm1d):
    """Not merged, because its forward is not torch's; as timm's layers."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Noting(nn.Module):
    """Notes what it sees in training, as the codebook of a VQ-VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().mean(0)
        return x


class Expanded(nn.Module):
    """A buffer whose entries share one place in memory, which cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ones


LAYERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "native": (lambda: nn.BatchNorm1d(4), dict(batch_norm="native")),
    "a forward of its own": (lambda: OwnForward(4), {}),
    "a cumulative average": (lambda: nn.BatchNorm1d(4, momentum=None), {}),
    "native, without affine": (lambda: nn.BatchNorm1d(4, affine=False), dict(batch_norm="native")),
    "notes what it sees": (Noting, {}),
    "expanded": (Expanded, {}),
}


@pytest.mark.parametrize("num_good", [0, 1, 2])
@pytest.mark.parametrize(("make", "options"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("how", ["raises", "is not finite", "is skipped"])
def test_buffers_are_put_back_after_any_number_of_steps(make, options, num_good, how):
    """Torch's BatchNorm writes its statistics without counting a version of them; a NaN must not stay in them."""
    world = World()
    world.model[1] = make()
    bad = (
        draw_and_raise
        if how == "raises"
        else lambda model, batch: good_loss(model, {**batch, "x": batch["x"] * math.nan})
    )
    loss = Switch(good_loss, at_second(bad)())
    step = world.step(loss, on_non_finite="skip" if how == "is skipped" else "raise", ema=None, **options)
    for _ in range(num_good):
        step(make_batch())
    loss.broken = True
    before = {name: value for name, value in world.state().items() if "buffer" in name or "parameter" in name}

    if how == "is skipped":
        assert step(make_batch()).skipped
    else:
        with pytest.raises((ZeroDivisionError, bb.NonFiniteError), match="by the user|Not finite"):
            step(make_batch())

    assert {name: world.state()[name] for name in before} == before


def test_a_buffer_that_changes_for_the_first_time_is_put_back():
    """In evaluation mode it did not, so that it looked like one that never does."""
    world = World()
    world.model[1] = Noting()
    loss = Switch(good_loss, at_second(draw_and_raise)())
    step = world.step(loss, ema=None)
    world.model.eval()
    step(make_batch())
    world.model.train()
    loss.broken = True
    before = world.state()

    with pytest.raises(ZeroDivisionError, match="by the user"):
        step(make_batch())

    assert world.state() == before


def test_a_trial_leaves_an_expanded_buffer_alone():
    world = World()
    world.model[1] = Expanded()

    step = world.step(memory_budget="1GiB", micro_batch_size=None, ema=None)

    assert step(make_batch()).micro_batch_sizes == (NUM_SAMPLES,)


# ----- what fails after the gradient


def test_a_schedule_that_has_ended_raises_after_the_step_and_leaves_no_gradient():
    """OneCycleLR can count to its end and no further, as in a loop by hand; the step itself is done and counts."""
    world = World()
    step = world.step(scheduler=OneCycleLR(world.optimizer, max_lr=0.1, total_steps=1))
    step(make_batch())

    with pytest.raises(ValueError, match="total"):
        step(make_batch())

    assert step.num_steps == 2
    assert all(p.grad is None for p in world.model.parameters())


def test_a_sparse_gradient_in_an_optimizer_that_cannot_take_it_moves_no_parameter():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer = torch.optim.Adam([*model[1].parameters(), *model[0].parameters()])
    step = bb.Step(model, lambda model, batch: model(batch).square().mean(), optimizer, micro_batch_size=2)
    before = digest(model.state_dict())

    with pytest.raises(RuntimeError, match="sparse"):
        step(torch.arange(5))

    assert digest(model.state_dict()) == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "all_are_put_back"),
    [
        ({}, False),
        ({"weight": "samples"}, False),
        ({"weight": lambda batch: float(len(batch[0]))}, True),
        ({"collate": lambda samples: (torch.stack(samples),)}, True),
        ({"split": lambda batch, size: [(part,) for part in batch[0].split(size)]}, True),
    ],
    ids=["nothing", "weight by name", "weight", "collate", "split"],
)
def test_the_random_numbers_that_docs_name_are_put_back_after_an_error(options, all_are_put_back):
    """Torch's always; those of Python and NumPy where a function that makes micro-batches may draw from them."""

    def draws_and_fails(model, batch):
        _ = torch.rand(1), random.random(), np.random.rand()
        raise RuntimeError("mine")

    def drawn():
        return random.getstate(), str(np.random.get_state(legacy=False))

    model = nn.Linear(3, 1)
    batch = list(torch.randn(6, 3)) if "collate" in options else (torch.randn(6, 3),)
    of_torch, others = torch.get_rng_state(), drawn()

    with pytest.raises(RuntimeError, match="mine"):
        bb.accumulate(model, draws_and_fails, batch, micro_batch_size=2, **options)

    assert torch.equal(torch.get_rng_state(), of_torch)
    assert [now == before for now, before in zip(drawn(), others, strict=True)] == 2 * [all_are_put_back]
