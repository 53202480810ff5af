"""What operations returned is kept and nothing else changes: tests compare with the same run without recompute."""

from __future__ import annotations

import collections
import functools
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bigbatch as bb
from bigbatch.memory import selective
from bigbatch.memory.checkpointing import run_recomputed
from bigbatch.memory.fakes import fake_copy
from bigbatch.memory.measure import LiveBytes, count_peak_bytes
from bigbatch.memory.selective import KeptOutputs
from tests.models import Attention
from tests.reference import assert_same_gradients, gradient_error, gradients

KEEP = ["attention", "matmul"]


class CountOperations(TorchDispatchMode):
    """How often each operation ran, by its name without overload."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().partition(".")[0].removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """A transformer block with dropout after attention, after the activation and at the end."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.narrow(self.dropout(F.gelu(self.wide(self.norm(x))))))


class ConvBlock(nn.Module):
    """Convolution, BatchNorm and an activation that writes in place, twice; the second changes a kept output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu_(self.norm(self.first(x)))
        return x + F.selu_(self.second(hidden)).sigmoid()


def stack(make: Any, num: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(make() for _ in range(num)))


def plan(keep: str | None, num: int = 3) -> bb.Plan:
    names = tuple(str(index) for index in range(num))
    return bb.Plan(micro_batch_size=8, recompute=names, keep=tuple((name, keep) for name in names if keep))


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(x).float().square().sum().backward()
    return gradients(model)


def counted(model: nn.Module, x: Tensor) -> collections.Counter[str]:
    """Operations of the forward and of those run again in backward; backward's own matrix products are taken off."""
    with CountOperations() as count:
        run(model, x)
    return count.counts


@pytest.mark.parametrize("keep", KEEP)
def test_gradients_of_a_transformer_with_dropout_are_those_without_recompute(keep):
    model, x = stack(Layer).double(), torch.randn(4, 6, 8, dtype=torch.float64)
    expected = run(model, x)

    with bb.apply(plan(keep), model):
        found = run(model, x)

    assert_same_gradients(found, expected, tolerance=1e-15)
    assert_same_gradients(run(model, x), expected, tolerance=0)  # and off again
    torch.manual_seed(2)
    assert gradient_error(run(model, x * 1.01), expected) > 1e-3, "control: another input is far outside"


@pytest.mark.parametrize(("keep", "attentions", "products"), [(None, 2, 2), ("attention", 1, 2), ("matmul", 1, 1)])
def test_what_is_kept_runs_once_and_the_rest_twice(keep, attentions, products):
    model, x = stack(Layer), torch.randn(4, 6, 8)
    plain = counted(model, x)

    with bb.apply(plan(keep), model):
        found = counted(model, x)

    assert found["_scaled_dot_product_flash_attention_for_cpu"] == 3 * attentions
    assert found["addmm"] == 3 * 6 * products
    assert found["mm"] == plain["mm"], "backward's own"
    assert found["native_layer_norm"] == 3 * 2 * 2, "control: what is not kept runs twice"


def test_bytes_kept_lie_between_recomputed_and_plain():
    model, x = stack(lambda: Layer(16)), torch.randn(8, 32, 16)

    def kept(the_plan: bb.Plan | None) -> int:
        gc.collect()
        with bb.apply(the_plan, model), LiveBytes() as live:
            output = model(x)
            found = live.current_bytes()
        del output
        return found

    plain, full, attention, matmul = kept(None), kept(plan(None)), kept(plan("attention")), kept(plan("matmul"))

    tokens = 8 * 32 * 4  # bytes of one number a token
    # Attention returns one number for each of 16 channels, and its sum of exponentials for each of 2 heads.
    assert attention - full == 3 * tokens * (16 + 2)
    # Query, key, value, out, 64 wide, and narrow again.
    assert matmul - attention == 3 * tokens * (4 * 16 + 64 + 16)
    assert full < attention < matmul < plain


def test_kept_outputs_are_gone_after_backward():
    model, x = stack(Layer), torch.randn(4, 6, 8)
    with bb.apply(plan("matmul"), model), LiveBytes() as live:
        live.track(model, x)
        model(x).sum().backward()
        model.zero_grad()
        found = live.current_bytes()
    with LiveBytes() as alone:
        alone.track(model, x)

    assert found == alone.current_bytes()


def test_what_the_second_run_did_not_come_to_is_dropped_at_its_end():
    x, kept = torch.randn(3, 3), KeptOutputs(selective.KEPT_OPERATIONS["matmul"])
    with kept.recording():
        x.mm(x).mm(x)
    with kept.replaying():
        x.mm(x)

    assert [entry.output for entry in kept._kept] == [None, None]


@pytest.mark.parametrize("keep", [None, *KEEP])
def test_fake_tensors_count_the_same_peak(keep):
    model, x = stack(lambda: Layer(16)), torch.randn(8, 32, 16)

    def peak(model: nn.Module, x: Tensor) -> int:
        with count_peak_bytes("cpu", [model, x]) as found:
            model(x).square().sum().backward()
        return found.peak_bytes

    with bb.apply(plan(keep), model):
        real = peak(model, x)
    model.zero_grad(set_to_none=True)
    mode = FakeTensorMode()
    fake_model, fake_x = fake_copy((model, x), mode)
    with mode, bb.apply(plan(keep), fake_model):
        fake = peak(fake_model, fake_x)

    assert fake == real


@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_convolution_with_batchnorm_counts_once_and_what_is_changed_in_place_runs_again(batch_size):
    model, x = stack(ConvBlock).double(), torch.randn(batch_size, 2, 5, 5, dtype=torch.float64) * 3 + 10
    plain = stack(ConvBlock).double()
    expected = run(plain, x)

    with bb.apply(plan("matmul"), model), CountOperations() as count:
        found = run(model, x)

    assert_same_gradients(found, expected, tolerance=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    # The first convolution of a block is kept; the second was changed by selu_, and runs again.
    assert count.counts["convolution"] == 3 * 3


def test_control_torch_refuses_what_is_changed_in_place():
    block, x = ConvBlock().eval(), torch.randn(2, 2, 5, 5)
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.convolution.default])

    with pytest.raises(RuntimeError, match="has been mutated"):
        checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()


@pytest.mark.parametrize("keep", KEEP)
def test_autocast_of_the_forward_holds_in_the_second_run(keep):
    model, x = stack(Layer), torch.randn(4, 6, 8)

    class Shared(nn.Module):
        """Two recomputed calls with the same weights: autocast casts them in the first one only."""

        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layers[0](self.layers(x))

    shared = Shared()
    expected = run(shared, x)
    names = plan(keep)
    with bb.apply(names, shared.layers), CountOperations() as count:
        found = run(shared, x)

    assert_same_gradients(found, expected, tolerance=0)
    assert count.counts["_scaled_dot_product_flash_attention_for_cpu"] == 4


@pytest.mark.parametrize("keep", KEEP)
def test_a_layer_of_transformers(keep):
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=11, bos_token_id=0, eos_token_id=0)
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.2, use_cache=True)
    model = transformers.GPT2LMHeadModel(config).double().train()
    names = ("transformer.h.0", "transformer.h.1")
    ids = torch.randint(0, 11, (3, 7))

    def step() -> tuple[dict[str, Tensor | None], collections.Counter[str]]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        with CountOperations() as count:
            model(input_ids=ids).logits.square().sum().backward()
        return gradients(model), count.counts

    before = [dict(vars(module)) for module in model.modules()]
    expected, _ = step()
    with bb.apply(bb.Plan(8, recompute=names, keep=tuple((name, keep) for name in names)), model) as handle:
        found, counts = step()
    with bb.apply(bb.Plan(8, recompute=names), model):
        _, without = step()

    assert set(handle.mechanism.values()) == {"transformers"}
    assert_same_gradients(found, expected, tolerance=1e-13)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (counts[attention], without[attention]) == (2, 4)
    assert [dict(vars(module)) for module in model.modules()] == before


class NativeDropout(nn.Module):
    """Dropout as one operation, which it is on a card."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.5, True)[0]


def test_random_numbers_after_a_kept_operation_are_those_of_the_forward(monkeypatch):
    """Attention with dropout draws on a card, in a kernel that the CPU lacks; here dropout itself is kept."""
    layers = nn.Sequential(NativeDropout(), nn.Linear(32, 32), NativeDropout(), nn.Linear(32, 32), nn.Tanh())
    model, x = nn.Sequential(layers.double(), nn.Identity()), torch.randn(4, 32, dtype=torch.float64)
    turns: list[Any] = []

    def is_first(self: KeptOutputs, operation: Any) -> bool:
        """The first dropout alone is kept, so that the second one draws its mask again."""
        if operation is not torch.ops.aten.native_dropout.default:
            return False
        turns.append(operation)
        return len(turns) % 2 == 1

    monkeypatch.setattr(KeptOutputs, "includes", is_first)
    expected = run(model, x)
    with bb.apply(plan("matmul", 1), model):
        found = run(model, x)
        monkeypatch.setattr(selective, "_random_states", lambda *_: [])
        turns.clear()
        wrong = run(model, x)

    assert len(turns) == 4, "two in the forward, two in the second run"
    assert_same_gradients(found, expected, tolerance=1e-15)
    assert gradient_error(wrong, expected) > 0.1, "control: the generator stays behind"


def test_attention_without_dropout_draws_nothing():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    kept = KeptOutputs(selective.KEPT_OPERATIONS["attention"])
    with kept.recording():
        F.scaled_dot_product_attention(q, q, q)

    assert [entry.random_states for entry in kept._kept] == [[]], "its tag alone would cost 5 kB a call"


def test_a_second_backward_computes_again_what_was_given_away():
    model, x = stack(Layer).double(), torch.randn(2, 3, 8, dtype=torch.float64)
    expected = run(model, x)
    with bb.apply(plan("matmul"), model):
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(x).float().square().sum()
        loss.backward(retain_graph=True)
        assert_same_gradients(gradients(model), expected, tolerance=1e-15)
        model.zero_grad()
        loss.backward()

    assert_same_gradients(gradients(model), expected, tolerance=1e-15)


def test_the_gradient_of_a_gradient_goes_through():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    model, x = model.double(), torch.randn(5, 3, dtype=torch.float64)

    def penalty() -> dict[str, Tensor | None]:
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        return gradients(model)

    expected = penalty()
    with bb.apply(plan("matmul", 1), model):
        found = penalty()

    assert_same_gradients(found, expected, tolerance=1e-13)


def test_a_function_that_does_something_else_the_second_time_is_refused():
    w, turns = torch.randn(3, 3, requires_grad=True), iter([True, False])

    def fickle(x: Tensor) -> Tensor:
        return (x.mm(w) if next(turns) else torch.baddbmm(x[None], x[None], w[None])[0]).tanh()

    output = run_recomputed(fickle, (torch.randn(3, 3),), {}, keep="matmul")

    with pytest.raises(bb.RecomputeError, match=r"number 1 was 'aten::mm' in the forward, and is 'aten::baddbmm'"):
        output.sum().backward()


def test_a_module_in_which_nothing_is_kept_is_told_once():
    class Quiet(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().tanh()

    model, x = nn.Sequential(Quiet(), Quiet()), torch.randn(3, requires_grad=True)
    with bb.apply(plan("attention", 2), model):
        with pytest.warns(bb.BigBatchWarning, match=r"keep='attention' kept nothing of Quiet.*fused attention") as seen:
            model(x).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x).sum().backward()

    assert len(seen) == 1


def test_what_runs_under_inference_mode_is_computed_again():
    w = torch.randn(3, 3, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = (x.detach() @ x.detach()).abs().max().item()
        return (x.mm(w) / scale).tanh()

    x = torch.randn(3, 3)
    run_recomputed(function, (x,), {}, keep="matmul").sum().backward()
    found, w.grad = w.grad, None
    function(x).sum().backward()

    assert found is not None
    assert torch.equal(found, w.grad)


def test_a_compiled_part_is_compiled_inside_too():
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="aot_eager")
    model, x = nn.Sequential(nn.Sequential(compiled, nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)), torch.randn(3, 4)
    expected = run(model, x)
    with bb.apply(plan("matmul", 1), model):
        found = run(model, x)

    assert_same_gradients(found, expected, tolerance=1e-6)
    torch._dynamo.reset()


def test_a_compiled_model_is_warned_about():
    model = nn.Sequential(Layer())

    with pytest.warns(bb.BigBatchWarning, match="no effect in a compiled model"):
        bb.apply(plan("matmul", 1), torch.compile(model, backend="eager"))


def test_flex_attention_is_kept():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, kept = torch.randn(1, 2, 16, 16), KeptOutputs(frozenset({"flex_attention"}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It wants to be compiled.
        with kept.recording():
            first = flex.flex_attention(q, q, q)
        with kept.replaying():
            second = flex.flex_attention(q, q, q)

    assert len(kept) == 1
    assert torch.equal(first, second)
    torch._dynamo.reset()


PLANS = [
    (dict(keep=(("2", "matmul"),)), r"keep names '2', which is not recomputed.*Write '2' in recompute="),
    (dict(keep=(("b", "matmul"),)), r"keep names 'b', which is recomputed in the group \('b', 'c'\).*one by one"),
    (dict(keep=(("a", "mm"),)), r"keep\['a'\]='mm'; it is one of 'attention', 'matmul'"),
    (dict(keep=("a", "matmul")), "keep=.*it holds pairs of a name and a word"),
    (dict(keep="a"), "keep='a'; it holds pairs"),
    (dict(keep=(("a", "matmul"), ("a", "attention"))), "names a module twice"),
    (dict(offload=("d",)), r"offload names 'd', which is not recomputed.*Write 'd' in recompute="),
    (dict(offload=("c",)), r"offload names 'c', which is not the first of its group \('b', 'c'\).*Write 'b'"),
    (dict(offload="a"), "offload='a'; it holds names"),
    (dict(offload=(1,)), r"offload=\(1,\); it holds names"),
]


@pytest.mark.parametrize(("fields", "message"), PLANS, ids=[message[:30] for _, message in PLANS])
def test_a_plan_that_cannot_be_is_refused(fields, message):
    with pytest.raises(bb.OptionError, match=message):
        bb.Plan(8, recompute=("a", ("b", "c")), **fields)


def test_a_plan_with_lists_is_hashable_and_comes_back_from_json():
    found = bb.Plan(8, recompute=["a", ["b", "c"]], keep=[["a", "matmul"]], offload=["b", "a"])  # pyright: ignore

    assert found.keep == (("a", "matmul"),)
    assert found.offload == ("b", "a")
    assert bb.Plan.from_json(found.to_json()) == found
    assert hash(bb.Plan.from_json(found.to_json())) == hash(found)
