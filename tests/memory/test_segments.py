"""A group of neighbours is recomputed as one, whatever the model does with what passes between them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes
from tests.reference import assert_same_gradients, gradient_error, gradients

GROUP = (("blocks.0", "blocks.1", "blocks.2"),)
ONE_BY_ONE = ("blocks.0", "blocks.1", "blocks.2")


class Block(nn.Module):
    def __init__(self, width: int = 5, inplace: bool = False):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.Dropout(0.3)
        self.down, self.act = nn.Linear(4 * width, width), nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor, scale: Any = 1.0, *, shift: Any = None) -> Tensor:
        output = self.down(self.drop(torch.tanh(self.norm(self.up(x))))) * scale
        return self.act(output if shift is None else output + shift)


class Net(nn.Module):
    """Calls its blocks in order; what it does with what passes between them is up to ``how``."""

    def __init__(self, how: str = "in order", inplace: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(inplace=inplace) for _ in range(3))
        self.head = nn.Linear(5, 1)
        self.scale, self.shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(5))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        how, scale, passed = self.how, self.scale.exp(), []
        for index, block in enumerate(self.blocks):
            if how == "other input" and index == 1:
                x = x * 2
            if how == "changed in place" and index == 1:
                x.mul_(2)
            if how == "skipped" and index == 1:
                continue
            if how == "other argument" and index == 1:
                x = block(x, self.scale.exp())
            elif how == "one argument more" and index == 1:
                x = block(x, scale, shift=self.shift)
            elif how == "by name":
                x = block(x=x)
            elif how == "arguments":
                x = block(x, scale, shift=self.shift)
            elif how == "numbers":
                x = block(x, 0.5 * 3, shift=0.25)
            elif how == "tuple":
                x = block((x,) if index == 1 else x)
            else:
                x = block(x, scale)
            passed.append(x)
            if how == "early exit" and index == 0:
                return self.head(x)
        if how == "collected":
            return self.head(torch.stack(passed).sum(0) * passed[0])
        if how == "twice":
            for block in self.blocks:
                x = block(x, scale)
        return self.head(x)


def plan(*names: Any) -> bb.Plan:
    return bb.Plan(micro_batch_size=8, recompute=names)


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    return gradients(model)


def inputs() -> Tensor:
    return torch.randn(6, 5, dtype=torch.float64)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("how", ["in order", "arguments", "numbers", "collected", "twice", "early exit"])
def test_gradients_and_statistics_are_those_without_recompute(how, inplace):
    model, x = Net(how, inplace).double(), inputs()
    plain = copy.deepcopy(model)
    expected = run(plain, x)

    with bb.apply(plan(*GROUP), model):
        found = run(model, x)

    assert_same_gradients(found, expected, tolerance=1e-15)
    for (name, buffer), wanted in zip(model.named_buffers(), plain.buffers(), strict=True):
        # A group is run as a whole, also the part that an early exit then does not ask for.
        assert torch.equal(buffer, wanted) or (how == "early exit" and not name.startswith("blocks.0"))


def test_control_the_last_output_in_the_place_of_each_is_another_gradient():
    """What a group does that hands out its last output at once, and the model collects them."""
    model, x = Net("collected").double(), inputs()
    expected = run(model, x)

    class Wrong(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, self.scale.exp())
            return self.head((x + x + x) * x)

    model.__class__ = Wrong
    assert gradient_error(run(model, x), expected) > 0.1


def kept(model: nn.Module, x: Tensor, *names: Any) -> int:
    gc.collect()
    live = LiveBytes()
    with bb.apply(plan(*names), model), live:
        output = model(x)
        found = live.current_bytes()
    del output
    return found


def test_a_group_keeps_less_than_its_modules_one_by_one():
    model, x = nn.Sequential(*(Block(16) for _ in range(4))), torch.randn(64, 16)

    nothing, single, grouped = (
        kept(model, x, *names) for names in ((), ("0", "1", "2", "3"), (("0", "1"), ("2", "3")))
    )

    one = 64 * 16 * 4
    assert single - grouped == 2 * one, "in each group, one tensor between two modules"
    assert nothing > 4 * single


def test_each_module_runs_twice_and_in_order():
    model, x, calls = Net().double(), inputs(), []
    for name in ONE_BY_ONE:
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.append(name))

    with bb.apply(plan(*GROUP), model):
        run(model, x)

    assert calls == [*ONE_BY_ONE, *ONE_BY_ONE]


WRONG = [
    ("other input", "was called with another tensor, of shape \\(6, 5\\)"),
    ("changed in place", "what 'blocks.0' returned was changed in place in between"),
    ("skipped", "'blocks.1' and 'blocks.2' .* but it was called with another tensor"),
    ("other argument", "its positional argument 1 was another Tensor than that of the first one"),
    ("one argument more", "it got \\(Tensor, shift=Parameter\\) and the first one \\(Tensor\\)"),
    ("by name", "was not called with a tensor as its first positional argument \\(found \\(x=Tensor\\)\\)"),
    ("tuple", "its first positional argument was tuple"),
]


@pytest.mark.parametrize(("how", "message"), WRONG, ids=[how for how, _ in WRONG])
def test_a_module_whose_sole_input_is_not_the_one_before_is_refused(how, message):
    model, x = Net(how).double(), inputs()

    with bb.apply(plan(*GROUP), model):
        with pytest.raises(bb.RecomputeError, match=message):
            model(x)
        model.how = "in order"
        found = run(model, x)  # and nothing of it is left over

    assert_same_gradients(found, run(model, x), tolerance=1e-15)


def test_a_module_that_returns_more_than_a_tensor_is_refused():
    model = nn.Sequential(nn.LSTM(5, 5), nn.Linear(5, 1))

    with bb.apply(plan(("0", "1")), model), pytest.raises(bb.RecomputeError, match="'0' .* returned tuple"):
        model(torch.randn(3, 5))


def test_an_error_in_the_middle_leaves_nothing_behind():
    model, x = Net().double(), inputs()
    expected = run(model, x)
    broken = model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("broken")))

    with bb.apply(plan(*GROUP), model):
        with pytest.raises(ValueError, match="broken"):
            model(x)
        broken.remove()
        assert_same_gradients(run(model, x), expected, tolerance=1e-15)


def test_what_a_model_never_asks_for_is_freed_with_what_it_asked_for():
    model, x, refs = Net("early exit").double(), inputs(), []
    model.blocks[2].register_forward_hook(lambda _, __, output: refs.append(weakref.ref(output)))

    with bb.apply(plan(*GROUP), model):
        model(x).sum().backward()

    assert [ref() for ref in refs] == [None]


def test_part_of_a_group_without_grad_mode_is_refused_and_all_of_it_is_a_plain_call():
    model, x = nn.Sequential(Block(), Block(), Block()).double(), inputs()

    with bb.apply(plan(("0", "1")), model):
        with torch.no_grad():
            first = model[0](x)
            model(x)
        with pytest.raises(bb.RecomputeError, match="'1' was called with another|but it was called with another"):
            model[1](first)


def test_a_module_that_returns_its_input_may_be_in_a_group():
    model, x = (
        nn.Sequential(nn.Identity(), nn.Linear(5, 5), nn.Dropout(0.0), nn.Identity(), nn.Tanh()).double(),
        inputs(),
    )
    expected = run(model, x)

    with bb.apply(plan(("0", "1", "2", "3"), "4"), model):
        assert_same_gradients(run(model, x), expected, tolerance=0)
        assert_same_gradients(run(model, x), expected, tolerance=0)
    assert not vars(x)


def test_groups_work_in_double_backward():
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))).double(), inputs()[:, :3]

    def penalty(model: nn.Module) -> dict[str, Tensor | None]:
        model.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        return gradients(model)

    expected = penalty(model)
    with bb.apply(plan(("0", "1", "2")), model):
        assert_same_gradients(penalty(model), expected, tolerance=1e-14)


def test_old_weight_norm_in_a_group_computes_its_weight_each_time():
    with pytest.warns(FutureWarning):
        model = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(5, 5)) for _ in range(3))).double()
    x = inputs()
    expected = run(model, x)

    with bb.apply(plan(("0", "1", "2")), model):
        assert_same_gradients(run(model, x), expected, tolerance=1e-15)
        assert_same_gradients(run(model, x), expected, tolerance=1e-15)


def test_a_module_compiled_in_place_cannot_be_in_a_group():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile(backend="eager")

    with pytest.raises(bb.RecomputeError, match=r"'1' was compiled in place"):
        bb.apply(plan(("0", "1")), model)
