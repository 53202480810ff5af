"""A planned step stays inside its budget, nothing moves by planning, and what cannot be traced is tried or refused."""

from __future__ import annotations

import copy
import random
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.errors import BigBatchWarning
from bigbatch.stepping.fitting.planner import Planner
from tests.reference import RecordingSGD, assert_same_gradients, big_batch_gradients
from tests.stepping.plannable import WORLDS, World, adamw, adapters, cnn, cross_entropy, features, images, mlp, sgd

# Nothing moves


def everything(model: nn.Module, optimizers: list[Any], *, versions: bool) -> dict[str, Any]:
    """All that planning could leave changed, by value."""
    found: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        found[f"tensor {name}"] = tensor.detach().clone(), id(tensor), tensor.requires_grad, tensor.grad
        found[f"hooks {name}"] = repr(tensor._backward_hooks)
        if versions:
            found[f"version {name}"] = tensor._version
    for name, module in model.named_modules():
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        found[f"module {name}"] = sorted(module.__dict__), module.training, [list(kind) for kind in hooks]
    for i, optimizer in enumerate(optimizers):
        # A scheduler marks an optimizer that has made a step, and a trial is one.
        names = sorted({*vars(optimizer)} - {"_opt_called"})
        found[f"optimizer {i}"] = copy.deepcopy(optimizer.state_dict()), names, len(optimizer.state)
    found["random"] = torch.get_rng_state(), random.getstate()
    found["flags"] = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )
    return found


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if not is_same(before.get(name), after.get(name))]


def hooked_mlp() -> nn.Module:
    model = mlp()
    model[1].register_forward_hook(lambda module, args, output: None)
    model[1][0].weight.register_hook(lambda gradient: gradient)
    return model


def with_scheduler(model: nn.Module) -> Any:
    optimizer = sgd(model)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # puts a step of its own on the optimizer
    return optimizer


def reading(model: nn.Module, batch: Any) -> Tensor:
    loss = cross_entropy(model, batch)
    return loss if loss.item() > 0 else 2 * loss


MOVING: dict[str, World] = {
    "cnn, all options": World(cnn, sgd, make_batch=images, options=dict(precision="fp16", max_grad_norm=0.1)),
    "transformer": WORLDS["transformer, average"],
    "hooks, a scheduler": World(hooked_mlp, with_scheduler, make_batch=features),
    "adapters": WORLDS["adapters"],
    "16 bits": WORLDS["mlp, 16 bits"],
    "cannot be traced": World(mlp, sgd, reading, features),
}


@pytest.mark.parametrize("kind", list(MOVING))
def test_nothing_moves_by_profiling_planning_or_fitting(kind):
    """Of half of the kinds before the first step, of the others after one."""
    world, after = MOVING[kind], list(MOVING).index(kind) % 2
    step, batch = world.make(micro_batch_size=5)
    for _ in range(after):
        step(batch)
    options = {name: getattr(step.options, name) for name in world.options_of(step.model)}
    arguments = step.model, world.loss_fn, batch
    before = everything(step.model, step.optimizers, versions=False)

    costs = bb.profile(*arguments, optimizer=step.optimizers, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BigBatchWarning)  # that it is found by trying
        bb.plan(*arguments, optimizer=step.optimizers, memory_budget="1GiB", **options)
    fitted = bb.Step(*arguments[:2], step.optimizers, memory_budget="1GiB", **options)
    fitted.fit(batch)
    bb.apply(None, step.model)  # what was planned is on

    assert changed(before, everything(step.model, step.optimizers, versions=False)) == []
    assert costs.parameter_bytes > 0
    step(batch)
    # Control: a step does change something.
    assert any(
        name.startswith("tensor") for name in changed(before, everything(step.model, step.optimizers, versions=False))
    )


def test_a_trace_touches_nothing_so_that_not_even_versions_change():
    world = WORLDS["transformer, average"]
    step, batch = world.make(micro_batch_size=5)
    before = everything(step.model, step.optimizers, versions=True)

    planner = Planner(step, batch)
    planner.plan(planner.traced, 10, 2**30)
    planner.peak_bytes(bb.Plan(micro_batch_size=3, recompute=("blocks.0",)), 10)

    assert changed(before, everything(step.model, step.optimizers, versions=True)) == []


@pytest.mark.parametrize("call", [1, 3, 5])
def test_after_an_error_in_the_middle_all_is_as_it_was(call):
    calls: list[int] = []

    def fails(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        loss = cross_entropy(model, batch)
        if len(calls) >= call:
            raise ZeroDivisionError("as if")
        return loss

    step, batch = World(mlp, sgd, fails, features).make(memory_budget="1GiB")
    before = everything(step.model, step.optimizers, versions=False)

    with pytest.raises(ZeroDivisionError, match="as if"):
        step.fit(batch)

    assert changed(before, everything(step.model, step.optimizers, versions=False)) == []


# Inside the budget


@pytest.mark.parametrize("kind", ["cnn", "transformer, fused", "lstm", "mlp, collated"])
def test_a_planned_step_is_inside_its_budget(kind):
    world = WORLDS[kind]
    step, batch = world.make()
    direct = step.measure(batch, None)
    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        world.make(memory_budget=1)[0].fit(batch)
    smallest = caught.value.smallest_bytes
    assert smallest is not None

    for share in (0.0, 0.5):
        budget = round(smallest + share * (direct - smallest)) if direct > smallest else smallest
        fitted, batch = world.make(memory_budget=budget)
        plan = fitted.fit(batch)
        assert fitted.measure(batch, plan.micro_batch_size) == plan.peak_bytes
        assert plan.peak_bytes <= budget
    # Control: where activations are most of it, these budgets are below what the whole batch needs.
    assert kind == "mlp, collated" or smallest < direct


def test_the_smallest_budget_is_enough_and_a_byte_less_is_not():
    world = WORLDS["transformer, no undo"]
    step, batch = world.make()
    planner = Planner(step, batch)
    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        planner.plan(planner.traced, 10, 1)
    smallest = caught.value.smallest_bytes
    assert smallest is not None

    assert planner.plan(planner.traced, 10, smallest).peak_bytes <= smallest
    with pytest.raises(bb.BudgetError, match="No plan fits") as again:
        planner.plan(planner.traced, 10, smallest - 1)
    assert again.value.smallest_bytes == smallest
    assert again.value.budget_bytes == smallest - 1


class Residual(nn.Module):
    """As in torchvision: what it adds to is changed in place, and so is the sum."""

    def __init__(self, width: int):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.relu(self.norm(self.one(x))))
        y += x
        return self.relu(y)


def test_a_module_that_changes_its_input_is_never_recomputed():
    """ReLU(inplace=True) as a block of its own. Its input would not be there to run it again."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    end = [nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    model = nn.Sequential(*stem, *(Residual(8) for _ in range(3)), *end)
    loss_fn, batch = cross_entropy_of_images, (torch.randn(24, 3, 16, 16), torch.randint(10, (24,)))
    profile = bb.profile(model, loss_fn, batch, optimizer=sgd(model), calibrate=False)

    assert "2" not in profile.recomputable
    assert "7" not in profile.recomputable
    assert "4" in profile.recomputable
    for budget in ("400KiB", "1MiB"):
        mine = copy.deepcopy(model)
        step = bb.Step(mine, loss_fn, RecordingSGD(mine), memory_budget=budget, batch_norm="frozen")
        reference = copy.deepcopy(model)
        for module in reference.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        step(batch)
        assert step.plan is not None
        assert step.plan.micro_batch_size < 24
        assert_same_gradients(
            step.optimizers[0].seen[-1], big_batch_gradients(reference, loss_fn, batch), tolerance=1e-5
        )
    # Control: by name it is torch's error.
    with bb.apply(bb.Plan(micro_batch_size=8, recompute=("2",)), model), pytest.raises(RuntimeError, match="inplace"):
        bb.accumulate(model, loss_fn, batch, micro_batch_size=8)


def cross_entropy_of_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_the_budget_that_an_error_names_is_enough():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
    batch = torch.randn(64, 64), torch.randint(10, (64,))

    def plan(budget: str) -> bb.Plan:
        return bb.plan(
            model, cross_entropy_of_images, batch, optimizer=adamw()(model), memory_budget=budget, calibrate=False
        )

    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        plan("10KiB")
    named = re.search(r" need ([\d.]+ \w+)", str(caught.value))
    assert named is not None
    assert plan(named[1]).micro_batch_size >= 1


def test_a_module_that_changes_its_buffers_is_never_recomputed():
    def spectral() -> nn.Module:
        blocks = [
            nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 64)), nn.Tanh(), nn.Linear(64, 16))
        ]
        blocks += [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Linear(16, 5))

    step, batch = World(spectral, sgd, make_batch=features).make()
    planner = Planner(step, batch)

    assert {slot.name for slot in planner.traced.slots if slot.may_recompute} >= {"1", "2", "3"}
    assert not any(slot.may_recompute for slot in planner.traced.slots if slot.name == "0")
    planner.timed(10, None)
    plan = planner.plan(planner.traced, 10, 2**30, recompute="all")
    assert set(plan.recompute) >= {"1", "2", "3"}
    assert "0" not in plan.recompute
    # Control: by name it is refused.
    with pytest.raises((bb.RecomputeError, bb.TraceError), match="changes its buffer"):
        planner.peak_bytes(bb.Plan(micro_batch_size=5, recompute=("0",)), 10)


def test_a_frozen_beginning_saves_nothing_and_is_no_choice():
    step, batch = World(adapters).make()
    planner = Planner(step, batch)

    assert not planner.traced.slots[0].saved
    trained = sum(p.nbytes for p in step.model.parameters() if p.requires_grad)
    # Beside the gradients, the loss of the first micro-batch and its coefficient are there.
    assert planner.traced.gradient_bytes == trained + 8
    # Control: it has frozen parameters too.
    assert planner.traced.parameter_bytes > 2 * planner.traced.gradient_bytes


# What cannot be traced


class Odd(nn.Module):
    """Memory, or what runs, depends on numbers."""

    def __init__(self, use: Callable[[Tensor, nn.Module], Tensor]):
        super().__init__()
        self.use = use
        self.first, self.expert, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(torch.tanh(self.first(x)), self.expert))


def only_nonzero(x: Tensor, expert: nn.Module) -> Tensor:
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, rows, expert(x[rows]))


def masked(x: Tensor, expert: nn.Module) -> Tensor:
    mask = x[:, 0] > 0
    return x.index_put((mask,), expert(x[mask]))


UNTRACEABLE: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "if": (lambda x, expert: expert(x) if x.sum() > 0 else x, "DataDependent"),
    "item": (lambda x, expert: expert(x) * x.mean().item(), "DataDependent"),
    "tolist": (lambda x, expert: expert(x) * x.mean().tolist(), "DataDependent"),
    "numpy": (lambda x, expert: expert(x) * float(x.detach().numpy().mean()), "numpy"),
    "nonzero": (only_nonzero, "nonzero"),
    "mask": (masked, "nonzero"),
    "another path for many": (lambda x, expert: torch.tanh(expert(x)) if len(x) > 4 else x + expert(x), "two sizes"),
}


@pytest.mark.parametrize("kind", list(UNTRACEABLE))
def test_what_cannot_be_traced_is_measured_with_real_tensors_and_says_why(kind, caplog):
    use, why = UNTRACEABLE[kind]
    world = World(lambda: Odd(use), sgd, make_batch=features)
    step, batch = world.make()
    measured = step.measure(batch, 4)

    costs = bb.profile(step.model, world.loss_fn, batch, optimizer=step.optimizers)
    with pytest.warns(BigBatchWarning, match=f"cannot be traced: .*{why}"):
        plan = bb.plan(
            step.model, world.loss_fn, batch, optimizer=step.optimizers, memory_budget=round(measured * 1.01)
        )
    fitted, batch = world.make(memory_budget=round(measured * 1.01))
    fitted.fit(batch)

    assert why in (costs.fallback or "")
    assert plan.micro_batch_size >= 4
    assert plan.peak_bytes <= measured * 1.01
    assert fitted.plan.peak_bytes <= measured * 1.01
    assert "cannot be traced" in caplog.text


@pytest.mark.parametrize("kind", ["if", "nonzero"])
def test_on_meta_there_is_nothing_to_measure_with(kind):
    use, why = UNTRACEABLE[kind]
    x, y = features(6)

    with pytest.raises(bb.TraceError, match=why):
        bb.profile(Odd(use).to("meta"), cross_entropy, (x.to("meta"), y.to("meta")))


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.layers = threading.Lock(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.layers(x)


def test_a_model_that_cannot_be_copied_is_tried():
    world = World(Locked, sgd, make_batch=features)
    step, batch = world.make(memory_budget="1GiB")

    assert step.fit(batch).micro_batch_size == 10
    with pytest.raises(bb.TraceError, match="lock"):
        _ = Planner(step, batch).traced


def test_all_blocks_of_a_model_that_cannot_be_traced_are_not_known():
    step, batch = World(Locked, sgd, make_batch=features).make()

    with pytest.warns(BigBatchWarning, match="cannot be traced"), pytest.raises(bb.OptionError, match="Name them"):
        bb.plan(step.model, cross_entropy, batch, optimizer=step.optimizers, memory_budget="1GiB", recompute="all")
    with pytest.warns(BigBatchWarning, match="cannot be traced"):
        plan = bb.plan(step.model, cross_entropy, batch, optimizer=step.optimizers, recompute=("layers.1",))
    assert plan.recompute == ("layers.1",)


def test_out_of_memory_in_a_trace_is_not_the_end():
    """It is simulated; but a fallback must come from wherever the trace ends."""

    def limited(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return cross_entropy(model, batch)

    step, batch = World(mlp, sgd, limited, features).make(memory_budget="1GiB")

    assert step.fit(batch).micro_batch_size == 5


def test_recompute_of_an_earlier_plan_is_off_when_sizes_are_tried():
    step, batch = World(mlp, sgd, make_batch=features).make(memory_budget="1GiB")
    step.plan = bb.Plan(micro_batch_size=10, recompute=("1",))
    bb.apply(step.plan, step.model)
    calls: list[int] = []
    step.model[1].register_forward_hook(lambda *_: calls.append(1))
    step.accumulator.loss_fn = reading

    plan = step.fit(batch)
    calls.clear()
    step(batch)

    assert plan.recompute == ()
    assert len(calls) == plan.accumulation_steps


def test_distillation_is_planned_with_its_teacher():
    teacher = mlp().requires_grad_(False)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.huber_loss(model(batch[0]), teacher(batch[0]))

    step, batch = World(mlp, adamw(), loss_fn, features).make(memory_budget="1GiB")

    assert step.fit(batch).peak_bytes == step.measure(batch, 10)
    assert not any(type(p).__name__.startswith("Fake") for p in teacher.parameters())
