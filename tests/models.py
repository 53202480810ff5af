"""Small networks and the losses that people train them with, for the tests that compare numbers.

Every network maps ``batch["x"]`` to logits with one row of classes per label, so that each loss fits each network. Two
come from transformers: they take labels and shift them inside.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import bigbatch as bb

NUM_CLASSES = 5
NUM_TOKENS = 6
NUM_SAMPLES = 8
# The sample without a valid label: a micro-batch that holds it alone has no mean.
PADDING_SAMPLE = 2
# The one sample that the third expert of the mixture sees; the fourth expert sees none.
RARE_SAMPLE = 5


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Causal attention with two heads; the true gradient of its key bias is zero."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Four blocks; the head is the embedding. Weights start small, as they do in the field."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(NUM_CLASSES, width)
        self.position = nn.Parameter(torch.randn(NUM_TOKENS, width))
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    Residual(nn.Sequential(nn.LayerNorm(width), Attention(width))),
                    Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())),
                )
                for _ in range(4)
            )
        )
        self.head = nn.Linear(width, NUM_CLASSES, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids) + self.position))


class Recurrent(nn.Module):
    """An LSTM: cut along samples, whole along time. It returns a tuple with a tuple in it."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.embed = nn.Embedding(NUM_CLASSES, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class Mixture(nn.Module):
    """Four experts; which one a sample goes to is in its first feature. An expert without a sample is not called."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.gate = nn.Linear(width, 1)
        self.experts = nn.ModuleList(nn.Linear(width, NUM_CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * torch.sigmoid(self.gate(x))
        route = x[:, 0].long()
        logits = hidden.new_zeros(len(x), NUM_CLASSES)
        for index, expert in enumerate(self.experts):
            if (route == index).any():
                logits = logits.index_put((route == index,), expert(hidden[route == index]))
        return logits


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(6, NUM_CLASSES))


def cnn_with_group_norm() -> nn.Module:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())

    tail = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, NUM_CLASSES))
    return nn.Sequential(block(2), Residual(block(4)), Residual(block(4)), tail)


class ShiftsInside(nn.Module):
    """A causal language model of transformers, called with ``x`` and ``labels``; it shifts the labels itself."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=x, labels=labels).loss


def shifted_cross_entropy(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """What transformers computes from logits and labels, in the dtype of the logits."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _take_out_casts_to_float32(model: nn.Module) -> None:
    """Let a model of transformers compute in float64 throughout.

    It computes its loss and Llama's norms in float32, where a comparison would end at 1e-7 whatever is compared.
    """
    model.model.loss_function = shifted_cross_entropy
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_embd=8, n_layer=2, n_head=2, n_positions=8, vocab_size=NUM_CLASSES)
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    tokens = dict(bos_token_id=0, eos_token_id=0)
    return ShiftsInside(GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **tokens, use_cache=False)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12)
    tokens = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return ShiftsInside(LlamaForCausalLM(LlamaConfig(vocab_size=NUM_CLASSES, **sizes, **tokens, use_cache=False)))


@dataclass(frozen=True, eq=False)
class Network:
    """A network of the zoo.

    Attributes:
        build: Makes it; called under a fixed seed.
        blocks: Modules that can be recomputed, in the order of the forward.
        is_chain: Each block's sole input is the one before, so that neighbours can be recomputed as one.
        input_kind: ``"features"`` ``(N, 6)``, ``"images"`` ``(N, 2, 4, 4)``, or ``"ids"`` ``(N, 6)``.
        shifts_inside: It takes labels and returns the loss of the next token.
    """

    name: str
    build: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    input_kind: str
    is_chain: bool = False
    shifts_inside: bool = False

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A fresh copy, with the same weights every time."""
        model = copy.deepcopy(_prototype(self.name)).to(dtype)
        if self.shifts_inside and dtype == torch.float64:
            _take_out_casts_to_float32(model)
        return model


@functools.cache
def _prototype(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        return NETWORKS[name].build().train()


NETWORKS = {
    network.name: network
    for network in (
        Network("mlp", mlp, ("0", "1", "2", "3"), "features", is_chain=True),
        Network("cnn", cnn_with_group_norm, ("0", "1", "2", "3"), "images", is_chain=True),
        Network("transformer", Transformer, tuple(f"blocks.{i}" for i in range(4)), "ids", is_chain=True),
        Network("lstm", Recurrent, ("embed", "lstm", "head"), "ids"),
        Network("mixture", Mixture, ("first", *(f"experts.{i}" for i in range(4))), "features"),
        Network("gpt2", gpt2, ("model.transformer.h.0", "model.transformer.h.1"), "ids", shifts_inside=True),
        Network("llama", llama, ("model.model.layers.0", "model.model.layers.1"), "ids", shifts_inside=True),
    )
}


def make_batch(
    network: Network, dtype: torch.dtype = torch.float64, *, padded: bool = False, seed: int = 23
) -> dict[str, Tensor]:
    """``x``, ``labels`` and ``sample_weight`` of 8 samples, the same every time for a seed.

    Args:
        padded: Labels are -100 in places, all of them in one sample; sequences have very different lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = {"features": (6,), "images": (2, 4, 4), "ids": (NUM_TOKENS,)}[network.input_kind]
    is_sequence = network.input_kind == "ids"
    if is_sequence:
        x = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES, *shape), generator=generator)
    else:
        # Samples of very different size, so that no two micro-batches have nearly the same gradient.
        sizes = torch.linspace(0.3, 3.0, NUM_SAMPLES).view(-1, *[1] * len(shape))
        x = torch.randn(NUM_SAMPLES, *shape, generator=generator, dtype=torch.float64).to(dtype) * sizes.to(dtype)
    if network.input_kind == "features":
        x[:, 0] = torch.arange(NUM_SAMPLES) % 2
        x[RARE_SAMPLE, 0] = 2
    labels = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES, NUM_TOKENS), generator=generator)
    if padded:
        for sample, length in enumerate([6, 2, 0, 3, 2, 5, 6, 4]):
            labels[sample, length:] = -100
    weights = torch.tensor([0.25, 1.5, 0.0, 0.1, 3.2, 0.7, 1.0, 0.35], dtype=torch.float64).to(dtype)
    return dict(x=x, labels=labels if is_sequence else labels[:, 0].contiguous(), sample_weight=weights)


def _cross_entropy(model: nn.Module, batch: dict[str, Tensor], **how: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["labels"].flatten(), **how)


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Over all labels that are not -100."""
    return _cross_entropy(model, batch)


def next_token_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Over ``labels[:, 1:]`` that are not -100: each token is predicted from those before it."""
    if isinstance(model, ShiftsInside):
        return model(batch["x"], batch["labels"])
    return shifted_cross_entropy(model(batch["x"]), batch["labels"])


def penalty(model: nn.Module) -> Tensor:
    return 0.3 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def sum_and_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return _cross_entropy(model, batch, reduction="sum") + penalty(model)


def sum_and_penalty_in_terms(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return bb.Sum(_cross_entropy(model, batch, reduction="sum")), bb.Constant(penalty(model))


def _class_weights(batch: dict[str, Tensor]) -> Tensor:
    return torch.linspace(0.2, 4.0, NUM_CLASSES, dtype=batch["sample_weight"].dtype)


def class_weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """torch divides by the weights of the labels."""
    return _cross_entropy(model, batch, weight=_class_weights(batch))


def class_weighted_ratio(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    weights = _class_weights(batch)
    total = _cross_entropy(model, batch, weight=weights, reduction="sum")
    valid = batch["labels"][batch["labels"] != -100]
    return bb.Ratio(total, weights[valid].sum())


def _two_sums(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy over valid labels, and the size of the logits where the label is even: each with its count."""
    logits = model(batch["x"]).flatten(0, -2)
    labels = batch["labels"].flatten()
    even = (labels % 2 == 0) & (labels != -100)
    fit = F.cross_entropy(logits, labels, reduction="sum")
    return fit, (labels != -100).sum(), logits[even].square().sum(), even.sum()


def two_denominators(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    fit, num_valid, size, num_even = _two_sums(model, batch)
    return fit / num_valid + size / num_even


def two_ratios(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    fit, num_valid, size, num_even = _two_sums(model, batch)
    return dict(fit=bb.Ratio(fit, num_valid), size=bb.Ratio(size, num_even))


def two_means(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The same with both denominators known from the batch; each mean is NaN where its own weight is 0."""
    fit, num_valid, size, num_even = _two_sums(model, batch)
    return dict(fit=fit / num_valid, size=size / num_even)


def four_kinds(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    fit, num_valid, size, num_even = _two_sums(model, batch)
    return fit / num_valid + size / num_even + fit / 100 + penalty(model)


def four_kinds_in_terms(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """A mean over the valid labels, a ratio, a sum and a constant in one loss."""
    fit, num_valid, size, num_even = _two_sums(model, batch)
    return dict(
        mean=fit / num_valid,
        ratio=bb.Ratio(size, num_even),
        sum=bb.Sum(fit / 100),
        constant=bb.Constant(penalty(model)),
    )


def num_even(batch: dict[str, Tensor]) -> Tensor:
    return ((batch["labels"] % 2 == 0) & (batch["labels"] != -100)).sum()


def weighted_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Each sample's mean cross-entropy, weighted by ``sample_weight`` and divided by the sum of these."""
    losses = _cross_entropy(model, batch, reduction="none").view(len(batch["x"]), -1).mean(1)
    return (losses * batch["sample_weight"]).sum() / batch["sample_weight"].sum()


def total_sample_weight(batch: dict[str, Tensor]) -> Tensor:
    return batch["sample_weight"].sum()


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss of a whole batch, and how it is told to bigbatch.

    Attributes:
        plain: ``plain(model, batch)``: of the whole batch, shape ``()``.
        ours: ``ours(model, micro_batch)``: what ``loss_fn`` returns for it.
        options: Step options that go with it.
        padded: Some labels are -100.
        weigh: What the mean of a micro-batch is over; for the loops written by hand. None where it is no mean.
    """

    name: str
    plain: Callable[[Any, Any], Tensor]
    ours: Callable[[Any, Any], Any]
    options: dict[str, Any] = field(default_factory=dict)
    padded: bool = True
    weigh: Callable[[Any], Any] | None = None

    def weight_of(self, batch: Any) -> float:
        """What the mean of this batch is over, as a number."""
        assert self.weigh is not None, f"{self.name} is no mean"
        return float(self.weigh(batch))


def num_labels(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def num_next_labels(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def num_samples(batch: dict[str, Tensor]) -> int:
    return len(batch["x"])


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("mean", mean, mean, padded=False, weigh=num_samples),
        Loss("tokens", mean, mean, dict(weight="tokens"), weigh=num_labels),
        Loss("next_tokens", next_token_mean, next_token_mean, dict(weight="next_tokens"), weigh=num_next_labels),
        Loss("sum_and_penalty", sum_and_penalty, sum_and_penalty_in_terms),
        Loss("class_weighted", class_weighted, class_weighted_ratio),
        Loss("two_ratios", two_denominators, two_ratios),
        Loss("two_means", two_denominators, two_means, dict(weight=dict(fit="tokens", size=num_even))),
        Loss("four_kinds", four_kinds, four_kinds_in_terms, dict(weight="tokens")),
        Loss(
            "fractional",
            weighted_mean,
            weighted_mean,
            dict(weight=total_sample_weight),
            padded=False,
            weigh=total_sample_weight,
        ),
    )
}


def makes_sense(network: Network, loss: Loss) -> bool:
    """Whether the loss can be computed with the network.

    The next token needs a sequence: an MLP, a CNN and the mixture have one label a sample. A model that shifts inside
    returns its loss and nothing else, so no other loss can be had from it.
    """
    if loss.name == "next_tokens":
        return network.input_kind == "ids"
    return not network.shifts_inside
