"""Masks of dropout that the second forward of a loss of the whole batch takes from the first."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes
from bigbatch.planning import costs
from bigbatch.planning.costs import MOST_WITH_MASKS, STATE_BYTES
from bigbatch.planning.simulate import peak_bytes
from bigbatch.stepping.coupled import masks
from bigbatch.stepping.coupled.masks import Masks, _packed, _unpacked
from bigbatch.stepping.coupled.whole_batch import TwoPasses
from tests.reference import assert_same_gradients, gradients

WIDTH, FEWEST = 16, 2**15


@pytest.fixture(autouse=True)
def _masks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors as small as those here."""
    monkeypatch.setattr(costs, "FEWEST_ENTRIES", 8)


def embed(model: Any, x: Tensor) -> Tensor:
    return model(x)


def spread(z: Tensor, x: Tensor) -> Tensor:
    """Couples all samples."""
    return F.softplus((z @ z.T).std() - 1)


def coupled(forward: Callable[[Any, Any], Any] = embed) -> bb.WholeBatchLoss:
    return bb.WholeBatchLoss(forward, spread)


class Net(nn.Module):
    """Dropout, then what else draws."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor] = lambda net, x: x, **how: Any):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.drop = nn.Dropout(**{"p": 0.3, **how})
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self, self.drop(self.first(x)))
        return self.last(self.drop(2 * x.tanh()))


def attention(net: Net, x: Tensor) -> Tensor:
    """Draws in C++, behind no layer."""
    x = x.view(len(x), 4, 4)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4).flatten(1)


def recomputed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: net.drop(net.drop(x).sin()), x, use_reentrant=False)


def differentiated(net: Net, x: Tensor) -> Tensor:
    """Draws where a tensor is no tensor that may be kept."""
    return x + torch.func.grad(lambda z: net.drop(z).square().sum())(x)


def mapped(net: Net, x: Tensor) -> Tensor:
    return torch.vmap(net.drop, randomness="different")(x)


def not_alike(net: Net, x: Tensor) -> Tensor:
    """Another number of entries than fills bytes, and another order of dimensions."""
    odd = net.drop(x[:3, :5].contiguous())
    return net.drop(x.t()).t() + F.pad(odd, (0, WIDTH - 5, 0, len(x) - len(odd)))


def selective(net: Net, x: Tensor) -> Tensor:
    """A checkpoint that expects of the second forward the operations that it sees in the recomputation."""

    def policy(context: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        is_sine = op is torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if is_sine else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(lambda x: net.drop(x.sin()), x, use_reentrant=False, context_fn=contexts)


def in_one_of_two(with_graph: bool) -> Callable[[Net, Tensor], Tensor]:
    """Draws beside the stream, in one of the two forwards: something that is logged, say."""

    def aside(net: Net, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() is with_graph:
            with torch.random.fork_rng(), torch.no_grad():
                net.drop(x)
        return net.drop(x.sin())

    return aside


def copied(net: Net, x: Tensor) -> Tensor:
    return copy.deepcopy(net.drop)(x)


def nested(net: Net, x: Tensor) -> Tensor:
    return net.drop(torch.nested.as_nested_tensor(list(x))).to_padded_tensor(0.0)


def traced(net: Net, x: Tensor) -> Tensor:
    """Whoever notes operations must see those of torch's dropout."""
    return x + make_fx(lambda x: F.dropout(x, 0.3))(x)(x)


def with_fakes(net: Net, x: Tensor) -> Tensor:
    """As who asks for a shape."""
    mode = FakeTensorMode()
    fake = mode.from_tensor(x.detach())
    with mode:
        shape = net.drop(fake).shape
    return net.drop(x).view(shape)


def scripted(net: Net, x: Tensor) -> Tensor:
    def dropped(x: Tensor) -> Tensor:  # another one each time, or what was made before is taken
        return F.dropout(x, 0.3, True, False)

    return torch.jit.script(dropped)(x)


torchs = F.dropout


class SeesDropout(TorchFunctionMode):
    """Takes the place of dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] * 0.5 if func is torchs else func(*args, **(kwargs or {}))


def seen_by_a_mode(net: Net, x: Tensor) -> Tensor:
    with SeesDropout():
        return net.drop(x)


def normal_left_over(net: Net, x: Tensor) -> Tensor:
    """Torch draws normal numbers in pairs, and using the second one leaves the stream where it is."""
    left = torch.randn(())
    if torch.is_grad_enabled():
        torch.randn(())
    return net.drop(x) * torch.randn(()) + left


def switched(net: Net, x: Tensor) -> Tensor:
    net.drop.p = 0.6
    x = net.drop(x)
    net.drop.eval()
    x = net.drop(x)
    net.drop.train().p = 0.3
    return x


BETWEEN: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "nothing": lambda net, x: x,
    "random numbers": lambda net, x: x + torch.rand_like(x),
    "normal numbers": lambda net, x: x * torch.randn(()),
    "a function": lambda net, x: F.dropout(x, 0.2),
    "many times": lambda net, x: net.drop(net.drop(net.drop(x)).sin()),
    "by keyword": lambda net, x: net.drop(input=x),
    "attention": attention,
    "recomputed": recomputed,
    "selective": selective,
    "grad": differentiated,
    "vmap": mapped,
    "not alike": not_alike,
    "aside in the first": in_one_of_two(with_graph=False),
    "aside in the second": in_one_of_two(with_graph=True),
    "a copy": copied,
    "make_fx": traced,
    "script": scripted,
    "fakes": with_fakes,
    "a mode": seen_by_a_mode,
    "a normal left over": normal_left_over,
    "another p in the second": lambda net, x: F.dropout(x, 0.2 if torch.is_grad_enabled() else 0.4),
    "nested": nested,
    "switched": switched,
    "a tensor as p": lambda net, x: F.dropout(x, torch.tensor(0.3)),  # pyright: ignore[reportArgumentType]
    "a seed": lambda net, x: x + torch.rand(len(x), 1, generator=torch.Generator().manual_seed(1)),
}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "in place": dict(inplace=True),
    "all": dict(p=1.0),
    "none": dict(p=0.0),
}


def after_a_step(model: nn.Module, x: Tensor, size: int, **options: Any) -> tuple[Any, Any, Tensor]:
    """Gradients, loss, and the generator afterwards."""
    torch.manual_seed(5)
    model.zero_grad()
    result = bb.accumulate(model, coupled(), x, micro_batch_size=size, **options)
    return gradients(model), result.loss, torch.get_rng_state()


@pytest.fixture
def drawn_twice(monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Within the block nothing is kept: torch draws in both forwards."""

    @contextlib.contextmanager
    def block() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(TwoPasses, "_may_keep_masks", lambda self, of: False)
            yield

    return block


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("options", [{}, dict(precision="bf16")], ids=["float32", "bf16"])
def test_a_step_is_bit_for_bit_the_one_that_draws_twice(drawn_twice, between, options):
    torch.manual_seed(0)
    model, x = Net(BETWEEN[between]), torch.randn(24, WIDTH)
    with drawn_twice():
        expected = after_a_step(model, x, 4, **options)

    with CountsDraws() if between == "nothing" else contextlib.nullcontext() as counted:
        found = after_a_step(model, x, 4, **options)

    assert counted is None or counted.num_draws == 12, "each of two layers once in each of six micro-batches"
    assert all(torch.equal(found[0][name], grad) for name, grad in expected[0].items())
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2]), "the generator is where drawing twice leaves it"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [1, 3, 5, 24])
def test_layers_of_other_kinds_and_other_cuts(drawn_twice, how, size):
    torch.manual_seed(0)
    model, x = Net(BETWEEN["random numbers"], **HOW[how]), torch.randn(24, WIDTH)
    with drawn_twice():
        expected = after_a_step(model, x, size)

    found = after_a_step(model, x, size)

    assert all(torch.equal(found[0][name], grad) for name, grad in expected[0].items())
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


def test_a_generator_that_is_not_set_is_noticed(monkeypatch):
    """Control for the tests above: what draws after a mask that was kept would draw something else."""
    torch.manual_seed(0)
    model, x = Net(BETWEEN["random numbers"]), torch.randn(24, WIDTH)
    expected = after_a_step(model, x, 4)[0]
    again = Masks.again

    @contextlib.contextmanager
    def without_setting(self: Masks) -> Any:
        with again(self), monkeypatch.context() as patch:
            patch.setattr(torch, "set_rng_state", lambda state: None)
            yield

    monkeypatch.setattr(Masks, "again", without_setting)
    found = after_a_step(model, x, 4)[0]

    with pytest.raises(AssertionError):
        assert_same_gradients(found, expected, tolerance=1e-2)


class CountsDraws(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_draws += func is torch.ops.aten.bernoulli_.float
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num", "expected"), [(1, 1), (2, 2), (4, 4), (16, 16), (20, 24)])
def test_masks_are_drawn_once_by_all_but_the_last_of_many_micro_batches(drawn_twice, num, expected):
    """The first keeps its graph, 15 after it keep masks."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(num * 2, WIDTH)
    with CountsDraws() as once:
        after_a_step(model, x, 2)
    with drawn_twice(), CountsDraws() as twice:
        after_a_step(model, x, 2)

    assert once.num_draws == 2 * expected  # Net has two
    assert twice.num_draws == 2 * (2 * num - 1)


@pytest.mark.parametrize("num", [2, 4, 20])
def test_bytes_are_counted_by_trace_profile_and_meter(drawn_twice, num):
    torch.manual_seed(0)
    x = torch.randn(8 * num, 8, WIDTH)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = bb.WholeBatchLoss(embed, lambda z, x: z.mean(1).square().mean(0).std())
    args = dict(optimizer=optimizer, batch_size=len(x), micro_batch_size=8, recompute="none", calibrate=False)

    def peaks() -> tuple[bb.MemoryProfile, int, int]:
        plan = bb.plan(model, loss_fn, x, **args)
        profile = bb.profile(model, loss_fn, x, optimizer=optimizer, calibrate=False)
        measured = bb.Step(model, loss_fn, optimizer, plan=plan).measure(x, 8)
        assert plan.peak_bytes == measured
        return profile, measured, peak_bytes(profile, [8] * num)

    with drawn_twice():
        without, measured_without, simulated_without = peaks()
    profile, measured, simulated = peaks()

    bits, states = 8 * WIDTH * 8 // 8, 8 * STATE_BYTES  # of a sample: tokens, width, layers; of a micro-batch: layers
    assert profile.masks == ((0, 8 * WIDTH),) * 8
    assert without.masks == ()
    each, most = states + 8 * bits, min(num - 1, MOST_WITH_MASKS)
    assert simulated - simulated_without == most * each
    # Those of a micro-batch are gone when its forward has run.
    assert (most - 1) * each <= measured - measured_without <= most * each


@pytest.mark.parametrize(("size", "is_kept"), [(255, False), (256, True), (2048, True)])
def test_a_profile_knows_from_which_size_on_masks_are_kept(monkeypatch, size, is_kept):
    monkeypatch.setattr(costs, "FEWEST_ENTRIES", FEWEST)
    model = nn.Sequential(nn.Linear(WIDTH, FEWEST // 256), nn.Dropout(0.1), nn.Linear(FEWEST // 256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = bb.profile(model, coupled(), torch.randn(8, WIDTH), optimizer=optimizer, calibrate=False)

    found = peak_bytes(profile, [size] * 3) - peak_bytes(dataclasses.replace(profile, masks=()), [size] * 3)

    assert found == (2 * (size * FEWEST // 256 // 8 + STATE_BYTES) if is_kept else 0)


def test_masks_are_kept_from_32768_entries_on():
    assert costs.FEWEST_ENTRIES in (8, FEWEST), "changed for tests, and by nothing that is imported"


@pytest.mark.parametrize(("num_entries", "num_draws"), [(FEWEST - 8, 7), (FEWEST, 4), (FEWEST + 4, 7)])
def test_small_masks_and_those_that_fill_no_bytes_are_drawn_again(monkeypatch, num_entries, num_draws):
    monkeypatch.setattr(costs, "FEWEST_ENTRIES", FEWEST)
    model, x = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.2)), torch.randn(4, num_entries, 1)

    with CountsDraws() as counted:
        bb.accumulate(model, bb.WholeBatchLoss(embed, lambda z, x: z.mean().sin()), x, micro_batch_size=1)

    assert counted.num_draws == num_draws


@pytest.mark.parametrize(("num_entries", "least", "most"), [(FEWEST, 1.0, 1.1), (128 * FEWEST, 0.4, 0.5)])
def test_all_that_is_kept_is_half_to_all_of_the_noise_of_one_graph(num_entries, least, most):
    live, x = LiveBytes(), torch.ones(num_entries)
    live.track(x)
    with live:
        before, kept = live.current_bytes(), Masks()
        with kept.drawing():
            kept.dropout(x, 0.1)
        num_bytes = live.current_bytes() - before

    assert num_bytes == costs.mask_bytes(num_entries) == num_entries // 8 + STATE_BYTES
    assert least <= MOST_WITH_MASKS * num_bytes / (4 * num_entries) <= most


def test_where_the_first_graph_is_not_kept_its_masks_are():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)), torch.randn(24, WIDTH)

    with CountsDraws() as counted:
        bb.accumulate(model, coupled(), x, micro_batch_size=6, batch_norm="merge")

    assert counted.num_draws == 4


@pytest.mark.parametrize("fails_in", ["first", "second"])
def test_dropout_is_torchs_again_after_a_failure(fails_in):
    model, x, calls = Net(), torch.randn(24, WIDTH), []

    def forward(model, x):
        calls.append(torch.is_grad_enabled())
        if calls.count(fails_in == "second") == 3:
            raise ValueError("mine")
        return model(x)

    with pytest.raises(ValueError, match="mine"):
        bb.accumulate(model, coupled(forward), x, micro_batch_size=4)

    assert F.dropout is masks._torch_dropout
    assert masks._running.get() is None


def test_dropout_of_the_users_stays(monkeypatch):
    """Whether it takes the place of torch's function, of the layers' forward, or of that of one layer."""
    torch.manual_seed(0)
    x, seen = torch.randn(24, WIDTH), []

    def mine(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        seen.append(len(x))
        return x * 0.5

    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", mine)
        bb.accumulate(Net(), coupled(), x, micro_batch_size=4)
        assert F.dropout is mine
    with monkeypatch.context() as patch:
        patch.setattr(nn.Dropout, "forward", lambda self, input: mine(input))
        bb.accumulate(Net(), coupled(), x, micro_batch_size=4)
    model = Net()
    model.drop.forward = mine
    bb.accumulate(model, coupled(), x, micro_batch_size=4)

    assert model.drop.forward is mine
    assert len(seen) == 3 * 2 * 11


def test_hooks_of_a_layer_are_called_in_both_forwards():
    model, x, seen = Net(), torch.randn(24, WIDTH), []
    model.drop.register_forward_hook(lambda module, args, output: seen.append(len(output)))

    bb.accumulate(model, coupled(), x, micro_batch_size=4)

    assert len(seen) == 2 * 11


def test_another_thread_is_not_in_the_forward():
    """Where it calls dropout, it is torch's."""
    torch.manual_seed(0)
    model, x, found = Net(), torch.randn(24, WIDTH), []

    def forward(model, x):
        with ThreadPoolExecutor(1) as pool:
            found.append((masks._running.get() is not None, pool.submit(masks._running.get).result()))
        return model(x)

    bb.accumulate(model, coupled(forward), x, micro_batch_size=4)

    assert found == [(True, None)] * 5 + [(False, None)] + [(True, None)] * 5


def test_dropout_that_a_forward_puts_there_stays(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(F, "dropout", F.dropout)  # torch's again after the test
    mine = lambda x, *args, **keywords: x  # noqa: E731

    def forward(model, x):
        F.dropout = mine
        return model(x)

    bb.accumulate(Net(), coupled(forward), torch.randn(24, WIDTH), micro_batch_size=4)

    assert F.dropout is mine


@pytest.mark.parametrize("compiled", ["model", "function"])
def test_compiled_code_is_the_same_and_as_often_compiled(drawn_twice, compiled):
    torch.manual_seed(0)
    model, x, made = Net(), torch.randn(40, WIDTH), []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    def steps() -> tuple[Any, int]:
        torch.compiler.reset()
        made.clear()
        forward = torch.compile(embed, backend=backend) if compiled == "function" else embed
        run = torch.compile(model, backend=backend) if compiled == "model" else model
        torch.manual_seed(5)
        model.zero_grad()
        for _ in range(3):
            bb.accumulate(run, coupled(forward), x, micro_batch_size=4)
        return gradients(model), len(made)

    with drawn_twice():
        expected, num = steps()
    found, again = steps()

    assert again == num > 0
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_bits_are_the_mask(dtype, keep):
    noise = torch.empty(6, 5, 8, dtype=dtype).bernoulli_(keep)

    bits = _packed(noise)

    assert bits.nbytes == 6 * 5
    assert torch.equal(_unpacked(bits, noise), noise)
