"""Inputs of recomputed calls go to a host and come back: to a copy, to a count, and on a card to pinned memory."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import bigbatch as bb
from bigbatch.memory import offloading
from bigbatch.memory.fakes import fake_copy
from bigbatch.memory.measure import LiveBytes
from bigbatch.memory.offloading import CountedHost, pretend_host
from tests.reference import assert_same_gradients, gradient_error, gradients

NAMES = ("0", "1", "2", "3")


class CopyHost:
    """A host on the CPU that writes down what it is asked to do."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stored: list[Tensor] = []

    def number(self, stored: Tensor) -> int:
        return next(index for index, tensor in enumerate(self.stored) if tensor is stored)

    def to_host(self, tensor: Tensor) -> Tensor:
        self.stored.append(tensor.clone())
        self.log.append(f"out {len(self.stored) - 1}")
        return self.stored[-1]

    def to_device(self, stored: Tensor, device: torch.device) -> Tensor:
        self.log.append(f"back {self.number(stored)}")
        return stored.clone()

    def wait(self, device: torch.device) -> None:
        self.log.append("wait")


def block(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(2 * width, width), nn.Tanh()
    )


def make(num: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(block() for _ in range(num)), nn.Linear(16, 1))


def plan(offload: tuple[str, ...] = NAMES, recompute: Any = NAMES, **fields: Any) -> bb.Plan:
    return bb.Plan(micro_batch_size=8, recompute=recompute, offload=offload, **fields)


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    return gradients(model)


@pytest.mark.parametrize(
    "how",
    [
        plan(),
        plan(keep=(("0", "matmul"), ("2", "matmul"))),
        plan(("0", "2"), (("0", "1"), ("2", "3"))),
        plan(("2",)),
    ],
    ids=["all", "with kept products", "groups", "one"],
)
def test_gradients_are_those_without_recompute(how):
    model, x = make().double(), torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    expected, wanted = run(model, x), x.grad
    x.grad, host = None, CopyHost()

    with bb.apply(how, model), pretend_host(host):
        found = run(model, x)

    assert_same_gradients(found, expected, tolerance=0)
    assert torch.equal(x.grad, wanted)
    assert len(host.stored) == len(how.offload)
    host.stored[-1].add_(1)
    assert gradient_error(run(model, x * 1.01), expected) > 1e-3, "control"


def test_numbers_come_from_the_host():
    """Control: a host that spoils what it is given is noticed."""

    class Spoiling(CopyHost):
        def to_device(self, stored: Tensor, device: torch.device) -> Tensor:
            return stored + 1

    model, x = make(), torch.randn(8, 16)
    expected = run(model, x)
    with bb.apply(plan(), model), pretend_host(Spoiling()):
        assert gradient_error(run(model, x), expected) > 1e-2


def test_what_follows_waits_and_the_call_before_sets_out_early():
    model, x, host = make(3), torch.randn(8, 16, requires_grad=True), CopyHost()

    with bb.apply(plan(NAMES[:3], NAMES[:3]), model), pretend_host(host):
        output = model(x)
        assert host.log == ["out 0", "wait", "out 1", "wait", "out 2", "wait"]
        host.log.clear()
        for index in range(3):
            model[index][0].register_forward_pre_hook(lambda *_, index=index: host.log.append(f"run {index}"))
        output.sum().backward()

    assert host.log == ["back 2", "wait", "back 1", "run 2", "wait", "back 0", "run 1", "wait", "run 0"]


def test_two_inputs_of_a_call_come_back_together_and_each_once():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(self.inner(x) * y)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Adds(), Adds()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x * 2, x * 3), x * 4)

    model, x, host = Net(), torch.randn(3, 4, requires_grad=True), CopyHost()
    expected = run(model, x)
    with bb.apply(plan(("first", "second"), ("first", "second")), model), pretend_host(host):
        found = run(model, x)

    assert_same_gradients(found, expected, tolerance=0)
    assert [entry for entry in host.log if entry.startswith("back")] == ["back 2", "back 3", "back 0", "back 1"]
    assert host.log[8:] == ["back 2", "back 3", "wait", "wait", "back 0", "back 1", "wait", "wait"]


def test_a_second_backward_and_the_gradient_of_a_gradient_go_through():
    model, x = make().double(), torch.randn(8, 16, dtype=torch.float64)

    def penalty() -> dict[str, Tensor | None]:
        torch.manual_seed(1)
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        output = model(inputs * 1.0).sum()
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward(retain_graph=True)
        output.backward()
        return gradients(model)

    expected = penalty()
    with bb.apply(plan(), model), pretend_host(CopyHost()):
        found = penalty()

    assert_same_gradients(found, expected, tolerance=1e-13)


def test_only_what_needs_a_gradient_goes_and_no_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = Masked(), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.inner(x * self.scale, mask, scale=self.scale)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
            return (self.inner(x) * mask * scale).tanh()

    model, host = Net(), CopyHost()
    with bb.apply(plan(("inner",), ("inner",)), model), pretend_host(host):
        model(torch.randn(3, 4), torch.ones(3, 4)).sum().backward()

    assert [tuple(stored.shape) for stored in host.stored] == [(12,)]


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.mT,
    "slice": lambda x: x[:, :, 1:3],
    "expanded": lambda x: x[:, :1, :].expand(-1, 6, -1),
    "one number": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_come_back_with_their_values_and_what_is_expanded_stays_small(name):
    base = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    host, seen = CopyHost(), []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().clone())
            return x.exp().sin()

    model = nn.Sequential(Keeps(), nn.Identity())
    with bb.apply(plan(("0",), ("0",)), model), pretend_host(host):
        x = VIEWS[name](base * 2)
        model(x).sum().backward()

    assert torch.equal(seen[0], seen[1])
    # Expanded: from the first number of the first sample to the last one that is read of the fourth; not 4 x 6 x 6.
    assert host.stored[0].numel() == (3 * 30 + 6 if name == "expanded" else x.numel())


def test_a_change_in_place_is_refused_inside_and_harmless_after():
    class Adds(nn.Module):
        def __init__(self, in_place: bool):
            super().__init__()
            self.inner, self.in_place = nn.Linear(4, 4), in_place

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x).tanh()
            return x.add_(y) if self.in_place else y

    x = torch.randn(3, 4, requires_grad=True)
    model = nn.Sequential(Adds(True))
    with (
        bb.apply(plan(("0",), ("0",)), model),
        pretend_host(CopyHost()),
        pytest.raises(bb.RecomputeError, match=r"changed that input in place \(shape \(3, 4\)\)"),
    ):
        model(x * 1.0)

    model = nn.Sequential(Adds(False))
    expected = run(model, x * 1.0)
    with bb.apply(plan(("0",), ("0",)), model), pretend_host(CopyHost()):
        given = x * 1.0
        output = model(given)
        given.detach().zero_()  # What lies on the host is what the module was given.
        model.zero_grad()
        output.square().sum().backward()
    assert_same_gradients(gradients(model), expected, tolerance=0)


def bytes_at_the_end_of_forward(model: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """On the device and on the host after a forward, and the peak on the device of the whole step."""
    gc.collect()
    with LiveBytes() as live:
        live.track(model, x)
        loss = model(x).sum()
        after = live.current_bytes("cpu"), live.current_bytes("meta")
        loss.backward()
        peak = live.peak_bytes("cpu")
        assert live.current_bytes("meta") == 0, "the host is empty after backward"
    return *after, peak


@pytest.mark.parametrize("is_fake", [False, True])
def test_bytes_move_from_the_device_to_the_host(is_fake):
    model, x = make(), torch.randn(64, 16)

    def count(how: bb.Plan) -> tuple[int, int, int]:
        mode = FakeTensorMode()
        its_model, its_x = fake_copy((model, x), mode) if is_fake else (model, x)
        with bb.apply(how, its_model), pretend_host(CountedHost()):
            if not is_fake:
                found = bytes_at_the_end_of_forward(its_model, its_x)
            else:
                with mode:
                    found = bytes_at_the_end_of_forward(its_model, its_x)
        model.zero_grad()
        return found

    device, host, _ = count(plan(()))
    offloaded, on_host, _ = count(plan())

    # The input of the first block is the batch, which needs no gradient.
    assert host == 0
    assert on_host == 3 * 64 * 16 * 4
    assert device - offloaded == on_host


def test_the_peak_on_fake_tensors_is_that_on_real_ones():
    model, x = make(), torch.randn(64, 16)
    mode = FakeTensorMode()
    fake_model, fake_x = fake_copy((model, x), mode)
    with pretend_host(CountedHost()), bb.apply(plan(), model), bb.apply(plan(), fake_model):
        real = bytes_at_the_end_of_forward(model, x)
        with mode:
            fake = bytes_at_the_end_of_forward(fake_model, fake_x)

    assert fake == real


def test_on_the_cpu_it_has_no_effect_and_says_so_once():
    offloading._warn_no_effect.cache_clear()
    model, x = make(), torch.randn(8, 16)
    expected = run(model, x)
    with bb.apply(plan(), model):
        with pytest.warns(bb.BigBatchWarning, match="offload= has no effect on tensors on 'cpu'") as seen:
            found = run(model, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(model, x)

    assert_same_gradients(found, expected, tolerance=0)
    assert len(seen) == 1


def test_taking_it_off_leaves_nothing_and_puts_back_what_was_on():
    model, x, host = make(), torch.randn(8, 16), CopyHost()
    before = [dict(vars(module)) for module in model.modules()]
    with pretend_host(host), bb.apply(plan(("1",)), model):
        with bb.apply(plan(()), model):
            run(model, x)
        assert host.stored == []
        run(model, x)
        assert len(host.stored) == 1

    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_layer_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=11, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=True)).double().train()
    ids, names, host = torch.randint(0, 11, (3, 7)), ("transformer.h.0", "transformer.h.1"), CopyHost()

    def step() -> dict[str, Tensor | None]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        model(input_ids=ids).logits.square().sum().backward()
        return gradients(model)

    expected = step()
    with bb.apply(plan(names, names), model), pretend_host(host):
        found = step()

    assert_same_gradients(found, expected, tolerance=1e-13)
    assert len(host.stored) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [(), (("1", "matmul"), ("2", "matmul"))], ids=["", "with kept products"])
def test_on_a_card_gradients_are_the_same_and_less_is_allocated(keep):
    model, x = make().double().cuda(), torch.randn(4096, 16, dtype=torch.float64, device="cuda")
    allocated = []

    def step() -> dict[str, Tensor | None]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        loss = model(x).square().sum()
        allocated.append(torch.cuda.memory_allocated())
        loss.backward()
        return gradients(model)

    with bb.apply(plan((), keep=keep), model):
        expected = step()
    with bb.apply(plan(keep=keep), model):
        for _ in range(20):  # A race between streams does not show each time.
            assert_same_gradients(step(), expected, tolerance=0)

    assert allocated[0] - allocated[-1] >= 3 * 4096 * 16 * 8 - 4096


@pytest.mark.gpu
def test_on_a_card_what_is_changed_after_the_call_does_not_reach_the_copy():
    layer, x = nn.Linear(2048, 2048).cuda(), torch.randn(8192, 2048, device="cuda", requires_grad=True)
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh()))
    expected = run(model, x * 1.0)
    with bb.apply(plan(("0",), ("0",)), model):
        given = x * 1.0
        output = model(given)
        given.detach().zero_()
        model.zero_grad()
        output.square().sum().backward()

    assert_same_gradients(gradients(model), expected, tolerance=1e-6)
