"""Layers of transformers have a switch of their own, which drops the caches that would grow twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import bigbatch as bb
from tests.reference import assert_same_gradients, gradients

transformers = pytest.importorskip("transformers")

SIZES = dict(
    gpt2=dict(n_embd=8, n_layer=3, n_head=2, n_positions=16, vocab_size=11, bos_token_id=0, eos_token_id=0),
    llama=dict(
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=11,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ),
)
LAYERS = dict(gpt2="transformer.h", llama="model.layers")
CHOICES = [(0, 1, 2), (1,), ((0, 1, 2),), ((0, 1), 2)]


def make_model(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(**SIZES[kind], **options)
        return transformers.GPT2LMHeadModel(config).double().train()
    config = transformers.LlamaConfig(**SIZES[kind], attention_dropout=0.2, **options)
    return transformers.LlamaForCausalLM(config).double().train()


def layers(kind: str, choice: Any) -> tuple[Any, ...]:
    return tuple(
        tuple(f"{LAYERS[kind]}.{i}" for i in one) if isinstance(one, tuple) else f"{LAYERS[kind]}.{one}"
        for one in choice
    )


def plan(*names: Any) -> bb.Plan:
    return bb.Plan(micro_batch_size=8, recompute=names)


def run(model: nn.Module, ids: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(input_ids=ids).logits.square().sum().backward()
    return gradients(model)


def states(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


def num_runs(model: nn.Module, kind: str, ids: Tensor) -> list[int]:
    counts = [0, 0, 0]

    def count(index: int) -> Any:
        return lambda *_: counts.__setitem__(index, counts[index] + 1)

    inner = [next(layer.children()) for layer in model.get_submodule(LAYERS[kind]).children()]
    hooks = [module.register_forward_pre_hook(count(index)) for index, module in enumerate(inner)]
    run(model, ids)
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradients_are_those_without_recompute(kind, choice, use_cache):
    model, ids = make_model(kind, use_cache=use_cache), torch.randint(0, 11, (3, 7))
    before = states(model)
    expected = run(model, ids)

    with bb.apply(plan(*layers(kind, choice)), model) as handle:
        found = run(model, ids)
        counts = num_runs(model, kind, ids)

    assert_same_gradients(found, expected, tolerance=1e-13)
    chosen = {i for one in choice for i in (one if isinstance(one, tuple) else (one,))}
    assert counts == [2 if index in chosen else 1 for index in range(3)]
    alone = {f"{LAYERS[kind]}.{one}" for one in choice if not isinstance(one, tuple)}
    assert handle.mechanism == {
        f"{LAYERS[kind]}.{i}": "transformers" if f"{LAYERS[kind]}.{i}" in alone else "bigbatch" for i in sorted(chosen)
    }
    assert states(model) == before


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_cache_grows_once_in_a_group(kind):
    model, ids = make_model(kind, use_cache=True), torch.randint(0, 11, (3, 7))
    seen: list[int] = []

    with bb.apply(plan(*layers(kind, ((0, 1, 2),))), model):
        output = model(input_ids=ids)
        cache = output.get("past_key_values", output.get("cache"))
        model.get_submodule(LAYERS[kind])[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.extend(
                value.get_seq_length() for value in [*args, *kwargs.values()] if isinstance(value, type(cache))
            ),
            with_kwargs=True,
        )
        output.logits.sum().backward()

    assert seen == [0], "the second run starts from the cache as it was"
    assert cache.get_seq_length() == 7


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_switch_that_was_on_is_off_for_the_plan_and_on_again_after(kind):
    model, ids = make_model(kind), torch.randint(0, 11, (3, 7))
    model.activation_checkpointing_enable() if hasattr(model, "activation_checkpointing_enable") else (
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    )
    before = states(model)
    assert num_runs(model, kind, ids) == [2, 2, 2]

    with pytest.warns(bb.BigBatchWarning, match=r"switched on in \d modules"):
        handle = bb.apply(plan(*layers(kind, (1,))), model)
    assert num_runs(model, kind, ids) == [1, 2, 1]
    handle.remove()

    assert states(model) == before
    assert num_runs(model, kind, ids) == [2, 2, 2]
    with bb.apply(None, model):
        assert num_runs(model, kind, ids) == [2, 2, 2], "what the user switched on is the user's"


def test_without_training_mode_their_switch_does_nothing_and_generation_keeps_its_cache():
    model, ids = make_model("gpt2").eval(), torch.randint(1, 11, (2, 5))
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
    expected = model.generate(ids, **options)

    for choice in CHOICES:
        with bb.apply(plan(*layers("gpt2", choice)), model):
            assert torch.equal(model.generate(ids, **options), expected)
            model.train()
            with torch.no_grad():
                found = model(ids, use_cache=True)
            assert (found.get("past_key_values", found.get("cache"))).get_seq_length() == 5
            model.eval()


def test_a_copy_recomputes_with_its_own_parameters():
    model, ids = make_model("llama"), torch.randint(0, 11, (3, 7))
    bb.apply(plan(*layers("llama", (0, (1, 2)))), model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    plain = copy.deepcopy(twin)
    bb.apply(None, plain)
    model.zero_grad()

    assert num_runs(twin, "llama", ids) == [2, 2, 2]
    assert_same_gradients(run(twin, ids), run(plain, ids), tolerance=1e-13)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batch_norm_in_a_layer_of_theirs_counts_once():
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return torch.tanh(self.norm(self.linear(x))) * (1.0 if scale is None else scale)

    class Net(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return self[1](self[0](input), scale=input.exp())

    model, x = Net(Layer(), Layer()).double(), torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()

    with bb.apply(plan("0", "1"), model) as handle:
        model(x).sum().backward()

    assert set(handle.mechanism.values()) == {"transformers"}
    assert_same_gradients(gradients(model), gradients(plain), tolerance=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
