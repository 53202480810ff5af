"""Recompute changes what is kept, and nothing else: each test compares with the same run without it."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes
from tests.models import NETWORKS, Network, make_batch, mean, next_token_mean
from tests.reference import assert_same_gradients, gradient_error, gradients

CHOICES = ["all", "every_second", "pairs"]


def names_of(network: Network, choice: str) -> tuple[Any, ...]:
    if choice == "pairs":
        return tuple(zip(network.blocks[::2], network.blocks[1::2], strict=True))
    return network.blocks if choice == "all" else network.blocks[::2]


def plan(*names: Any) -> bb.Plan:
    return bb.Plan(micro_batch_size=8, recompute=names)


def bytes_kept(forward: Any) -> int:
    """What is alive after a forward for the sake of its backward, and its output."""
    gc.collect()
    live = LiveBytes()
    with live:
        output = forward()
        found = live.current_bytes()
    del output
    return found


def block(width: int = 6, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width, **options), nn.Tanh(), nn.Linear(width, width, **options), nn.Tanh())


def x64(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(requires_grad)


def run(model: Any, loss: Any, *args: Any) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss(model, *args).backward()
    return gradients(model)


CELLS = [
    pytest.param(network, choice, id=f"{network.name}-{choice}")
    for network in NETWORKS.values()
    for choice in CHOICES
    if network.is_chain or choice != "pairs"
]


@pytest.mark.parametrize(("network", "choice"), CELLS)
def test_gradients_are_those_without_recompute(network, choice):
    if network.shifts_inside:
        pytest.importorskip("transformers")
    model, batch = network.make(), make_batch(network)
    loss = next_token_mean if network.shifts_inside else mean
    expected = run(model, loss, batch)

    with bb.apply(plan(*names_of(network, choice)), model):
        found = run(model, loss, batch)

    assert_same_gradients(found, expected, tolerance=1e-15)
    assert_same_gradients(run(model, loss, batch), expected, tolerance=1e-15)  # and off again


def test_control_another_batch_is_outside_the_tolerance():
    network = NETWORKS["mlp"]
    model = network.make()

    found = run(model, mean, make_batch(network, seed=1))

    assert gradient_error(found, run(model, mean, make_batch(network))) > 1e-2


def test_fewer_bytes_are_kept_and_the_forward_runs_twice():
    model, x = nn.Sequential(*(block(16) for _ in range(4)), nn.Linear(16, 1)), torch.randn(64, 16)
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(".0"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))

    plain = bytes_kept(lambda: model(x))
    assert calls == ["0.0", "1.0", "2.0", "3.0"]
    calls.clear()
    with bb.apply(plan("0", "1", "2", "3"), model):
        kept = bytes_kept(lambda: model(x))
        calls.clear()
        model(x).sum().backward()

    # Of each block two activations of 64 x 16 floats are kept, what each tanh returned; recomputed, only the last.
    assert plain - kept == 4 * 64 * 16 * 4
    assert calls == ["0.0", "1.0", "2.0", "3.0", "3.0", "2.0", "1.0", "0.0"]


@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
def test_dropout_masks_and_the_random_stream_are_the_same(named):
    model, x = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1)).double(), x64(16, 8)

    def measured(call: Any) -> tuple[dict[str, Tensor | None], Tensor]:
        torch.manual_seed(1)
        found = run(model, lambda model: (call(input=x) if named else call(x)).square().mean())
        return found, torch.rand(1)

    expected, stream = measured(model)
    found, stream_found = measured(bb.recompute(model))
    wrong, _ = measured(lambda *a, **k: checkpoint(model, *a, use_reentrant=False, preserve_rng_state=False, **k))

    assert_same_gradients(found, expected, tolerance=1e-15)
    assert torch.equal(stream_found, stream)
    assert gradient_error(wrong, expected) > 0.1, "control: other masks are far outside"


def test_autocast_of_the_forward_holds_in_the_second_run():
    model, x = block(8), torch.randn(6, 8)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))

    def loss(call: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x).float().square().mean()

    expected = run(model, lambda _: loss(model))
    seen.clear()
    found = run(model, lambda _: loss(bb.recompute(model)))  # backward is outside of autocast

    assert seen == [torch.bfloat16] * 2
    assert_same_gradients(found, expected, tolerance=0)


Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    extra: dict[str, Any]


def test_any_arguments_and_results_go():
    weight = nn.Parameter(x64(4))
    x, scale, deep = (x64(4, requires_grad=True) for _ in range(3))

    def fn(inputs: Inputs, pair: Pair, *, scale: Tensor, power: int, label: str | None = None) -> dict[str, Any]:
        assert isinstance(inputs, Inputs)
        assert isinstance(pair, Pair)
        y = (inputs.x * weight * scale).sin() * inputs.extra["deep"][0] ** power + pair.second.exp()
        return dict(y=y, nested=[Pair(y * 2, label)], inputs=Inputs(y.exp(), {}))

    def total(call: Any) -> Tensor:
        found = call(Inputs(x, dict(deep=[deep, "text"])), Pair(None, scale), scale=scale, power=3, label="name")
        assert found["nested"][0].second == "name"
        return (found["y"] + found["nested"][0].first + found["inputs"].x).sum()

    wanted = torch.autograd.grad(total(fn), [weight, x, scale, deep])
    found = torch.autograd.grad(total(bb.recompute(fn)), [weight, x, scale, deep])

    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_a_recurrent_layer_takes_and_returns_its_state(packed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 5, num_layers=2, batch_first=True)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
            taken = pack_padded_sequence(x, torch.tensor([5, 3, 1]), batch_first=True) if packed else x
            output, (h, c) = self.rnn(taken, state)
            return (output.data if packed else output).square().sum() + (h * c).sum()

    model = Net().double()
    x, state = x64(3, 5, 4), (x64(2, 3, 5, requires_grad=True), x64(2, 3, 5))
    expected = run(model, lambda model: model(x, state))
    wanted, state[0].grad = state[0].grad, None

    with bb.apply(plan("rnn"), model):
        found = run(model, lambda model: model(x, state))

    assert_same_gradients(found, expected, tolerance=0)
    assert torch.equal(state[0].grad, wanted)


class Growing(nn.Module):
    """Appends its key to the cache it is given, and attends to all in it."""

    def __init__(self):
        super().__init__()
        self.key, self.query = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        grown = cache["layers"][0] if isinstance(cache, dict) else cache
        grown.append(self.key(x))
        keys = torch.cat(grown, 1)
        return (self.query(x) @ keys.transpose(1, 2)).softmax(-1) @ keys


@pytest.mark.parametrize("make_cache", [list, lambda: dict(layers=[[]])], ids=["list", "nested"])
def test_a_cache_that_grows_is_seen_as_it_was(make_cache):
    model, x = Growing().double(), x64(2, 3, 4)

    def loss(call: Any) -> Tensor:
        cache = make_cache()
        first = call(x, cache)
        output = call(first, cache)
        assert len(cache["layers"][0] if isinstance(cache, dict) else cache) == 2, "the caller's own cache grew"
        return output.square().mean()

    expected = run(model, lambda model: loss(model))
    total = loss(bb.recompute(model))
    model.zero_grad()
    total.backward(retain_graph=True)
    assert_same_gradients(gradients(model), expected, tolerance=1e-15)

    model.zero_grad()
    total.backward()  # a third run
    assert_same_gradients(gradients(model), expected, tolerance=1e-15)
    with pytest.raises(RuntimeError, match="checkpoint"):
        loss(functools.partial(checkpoint, model, use_reentrant=False)).backward()  # control: torch alone


def test_one_list_under_two_names_stays_one():
    def fn(x: Tensor, write: list[Tensor], read: list[Tensor]) -> Tensor:
        write.append(x.sin())
        return read[-1].exp()

    x, both = x64(3, requires_grad=True), [torch.ones(3)]

    bb.recompute(fn)(x, both, both).sum().backward()

    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_the_gradient_of_a_gradient_goes_through():
    model, x = nn.Sequential(block(3), nn.Linear(3, 1)).double(), x64(6, 3)

    def penalty(model: nn.Module) -> Tensor:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return model(inputs).mean() + (slope.norm(dim=1) - 1).square().mean()

    expected = run(model, penalty)
    with bb.apply(plan("0"), model):
        found = run(model, penalty)

    assert_same_gradients(found, expected, tolerance=1e-14)


NORMS = [
    lambda: nn.BatchNorm1d(6, momentum=0.3),
    lambda: nn.BatchNorm1d(6, momentum=None),
    lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
]


def same_buffers(found: nn.Module, wanted: nn.Module) -> bool:
    pairs = zip(found.named_buffers(), wanted.named_buffers(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("how", ["apply", "module", "function", "nested", "method", "twice"])
@pytest.mark.parametrize("norm", NORMS, ids=["momentum", "cumulative", "instance"])
def test_running_statistics_are_updated_once(norm, how):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), norm(), nn.Tanh()), nn.Linear(6, 1)).double()
    x = x64(8, 4) * 3 + 1
    plain = copy.deepcopy(model)

    class Holder:
        @bb.recompute
        def method(self, x: Tensor) -> Tensor:
            return model(x)

    calls = dict(
        apply=lambda x: model(x),
        module=bb.recompute(model),
        function=bb.recompute(lambda x: model(x)),
        nested=bb.recompute(lambda x: bb.recompute(lambda y: model[1](bb.recompute(model[0])(y)))(x)),
        method=Holder().method,
        twice=bb.recompute(lambda x: model(x) + model(x)),
    )
    with bb.apply(plan("0") if how == "apply" else None, model):
        found = run(model, lambda _: calls[how](x * 1.0).square().mean())
    expected = run(plain, lambda plain: (plain(x) + plain(x) if how == "twice" else plain(x)).square().mean())

    assert same_buffers(model, plain)
    assert_same_gradients(found, expected, tolerance=1e-14)


def test_control_torch_alone_counts_a_batch_twice():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())

    checkpoint(model, torch.randn(8, 4), use_reentrant=False).sum().backward()

    assert model[1].num_batches_tracked == 2


def test_buffers_are_the_same_objects_afterwards_even_when_backward_fails():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Tanh())
    before, kept = dict(model[1]._buffers), {name: buffer.clone() for name, buffer in model[1]._buffers.items()}
    output = bb.recompute(model)(torch.randn(8, 4))
    counted = model[1].running_mean.clone()
    model[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("broken")))

    with pytest.raises(ValueError, match="broken"):
        output.sum().backward()

    assert all(model[1]._buffers[name] is buffer for name, buffer in before.items())
    assert torch.equal(model[1].running_mean, counted)
    assert not torch.equal(counted, kept["running_mean"])
    assert not nn.modules.module._has_any_global_hook()


def test_another_state_that_changes_is_refused():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Linear(4, 1))

    with bb.apply(plan("0"), model), pytest.raises(bb.RecomputeError, match=r"buffer '0\.parametrizations\.weight\.0"):
        model(torch.randn(2, 4))
    model.eval()
    with bb.apply(plan("0"), model):
        model(torch.randn(2, 4)).sum().backward()  # it changes in training only


def test_parameters_put_in_for_a_call_are_refused_in_a_module_and_right_in_a_function():
    model, x = block(4).double(), x64(3, 4)
    other = {name: x64(*p.shape, requires_grad=True) for name, p in model.named_parameters()}

    def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, x)

    expected = torch.autograd.grad(call(other, x).sum(), list(other.values()))
    found = torch.autograd.grad(bb.recompute(call)(other, x).sum(), list(other.values()))

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with bb.apply(plan("0"), model), pytest.raises(bb.RecomputeError, match=r"functional_call put in 'weight'"):
        call(other, x)


@pytest.mark.parametrize("frozen", ["nothing", "first block", "all but the last"])
def test_blocks_whose_input_or_weights_need_no_gradient(frozen):
    model, x = nn.Sequential(block(), block(), nn.Linear(6, 1)).double(), x64(5, 6)
    frozen_prefixes = {"nothing": (), "first block": ("0.",), "all but the last": ("0.", "1.")}[frozen]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen_prefixes))
    expected = run(model, lambda model: model(x).square().mean())

    with bb.apply(plan("0", "1"), model):
        found = run(model, lambda model: model(x).square().mean())

    assert_same_gradients(found, expected, tolerance=0)
    assert (found["0.0.weight"] is None) == (frozen != "nothing")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_it_is_a_plain_call(mode):
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), block(4), block(4)), torch.randn(8, 4)
    model(x)
    model.eval()
    plain = model(x).detach()

    with bb.apply(plan("0", ("1", "2")), model), mode():
        output = model(x)

    assert torch.equal(output, plain)
    assert not vars(output)


def test_in_evaluation_mode_gradients_still_come_through():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).double().eval(), x64(8, 4)
    expected = run(model, lambda model: model(x).square().sum())

    with bb.apply(plan("0", "1"), model):
        found = run(model, lambda model: model(x).square().sum())

    assert_same_gradients(found, expected, tolerance=0)
    assert model[1].num_batches_tracked == 0


def test_a_tied_weight_gets_its_gradient_in_one_go():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mix(self.embed(ids))))

    model, ids, counted = Tied().double(), torch.randint(0, 7, (4, 6)), []

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten())

    expected = run(model, loss)
    model.embed.weight.register_post_accumulate_grad_hook(lambda _: counted.append(1))
    with bb.apply(plan("mix", "head"), model):
        found = run(model, loss)

    assert_same_gradients(found, expected, tolerance=1e-15)
    assert len(counted) == 1


def test_what_was_given_is_not_kept_alive():
    """A nested one frees what lies between: it is the outer one's to recompute."""
    inner = bb.recompute(lambda pair: pair["x"].exp())
    refs: list[Any] = []

    def outer(x: Tensor) -> Tensor:
        between = x.sin()
        refs.append(weakref.ref(between))
        return inner(dict(x=between)).sum()

    x, given = torch.randn(5, requires_grad=True), {"x": torch.randn(5, requires_grad=True)}
    output = bb.recompute(outer)(x)
    plain = inner(given)
    container = weakref.ref(given["x"])
    del given
    gc.collect()

    assert refs[0]() is None, "kept by the inner one"
    assert container() is not None, "an input that lies outside is kept: it is what the second run starts from"
    output.backward()
    assert torch.allclose(x.grad, x.detach().sin().exp() * x.detach().cos())
    del plain
    assert container() is None


def test_a_changed_input_is_noticed():
    x = torch.randn(4, requires_grad=True) * 1.0
    output = bb.recompute(lambda inputs: (inputs["x"] + 1).sin())(dict(x=x))
    x.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_error_in_the_forward_leaves_nothing_behind():
    def broken(x: Tensor) -> Tensor:
        x.sin()
        raise ValueError("broken")

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match="broken"):
        bb.recompute(broken)(x)

    assert bytes_kept(lambda: x.sin().sin()) == 3 * 12, "the next function is not recomputed"


def test_the_wrapper_says_what_the_function_says():
    @bb.recompute
    def attend(query: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend."""
        return query

    assert (attend.__name__, attend.__doc__) == ("attend", "Attend.")
    assert list(inspect.signature(attend).parameters) == ["query", "mask"]
    assert "training" not in vars(bb.recompute(nn.Linear(1, 1)))


def test_what_cannot_be_called_is_refused():
    with pytest.raises(bb.ArgumentError, match=r"recompute\(\) wraps a function, found Tensor"):
        bb.recompute(torch.ones(1))


RRELU_CALLS: dict[str, Any] = {
    "module": lambda model, x: bb.recompute(model)(x),
    "function": lambda model, x: bb.recompute(lambda x: model(x))(x),
    "functional": lambda model, x: bb.recompute(lambda x: F.rrelu(model[0](x), training=True))(x),
    "partial": lambda model, x: bb.recompute(functools.partial(lambda model, x: model(x), model))(x),
}


def gradients_of_rrelu(call: Any, applied: bb.Plan | None = None) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.RReLU()).double()
    batch = torch.randn(6, 4, dtype=torch.float64)
    with bb.apply(applied, model):
        call(model, batch).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", RRELU_CALLS)
def test_noise_that_is_saved_before_it_is_drawn_is_drawn_again(name):
    expected = gradients_of_rrelu(lambda model, x: model(x))

    assert_same_gradients(gradients_of_rrelu(RRELU_CALLS[name]), expected, tolerance=1e-14)


@pytest.mark.parametrize("recompute", [("1",), (("0", "1"),)])
def test_modules_that_end_with_rrelu_are_recomputed(recompute):
    expected = gradients_of_rrelu(lambda model, x: model(x))

    found = gradients_of_rrelu(lambda model, x: model(x), plan(*recompute))
    assert_same_gradients(found, expected, tolerance=1e-14)


@pytest.mark.parametrize(("last", "times"), [(nn.RReLU, 2), (nn.Tanhshrink, 1)])
def test_only_what_draws_late_runs_to_the_end_again(last, times):
    """Control: without it, the second run stops where all is saved again."""
    ended = []
    model = nn.Sequential(nn.Linear(4, 5), last(), nn.Linear(5, 3))
    model[2].register_forward_hook(lambda *args: ended.append(1))

    bb.recompute(model)(torch.randn(6, 4)).sum().backward()

    assert len(ended) == times
