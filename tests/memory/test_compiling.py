"""Recompute inside torch.compile, torch.compile inside recompute, and code that the compiler gives up on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import bigbatch as bb
from tests.reference import assert_same_gradients, gradients

CHOICES = [("blocks.0", "blocks.2"), (("blocks.0", "blocks.1"), "blocks.2")]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.linear, self.norm, self.how = nn.Linear(4, 4), nn.BatchNorm1d(4), how

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        if self.how == "graph break":
            torch._dynamo.graph_break()
        if self.how == "cache":
            cache.append(x.cos())
        return torch.tanh(self.norm(self.linear(x.sin()))) + sum(cache)


class Net(nn.Module):
    def __init__(self, how: str = "plain"):
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for block in self.blocks:
            x = block(x, cache)
        return x


def plan(*names: Any) -> bb.Plan:
    return bb.Plan(micro_batch_size=8, recompute=names)


def run(model: nn.Module, call: Any, x: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    call(x).square().sum().backward()
    return gradients(model)


def same_buffers(found: nn.Module, wanted: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found.buffers(), wanted.buffers(), strict=True))


# After a graph break Dynamo itself reads .grad of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("names", CHOICES, ids=str)
@pytest.mark.parametrize("how", ["plain", "cache", "graph break"])
def test_modules_of_a_compiled_model_are_recomputed(how, names):
    model, x = Net(how).double(), torch.randn(8, 4, dtype=torch.float64)
    plain, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=how == "plain")
    assert_same_gradients(run(model, compiled, x), run(plain, plain, x), tolerance=1e-14)

    frames = []
    for _ in range(3):
        with bb.apply(plan(*names), compiled):
            found = run(model, compiled, x)
        frames.append(counter.frame_count)
        assert_same_gradients(found, run(plain, plain, x), tolerance=1e-14)
        assert_same_gradients(run(model, compiled, x), run(plain, plain, x), tolerance=1e-14)
        assert same_buffers(model, plain), "each batch is counted once, whatever the compiler did"

    assert frames[2] == frames[1], "on and off again compiles nothing new"


def bytes_saved(call: Any, x: Tensor) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(x)
    return sum(saved.values())


def test_a_compiled_model_saves_less():
    # Saved by each block: what goes through the sine, the norm and the tanh. Recomputed: what goes in.
    model, x = Net(), torch.randn(512, 4, requires_grad=True)
    plain = bytes_saved(torch.compile(model, backend="aot_eager"), x)

    with bb.apply(plan("blocks.0", "blocks.1", "blocks.2"), model):
        torch._dynamo.reset()
        recomputed = bytes_saved(torch.compile(model, backend="aot_eager"), x)

    assert recomputed < 0.5 * plain


@pytest.mark.parametrize("how", ["apply", "module", "function", "compiled function"])
def test_compiled_code_inside_recompute_stays_compiled(how):
    model, x = Net().double(), torch.randn(8, 4, dtype=torch.float64)
    plain, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    if how != "compiled function":
        model.blocks[0] = torch.compile(model.blocks[0], backend=counter)
    first, rest = model.blocks[0], model.blocks[1:]
    compiled = torch.compile(lambda x, cache: first(x, cache), backend=counter)
    calls = dict(
        module=bb.recompute(first),
        function=bb.recompute(lambda block, x, cache: block(x, cache)),
        **{"compiled function": bb.recompute(compiled)},
    )

    def call(x: Tensor) -> Tensor:
        if how == "apply":
            return model(x)
        x = calls[how](first, x, []) if how == "function" else calls[how](x, [])
        for block in rest:
            x = block(x, [])
        return x

    for _ in range(3):
        with bb.apply(plan("blocks.0") if how == "apply" else None, model):
            found = run(model, call, x)
        found = {name.replace("_orig_mod.", ""): grad for name, grad in found.items()}
        assert_same_gradients(found, run(plain, plain, x), tolerance=1e-14)
        assert same_buffers(model, plain)
    assert counter.frame_count >= 1


def test_a_compiled_module_inside_goes_by_its_plain_name():
    model = Net()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert "blocks.1._orig_mod.linear" in dict(model.named_modules())

    with bb.apply(plan("blocks.1", "blocks.0.linear"), model) as handle:
        assert list(handle.mechanism) == ["blocks.1", "blocks.0.linear"]
    with bb.apply(plan("blocks.1.linear"), model) as handle:
        assert list(handle.mechanism) == ["blocks.1.linear"]
        assert list(inspect.signature(model.blocks[1]._orig_mod.linear.forward).parameters) == ["input"]
