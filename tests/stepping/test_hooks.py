"""Gradient hooks: one that looks or scales is fine; an optimizer fused into backward is refused, and undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.stepping.hooks import HookWatch
from tests.reference import assert_same_gradients, assert_same_weights, big_batch_gradients, gradients

X, Y = (
    torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3),
    torch.linspace(0, 1, 6, dtype=torch.float64)[:, None],
)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()


# ----- fine


def test_a_hook_that_counts_is_left_alone():
    model, seen = make_model(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
        p.register_hook(lambda gradient: seen.append("before"))

    bb.accumulate(model, loss_fn, (X, Y), micro_batch_size=2)

    assert len(seen) == 2 * 4 * 3
    assert_same_gradients(gradients(model), big_batch_gradients(make_model(), loss_fn, (X, Y)))


def test_a_hook_that_scales_the_gradient_is_left_alone():
    """Gradient reversal, and a smaller learning rate for one layer: linear, so micro-batches add up."""
    model = make_model()
    model[0].weight.register_hook(lambda gradient: gradient * -0.5)

    bb.accumulate(model, loss_fn, (X, Y), micro_batch_size=2)

    expected = big_batch_gradients(make_model(), loss_fn, (X, Y))
    assert_same_gradients(gradients(model), {**expected, "0.weight": expected["0.weight"] * -0.5})


def test_a_hook_of_a_module_that_looks_is_left_alone():
    model, seen = make_model(), []
    model[2].register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0].shape))

    bb.accumulate(model, loss_fn, (X, Y), micro_batch_size=4)

    assert seen == [(4, 1), (2, 1)]


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_as_they_were(fails):
    model = make_model()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)

    def maybe(model: Any, batch: Any) -> Any:
        return None if fails else loss_fn(model, batch)

    try:
        bb.accumulate(model, maybe, (X, Y), micro_batch_size=2)
    except bb.LossError:
        assert fails

    assert [len(p._post_accumulate_grad_hooks) for p in model.parameters()] == [1] * 4
    assert not any(p._backward_hooks for p in model.parameters())


def test_without_hooks_nothing_is_watched():
    model = make_model()
    watch = HookWatch(dict(model.named_parameters()), model.modules(), set())

    assert watch._copies == {}
    watch.check()


# ----- fused


def optimizer_per_parameter(model: nn.Module) -> None:
    """As in torch's tutorial on fusing the optimizer step into backward."""
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)


def step_without_clearing(model: nn.Module) -> None:
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())


def write_to_data(model: nn.Module) -> None:
    """Leaves no version behind."""

    def write(p: Tensor) -> None:
        p.data.sub_(p.grad * 0.1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(write)


def clear(model: nn.Module) -> None:
    """Keeps its own sum, and lets go of ours."""

    def let_go(p: Tensor) -> None:
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(let_go)


def update_the_others(model: nn.Module) -> None:
    """As LOMO: a hook before accumulation updates every parameter whose gradient is there already."""

    def update(gradient: Tensor) -> Tensor:
        for p in model.parameters():
            if p.grad is not None:
                p.data.sub_(p.grad * 0.1)
                p.grad = None
        return gradient

    for p in model.parameters():
        p.register_hook(update)


def clear_before_accumulating(model: nn.Module) -> None:
    """What was added up so far is forgotten, and only the last micro-batch counts."""

    def forget(gradient: Tensor) -> None:
        model[0].weight.grad = None

    model[0].weight.register_hook(forget)


def step_from_a_module(model: nn.Module) -> None:
    """When backward comes past it, the layers after it have their gradients."""
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model[1].register_full_backward_hook(lambda *_: optimizer.step())


def step_from_the_accumulation_node(model: nn.Module) -> None:
    """As before there were hooks after accumulation."""
    model.nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for p, node in zip(model.parameters(), model.nodes, strict=True):
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(*_: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        node.register_hook(step)


FUSED: dict[str, Callable[[nn.Module], None]] = {
    fuse.__name__: fuse
    for fuse in (
        optimizer_per_parameter,
        step_without_clearing,
        write_to_data,
        clear,
        update_the_others,
        clear_before_accumulating,
        step_from_a_module,
        step_from_the_accumulation_node,
    )
}
every_fused = pytest.mark.parametrize("fuse", FUSED.values(), ids=FUSED)


def assert_refused_and_undone(model: nn.Module, run: Callable[[], Any]) -> None:
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(bb.GradientError, match="During backward .*(changed|cleared).*Remove (its|the) hooks") as caught:
        run()

    if hasattr(model, "nodes"):  # torch tells nobody which hooks a node of the graph has, so nothing was copied
        assert "could not be undone" in str(caught.value)
        return
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items()), "parameters have moved"
    assert all(p.grad is None for p in model.parameters())


@every_fused
@pytest.mark.parametrize("micro_batch_size", [2, 3])
def test_accumulate_refuses_a_fused_optimizer(fuse, micro_batch_size):
    model = make_model()
    fuse(model)

    assert_refused_and_undone(model, lambda: bb.accumulate(model, loss_fn, (X, Y), micro_batch_size=micro_batch_size))


@every_fused
def test_the_first_step_refuses_a_fused_optimizer(fuse):
    model = make_model()
    step = bb.Step(model, loss_fn, torch.optim.AdamW(model.parameters()), micro_batch_size=2)
    fuse(model)

    assert_refused_and_undone(model, lambda: step((X, Y)))
    assert step.num_steps == 0
    assert not step.optimizers[0].state


@every_fused
def test_a_later_step_refuses_an_optimizer_that_was_fused_since(fuse):
    """What is copied only in the first step cannot be put back in a later one."""
    model = make_model()
    step = bb.Step(model, loss_fn, torch.optim.AdamW(model.parameters()), micro_batch_size=2)
    step((X, Y))
    fuse(model)

    assert_refused_and_undone(model, lambda: step((X, Y)))
    assert step.num_steps == 1


def test_the_parameters_are_named():
    model = make_model()

    def write(p: Tensor) -> None:
        p.data.zero_()

    model[2].bias.register_post_accumulate_grad_hook(write)

    with pytest.raises(bb.GradientError, match=r"a gradient hook changed \['2.bias'\]"):
        bb.accumulate(model, loss_fn, (X, Y), micro_batch_size=2)


def test_a_gradient_that_is_cleared_is_named():
    model = make_model()

    def let_go(p: Tensor) -> None:
        p.grad = None

    model[2].bias.register_post_accumulate_grad_hook(let_go)

    with pytest.raises(bb.GradientError, match=r"a gradient hook cleared .grad of \['2.bias'\]"):
        bb.accumulate(model, loss_fn, (X, Y), micro_batch_size=2)


def test_it_is_refused_after_the_first_micro_batch():
    model, calls = make_model(), []
    optimizer_per_parameter(model)

    def counted(model: Any, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return loss_fn(model, batch)

    with pytest.raises(bb.GradientError, match="During backward"):
        bb.accumulate(model, counted, (X, Y), micro_batch_size=2)

    assert calls == [2]


def test_a_fused_optimizer_is_not_the_step_of_the_big_batch():
    """Control: run by hand in micro-batches, it ends elsewhere."""
    fused, plain = make_model(), make_model()
    optimizer_per_parameter(fused)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    for i in range(0, 6, 2):
        (loss_fn(fused, (X[i : i + 2], Y[i : i + 2])) / 3).backward()
    loss_fn(plain, (X, Y)).backward()
    optimizer.step()

    with pytest.raises(AssertionError, match="gradient error"):
        assert_same_weights(fused, plain, tolerance=1e-6)
