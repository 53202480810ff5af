"""Compiled models: the gradient of the big batch, at most two shapes compiled, BatchNorm merged all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch as bb
from tests.reference import (
    assert_same_gradients,
    assert_same_weights,
    big_batch_gradients,
    gradients,
    train_with_big_batches,
)

NUM_FEATURES = 6
Batch = tuple[Tensor, Tensor]
# The compiler itself runs into this where it cannot follow a model in one piece (momentum=None reads a number).
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counter:
    """A backend that runs what it gets as it is, and counts the graphs by the shapes of their inputs.

    Attributes:
        batch_sizes: Of each graph that was compiled, the length of its batch; None where it is left open.
    """

    def __init__(self) -> None:
        self.batch_sizes: list[int | None] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        (length,) = {len(value) if isinstance(value.shape[0], int) else None for value in inputs if _is_x(value)}
        self.batch_sizes.append(length)
        return graph.forward


def _is_x(value: Any) -> bool:
    """Whether this is the batch, and no weight of the first layer."""
    return isinstance(value, Tensor) and value.dim() == 2 and not value.requires_grad


class Net(nn.Module):
    """Its first layer is named, so that it can be compiled by itself."""

    def __init__(self, norm: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(NUM_FEATURES, 8), norm or nn.Tanh(), nn.Tanh())
        self.last = nn.Sequential(nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def make_net(norm: Callable[[], nn.Module] | None = None) -> Net:
    torch.manual_seed(4)
    return Net(norm() if norm else None).double()


def batch_norm() -> nn.Module:
    return nn.BatchNorm1d(8)


def make_batch(num_samples: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator, dtype=torch.float64) * 2 + 1
    return x, torch.randint(0, 3, (num_samples,), generator=generator)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def whole(net: Net, backend: Any) -> nn.Module:
    """``torch.compile(model)``: another module around it."""
    return torch.compile(net, backend=backend)  # pyright: ignore[reportReturnType]


def in_place(net: Net, backend: Any) -> nn.Module:
    """``model.compile()``: the same module."""
    net.compile(backend=backend)
    return net


def part(net: Net, backend: Any) -> nn.Module:
    """One of its submodules."""
    net.first = torch.compile(net.first, backend=backend)  # pyright: ignore[reportAttributeAccessIssue]
    return net


def part_in_place(net: Net, backend: Any) -> nn.Module:
    net.first.compile(backend=backend)
    return net


WAYS = [whole, in_place, part, part_in_place]


def plain_names(found: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


def plain_buffers(model: nn.Module) -> dict[str, Tensor]:
    return plain_names(dict(model.named_buffers()))


@pytest.mark.parametrize("sizes", [(10, 4), (12, 4), (3, 8)], ids=["uneven", "even", "whole"])
@pytest.mark.parametrize("compile_it", WAYS)
def test_the_gradient_is_that_of_the_big_batch(compile_it, sizes):
    num_samples, micro_batch_size = sizes
    batch = make_batch(num_samples)
    expected = big_batch_gradients(make_net(), loss_fn, batch)
    model = compile_it(make_net(), "aot_eager")

    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=micro_batch_size)

    assert_same_gradients(plain_names(gradients(model)), expected)
    assert result.exactness == "exact"


@pytest.mark.parametrize("compile_it", WAYS)
def test_ten_steps_are_those_of_the_big_batch(compile_it):
    truth, net = make_net(), make_net()
    batches = [make_batch(10, seed) for seed in range(10)]
    train_with_big_batches(truth, loss_fn, batches, [torch.optim.AdamW(truth.parameters(), lr=0.01)], max_grad_norm=0.1)

    model = compile_it(net, "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=4, max_grad_norm=0.1)
    for batch in batches:
        step(batch)

    if compile_it in (part,):
        model.first = model.first._orig_mod
    assert_same_weights(net, truth, tolerance=1e-10)


@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "automatic"])
@pytest.mark.parametrize("compile_it", [whole, in_place])
def test_at_most_two_shapes_are_compiled(compile_it, dynamic):
    """Full micro-batches and a rest: 10 by 4 is 4, 4, 2, at every step the same."""
    counter, net = Counter(), make_net()
    if compile_it is whole:
        model = torch.compile(net, backend=counter, dynamic=dynamic)
    else:
        net.compile(backend=counter, dynamic=dynamic)
        model = net
    step = bb.Step(model, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), micro_batch_size=4)

    for seed in range(4):
        step(make_batch(10, seed))

    assert len(counter.batch_sizes) == 2
    if dynamic is False:
        assert sorted(counter.batch_sizes) == [2, 4]


def test_one_shape_when_the_cut_is_even():
    counter, net = Counter(), make_net()
    step = bb.Step(
        torch.compile(net, backend=counter), loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), micro_batch_size=4
    )

    for seed in range(4):
        step(make_batch(12, seed))

    assert counter.batch_sizes == [4]


def test_a_cut_as_equal_as_possible_has_two_shapes_too():
    """13 by 4 with BatchNorm is 4, 3, 3, 3."""
    counter, net = Counter(), make_net(batch_norm)
    model = torch.compile(net, backend=counter, dynamic=False)
    step = bb.Step(model, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), micro_batch_size=4)

    results = [step(make_batch(13, seed)) for seed in range(4)]

    assert results[-1].micro_batch_sizes == (4, 3, 3, 3)
    assert sorted(counter.batch_sizes) == [3, 4]


def test_the_loop_that_averages_micro_batches_compiles_one_shape_for_each_length():
    """Control: the counter sees every shape."""
    counter, net = Counter(), make_net()
    model = torch.compile(net, backend=counter, dynamic=False)
    for num_samples in (5, 4, 3, 2):
        loss_fn(model, make_batch(num_samples)).backward()

    assert counter.batch_sizes == [5, 4, 3, 2]


def test_recomputed_modules_of_a_compiled_model():
    batch = make_batch(10)
    expected = big_batch_gradients(make_net(), loss_fn, batch)
    net = make_net()
    model = torch.compile(net, backend="aot_eager")
    plan = bb.Plan(micro_batch_size=4, recompute=("first",))
    step = bb.Step(model, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), plan=plan)

    done = step.accumulator.run(batch, 4, step.named_parameters())

    assert_same_gradients(gradients(net), expected)
    assert done.exactness == "exact"


# BatchNorm


def steps_of(model: nn.Module, num_steps: int = 3, **options: Any) -> bb.Step:
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch_size=4, **options)
    for seed in range(num_steps):
        step(make_batch(13, seed))
    return step


def momentum_none() -> nn.Module:
    return nn.BatchNorm1d(8, momentum=None)


@pytest.mark.parametrize("norm", [batch_norm, momentum_none])
@pytest.mark.parametrize("before", ["fresh", "already run"])
@pytest.mark.parametrize("compile_it", WAYS)
def test_running_statistics_are_merged_as_in_the_model_that_is_not_compiled(compile_it, before, norm):
    plain = make_net(norm)
    net = copy.deepcopy(plain)
    model = compile_it(net, "aot_eager")
    if before == "already run":
        for size in (13, 4):
            loss_fn(model, make_batch(size)).backward()
            loss_fn(plain, make_batch(size)).backward()
            model.zero_grad()
            plain.zero_grad()

    steps_of(model)
    steps_of(plain)

    found, expected = plain_buffers(model), plain_buffers(plain)
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-12, atol=1e-14), name
    assert int(found["first.1.num_batches_tracked"]) == (5 if before == "already run" else 3)


@pytest.mark.parametrize("compile_it", WAYS)
def test_the_first_layer_has_the_statistics_of_the_big_batch(compile_it):
    truth, net = make_net(batch_norm), make_net(batch_norm)
    batch = make_batch(13)
    truth(batch[0])
    model = compile_it(net, "aot_eager")

    bb.accumulate(model, loss_fn, batch, micro_batch_size=4)

    found = plain_buffers(model)
    for name, expected in truth.named_buffers():
        assert torch.allclose(found[name], expected, rtol=1e-14, atol=1e-15), name


def test_an_update_for_each_micro_batch_is_outside_the_tolerance():
    """Control."""
    truth, by_hand = make_net(batch_norm), make_net(batch_norm)
    x = make_batch(13)[0]
    truth(x)
    for part_of_it in x.split([4, 3, 3, 3]):
        by_hand(part_of_it)

    assert not torch.allclose(by_hand.first[1].running_mean, truth.first[1].running_mean, rtol=1e-2)


@pytest.mark.parametrize("compile_it", WAYS)
def test_a_model_compiled_after_the_step_was_made(compile_it):
    if compile_it in (whole, part):
        pytest.skip("the step has the module that was there when it was made")
    plain, net = make_net(batch_norm), make_net(batch_norm)
    steps_of(plain)
    step = bb.Step(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.01), micro_batch_size=4)
    step(make_batch(13, 0))
    compile_it(net, "aot_eager")
    for seed in (1, 2):
        step(make_batch(13, seed))

    for name, expected in plain.named_buffers():
        assert torch.allclose(net.get_buffer(name), expected, rtol=1e-12, atol=1e-14), name


def test_a_compiled_model_in_two_steps_in_turn():
    """Each has hooks of its own on the layers, and code that was compiled with those of the other must not be used."""
    plain, net = make_net(batch_norm), make_net(batch_norm)
    model = torch.compile(net, backend="aot_eager")
    for one in (plain, model):
        steps = [steps_of(one, 1) for _ in range(2)]
        for seed in (1, 2):
            for step in steps:
                step(make_batch(13, seed))

    for name, expected in plain.named_buffers():
        assert torch.allclose(net.get_buffer(name), expected, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("policy", ["native", "frozen"])
def test_other_policies_do_what_they_do_in_the_model_that_is_not_compiled(policy):
    plain, net = make_net(batch_norm), make_net(batch_norm)

    steps_of(torch.compile(net, backend="aot_eager"), batch_norm=policy)
    steps_of(plain, batch_norm=policy)

    for name, expected in plain.named_buffers():
        assert torch.allclose(net.get_buffer(name), expected, rtol=1e-12, atol=1e-14), name
    assert_same_weights(net, plain, tolerance=1e-10)


def test_evaluation_between_two_steps():
    plain, net = make_net(batch_norm), make_net(batch_norm)
    model = torch.compile(net, backend="aot_eager")
    models: list[nn.Module] = [plain, model]  # pyright: ignore[reportAssignmentType]
    for one in models:
        step = steps_of(one, 2)
        one.eval()
        with torch.no_grad():
            one(make_batch(20)[0])
        one.train()
        step(make_batch(13, 5))

    for name, expected in plain.named_buffers():
        assert torch.allclose(net.get_buffer(name), expected, rtol=1e-12, atol=1e-14), name


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.last = nn.Linear(NUM_FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x) + self.norm(x * 2 + 1))


def test_a_layer_called_twice_in_compiled_code_is_refused():
    """What the first call left cannot be told from what the second did."""
    net = Twice().double()
    before = copy.deepcopy(net.state_dict())
    model = torch.compile(net, backend="aot_eager")

    with pytest.raises(bb.OptionError, match=r"BatchNorm1d is called 2 times.*compiled.*batch_norm="):
        bb.accumulate(model, loss_fn, make_batch(8), micro_batch_size=4)

    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in net.modules())


class StepCounter(nn.Module):
    """A buffer that each forward changes, beside the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_the_look_for_sizes_moves_nothing_else():
    """A compiled model is run once without its code to see what its layers get; that is no forward of the step."""
    net = nn.Sequential(StepCounter(), nn.BatchNorm1d(NUM_FEATURES), nn.Dropout(0.5), nn.Linear(NUM_FEATURES, 3))
    model = torch.compile(net.double(), backend="aot_eager")

    bb.accumulate(model, loss_fn, make_batch(12), micro_batch_size=4)

    assert float(net[0].calls) == 3


def test_dropout_draws_the_same_numbers_whether_sizes_are_looked_for_or_not():
    model = Net(nn.BatchNorm1d(8), dropout=0.5).double()
    compiled = torch.compile(model, backend="eager")
    step = bb.Step(compiled, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=4)
    losses = []
    for _ in range(2):  # sizes are looked for in the first step only
        torch.manual_seed(9)
        losses.append(float(step(make_batch(12)).loss))

    assert losses[0] == losses[1]


# Measuring


@pytest.mark.parametrize("norm", [None, batch_norm])
@pytest.mark.parametrize("compile_it", WAYS)
def test_measuring_works_and_moves_nothing(compile_it, norm):
    model = compile_it(make_net(norm), "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=4)
    before = copy.deepcopy(plain_names(model.state_dict()))

    small, large = step.measure(make_batch(600), 5), step.measure(make_batch(600), 300)
    step(make_batch(12))
    again = step.measure(make_batch(600), 5)

    assert 0 < small < large
    assert again == pytest.approx(small, rel=0.02)
    fresh = compile_it(make_net(norm), "aot_eager")
    bb.Step(fresh, loss_fn, torch.optim.AdamW(fresh.parameters()), micro_batch_size=4)(make_batch(12))
    after, expected = plain_names(model.state_dict()), plain_names(fresh.state_dict())
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_measuring_compiles_nothing():
    counter, net = Counter(), make_net()
    model = torch.compile(net, backend=counter)
    step = bb.Step(model, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), memory_budget="1GiB")

    step.fit(make_batch(12))

    assert counter.batch_sizes == []
    assert step(make_batch(12)).micro_batch_sizes == (12,)
    assert len(counter.batch_sizes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, batch_norm])
def test_inductor(norm):
    """The compiler that people use, once."""
    plain, net = make_net(norm), make_net(norm)
    model = torch.compile(net)

    steps_of(model)
    steps_of(plain)

    for name, expected in plain.named_buffers():
        assert torch.allclose(net.get_buffer(name), expected, rtol=1e-10, atol=1e-12), name
    assert_same_weights(net, plain, tolerance=1e-8)
