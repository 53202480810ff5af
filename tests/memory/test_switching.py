"""Recompute is put on and taken off without a trace, and whatever else was done to a module stays."""

from __future__ import annotations

import copy
import functools
import inspect
import io
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

import bigbatch as bb
from tests.process_group import in_process_group_of_one
from tests.reference import assert_same_gradients, gradient_error, gradients

PLANS = [("0",), ("0", "2"), (("0", "1"),), (("0", "1"), "2"), (("0", "1", "2"),)]


class Block(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return torch.tanh(self.norm(self.linear(x))) * scale


def make_model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(4, 1)).double()


def plan(*names: Any) -> bb.Plan:
    return bb.Plan(micro_batch_size=8, recompute=names)


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    return gradients(model)


def num_runs(model: nn.Module) -> list[int]:
    """How often the forward of each block runs in a step."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    before = [block.calls for block in blocks]
    run(model, torch.randn(6, 4, dtype=torch.float64))
    after = [block.calls for block in blocks]
    return [b - a for a, b in zip(before, after, strict=True)]


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(module).items() if name != "calls"} for module in model.modules()]


@pytest.mark.parametrize("names", PLANS, ids=str)
def test_on_and_off_leaves_no_trace(names):
    model = make_model()
    before, keys, kinds = attributes(model), list(model.state_dict()), [type(m) for m in model.modules()]
    handle = bb.apply(None, model)

    for _ in range(3):
        handle = bb.apply(plan(*names), model)
        assert list(model.state_dict()) == keys
        assert [type(module) for module in model.modules()] == kinds
        flat = [one for name in names for one in ([name] if isinstance(name, str) else name)]
        assert num_runs(model) == [2 if str(i) in flat else 1 for i in range(3)]
        handle.remove()
        assert attributes(model) == before
        assert num_runs(model) == [1, 1, 1]
    handle.remove()
    assert attributes(model) == before


def test_a_plan_replaces_the_one_before_and_its_end_puts_that_back():
    model = make_model()
    before = attributes(model)

    first = bb.apply(plan("0"), model)
    with bb.apply(plan(("1", "2")), model):
        assert num_runs(model) == [1, 2, 2]
        with bb.apply(plan("0"), model), bb.apply(None, model):
            assert num_runs(model) == [1, 1, 1]
        assert num_runs(model) == [1, 2, 2]
    assert num_runs(model) == [2, 1, 1]
    second = bb.apply(plan("2"), model)
    first.remove()
    assert num_runs(model) == [1, 1, 2], "a later plan is in force: the earlier handle says nothing any more"
    bb.apply(None, model)
    second.remove()
    assert attributes(model) == before


def test_a_plan_for_a_part_is_replaced_by_one_for_the_whole():
    model = make_model()
    whole = nn.Sequential(model, nn.Tanh())
    before = attributes(model)
    inner = bb.apply(plan("0"), model)

    with bb.apply(plan("0.1"), whole):
        assert num_runs(model) == [1, 2, 1]
        inner.remove()
        assert num_runs(model) == [1, 2, 1]

    assert attributes(model) == before


def test_an_error_in_the_block_takes_it_off():
    model = make_model()
    before = attributes(model)

    with pytest.raises(ValueError, match="mine"), bb.apply(plan("0", ("1", "2")), model):
        raise ValueError("mine")

    assert attributes(model) == before


@pytest.mark.parametrize("names", PLANS, ids=str)
def test_a_copy_recomputes_with_its_own_parameters(names):
    model = make_model()
    bb.apply(plan(*names), model)
    twin = copy.deepcopy(model)
    averaged = AveragedModel(model).module
    x = torch.randn(6, 4, dtype=torch.float64)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    plain = copy.deepcopy(twin)
    bb.apply(None, plain)
    model.zero_grad()

    found, expected = run(twin, x), run(plain, x)

    assert_same_gradients(found, expected, tolerance=1e-14)
    assert all(parameter.grad is None for parameter in [*model.parameters(), *averaged.parameters()])
    assert gradient_error(run(model, x), expected) > 0.1, "control: the original's are others"
    assert num_runs(twin) == num_runs(model) == num_runs(averaged) != [1, 1, 1]
    assert num_runs(plain) == [1, 1, 1], "off in the copy"
    bb.apply(None, twin)
    assert num_runs(model) != [1, 1, 1], "off in the copy alone"


def test_control_a_closure_over_the_module_computes_with_the_original():
    model = make_model()
    model[0].forward = functools.partial(type(model[0]).forward, model[0])
    closure = model[0].forward
    model[0].forward = lambda x: closure(x)
    twin = copy.deepcopy(model)

    run(twin, torch.randn(6, 4, dtype=torch.float64))

    assert twin[0].linear.weight.grad is None
    assert model[0].linear.weight.grad is not None


@pytest.mark.parametrize("names", PLANS, ids=str)
def test_a_model_saved_whole_loads_with_recompute_off(names):
    model, file = make_model(), io.BytesIO()
    bb.apply(plan(*names), model)

    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)

    assert b"bigbatch.memory" not in file.getvalue()
    assert num_runs(loaded) == [1, 1, 1]
    with bb.apply(plan(*names), loaded):
        assert num_runs(loaded) == num_runs(model)
    assert num_runs(loaded) == [1, 1, 1]


def test_the_signature_is_that_of_the_class():
    model = make_model()
    bb.apply(plan("0"), model)

    assert list(inspect.signature(model[0].forward).parameters) == ["x", "scale"]
    assert inspect.ismethod(model[0].forward)
    assert model[0].forward.__self__ is model[0]


def hook_calls(model: nn.Module) -> list[str]:
    """What hooks of the blocks and of the layers in them are called, in order, in a forward and in a backward."""
    calls: list[str] = []
    handles = []
    for name, module in model.named_modules():
        if name in ("0", "1", "0.linear"):
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: calls.append(f"{name} in")))
            handles.append(module.register_forward_hook(lambda *_, name=name: calls.append(f"{name} out")))
            handles.append(module.register_full_backward_hook(lambda *_, name=name: calls.append(f"{name} back")))
    output = model(torch.randn(6, 4, dtype=torch.float64).requires_grad_())
    calls.append("|")
    output.sum().backward()
    for handle in handles:
        handle.remove()
    return calls


def test_hooks_of_a_module_run_once_and_those_inside_it_again():
    model = make_model()
    forward = ["0 in", "0.linear in", "0.linear out", "0 out", "1 in", "1 out", "|"]
    assert hook_calls(model) == [*forward, "1 back", "0.linear back", "0 back"]

    with bb.apply(plan("0", "1"), model):
        assert hook_calls(model) == [*forward, "1 back", "0.linear in", "0.linear out", "0.linear back", "0 back"]


def test_hooks_of_a_group_run_as_those_inside_one_module():
    model = make_model()
    forward = ["0 in", "0.linear in", "0.linear out", "0 out", "1 in", "1 out"]

    with bb.apply(plan(("0", "1")), model):
        found = hook_calls(model)

    assert found[: found.index("|")] == forward
    assert [call for call in found[found.index("|") :] if "back" in call] == ["1 back", "0.linear back", "0 back"]


def test_a_hook_that_changes_what_passes_is_honoured():
    model, x = make_model(), torch.randn(6, 4, dtype=torch.float64)
    model[0].register_forward_hook(lambda _, __, output: output * 3)
    model[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    expected = run(model, x)

    for names in PLANS:
        with bb.apply(plan(*names), model):
            assert_same_gradients(run(model, x), expected, tolerance=1e-14)


def test_somebodys_forward_is_called_and_put_back():
    model, x = make_model(), torch.randn(6, 4, dtype=torch.float64)
    original, calls = model[0].forward, []

    def theirs(x: Tensor) -> Tensor:
        calls.append("theirs")
        return original(x) * 2

    model[0].forward = theirs
    expected = run(model, x)
    for names in PLANS:
        calls.clear()
        with bb.apply(plan(*names), model):
            assert_same_gradients(run(model, x), expected, tolerance=1e-14)
        assert calls == ["theirs", "theirs"]
        assert model[0].forward is theirs


def test_a_wrapper_put_around_ours_keeps_working():
    model = make_model()
    handle = bb.apply(plan("0"), model)
    ours, calls = model[0].forward, []
    model[0].forward = lambda x: (calls.append("theirs"), ours(x))[1]  # what accelerate's hooks do

    assert num_runs(model) == [2, 1, 1]
    handle.remove()
    assert num_runs(model) == [1, 1, 1]
    with bb.apply(plan("0"), model):
        assert num_runs(model) == [2, 1, 1], "once, not one in the other"
    with bb.apply(plan(("0", "1")), model):
        assert num_runs(model) == [2, 2, 1]
    assert num_runs(model) == [1, 1, 1]
    assert calls
    model[0].forward = ours
    bb.apply(None, model)
    assert "forward" not in vars(model[0])


def test_hooks_of_accelerate_survive():
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = make_model(), torch.randn(6, 4, dtype=torch.float64)
    expected = run(model, x)

    class Square(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output.square()

    hooks.add_hook_to_module(model[0], Square())
    squared = run(model, x)
    with bb.apply(plan("0"), model):
        found = run(model, x)
        twin = copy.deepcopy(model)

    assert_same_gradients(found, squared, tolerance=1e-14)
    assert_same_gradients(run(twin, x), squared, tolerance=1e-14)
    assert gradient_error(squared, expected) > 0.1, "control"
    assert_same_gradients(run(model, x), squared, tolerance=1e-14)
    hooks.remove_hook_from_module(model[0])
    assert_same_gradients(run(model, x), expected, tolerance=1e-14)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.seq = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
        self.again = self.blocks[0]


WRONG = [
    (("blocks.9",), r"no module named 'blocks\.9'\. Close to it: 'blocks\.\d'"),
    (("zzzzzz",), r"no module named 'zzzzzz'\. There are 'embed', 'blocks', .* and \d+ more"),
    (("module.embed",), r"no module named 'module\.embed'\. Close to it: 'embed'"),
    (("",), r"'' is the whole model"),
    (("blocks",), r"'blocks' is a ModuleList, which is never called itself"),
    (("blocks.0", "blocks.0.linear"), r"'blocks\.0\.linear' is inside 'blocks\.0'"),
    (("seq.0.0", ("seq.0", "seq.1")), r"'seq\.0\.0' is inside 'seq\.0'"),
    (("embed", "embed"), r"names one module twice: 'embed' is 'embed'"),
    (("blocks.0", "again"), r"names one module twice: 'again' is 'blocks\.0'"),
    ((("blocks.0", "blocks.2"),), r"\('blocks\.0', 'blocks\.2'\) is no group: it must be neighbours"),
    ((("blocks.1", "blocks.0"),), r"no group: it must be neighbours, in order"),
    ((("blocks.3", "seq.0"),), r"no group"),
    ((("embed", "seq"),), r"no group: .*, and these are in a Net"),
    (((),), r"an empty group"),
]


@pytest.mark.parametrize(("names", "message"), WRONG, ids=[str(names) for names, _ in WRONG])
def test_names_that_cannot_be_recomputed_are_refused_and_nothing_moves(names, message):
    model = Net()
    before = attributes(model)

    with pytest.raises(bb.RecomputeError, match=message):
        bb.apply(plan(*names), model)

    assert attributes(model) == before


def test_a_refused_plan_leaves_the_one_before():
    model = make_model()
    bb.apply(plan("0"), model)

    with pytest.raises(bb.RecomputeError, match="no module named 'x'"):
        bb.apply(plan("1", "x"), model)

    assert num_runs(model) == [2, 1, 1]


def test_arguments_in_the_wrong_order_are_refused():
    with pytest.raises(bb.ArgumentError, match=r"found Net and Plan\. Write bb\.apply\(bb\.Plan"):
        bb.apply(Net(), plan())


def test_a_torchscript_module_is_refused():
    with pytest.warns(DeprecationWarning, match="jit"):
        model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), nn.Linear(2, 1))

    with pytest.raises(bb.RecomputeError, match="'0' is a TorchScript module"):
        bb.apply(plan("0"), model)


def test_data_parallel_is_refused():
    with pytest.raises(bb.RecomputeError, match="DataParallel"):
        bb.apply(plan("0"), nn.DataParallel(make_model()))


def test_a_distributed_model_goes_by_the_names_inside():
    def check():
        model, x = make_model(), torch.randn(6, 4, dtype=torch.float64)
        expected = run(model, x)
        wrapped = nn.parallel.DistributedDataParallel(model)
        with bb.apply(plan("0", ("1", "2")), wrapped):
            found = run(wrapped, x)
            assert num_runs(model) == [2, 2, 2]
        assert_same_gradients(
            {name.removeprefix("module."): grad for name, grad in found.items()}, expected, tolerance=1e-14
        )
        assert num_runs(model) == [1, 1, 1]

    in_process_group_of_one(check)
