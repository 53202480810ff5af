"""Llama 3: RMSNorm, rotary positions, grouped queries, gated linear layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.tasks.shapes.shape import Shape, adamw, class_loss, default_dtype, tokens

VOCABULARY = 128256


class Llama(nn.Module):
    """Tokens ``(N, T)`` to logits ``(N, T, vocabulary)``; the defaults are those of Llama 3 8B.

    Args:
        hidden: Width inside the gated linear layers.
        length: The most tokens T in a sample: the tables of rotary positions have so many rows.
        tied: The head is the embedding.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        num_layers: int = 32,
        width: int = 4096,
        num_heads: int = 32,
        num_kv_heads: int = 8,
        hidden: int = 14336,
        vocabulary: int = VOCABULARY,
        length: int = 8192,
        *,
        tied: bool = False,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, num_heads, num_kv_heads, hidden) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        cos, sin = _rotary_tables(length, width // num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at each position."""
        x = self.embed(ids)
        # The very same two tensors go to every block, so that neighbours can be recomputed as one group.
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """``(N, T, width)`` and the two tables of rotary positions to ``(N, T, width)``.

    Query, key and value come from one matrix, and so do gate and up: fewer operations, the same bytes.
    """

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, hidden: int):
        super().__init__()
        self.heads = [num_heads, num_kv_heads]
        self.head_width = width // num_heads
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * self.head_width, bias=False)
        self.out = nn.Linear(num_heads * self.head_width, width, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What goes in, plus attention, plus what the gated linear layers add to each position."""
        x = x + self.out(self._attend(self.qkv(self.norm1(x)), cos, sin))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        num_heads, num_kv_heads = self.heads
        heads = qkv.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        query_key, value = heads.split([num_heads + num_kv_heads, num_kv_heads], 1)
        query, key = _rotated(query_key, cos, sin).split(self.heads, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=num_heads != num_kv_heads)
        return mixed.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of ``x``, ``(..., T, head_width)``, turned by the angle of its position."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _rotary_tables(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, each ``(length, head_width / 2)``, in the default dtype."""
    frequencies = 500_000.0 ** -(torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos().to(torch.get_default_dtype()), angles.sin().to(torch.get_default_dtype())


def llama_8b(size: int = 8192) -> Shape:
    """Llama 3 8B on ``size`` tokens."""
    return _shape("llama-8b", "Llama 3 8B, 8.03 G parameters", size)


def llama_70b(size: int = 8192) -> Shape:
    """Llama 3 70B on ``size`` tokens."""
    sizes = dict(num_layers=80, width=8192, num_heads=64, hidden=28672)
    return _shape("llama-70b", "Llama 3 70B, 70.6 G parameters", size, **sizes)


def _shape(name: str, what: str, size: int, **sizes: Any) -> Shape:
    def make_model() -> Llama:
        with default_dtype(torch.bfloat16):
            return Llama(length=size, **sizes)

    return Shape(
        name=name,
        description=f"{what} and AdamW, both in bfloat16",
        size=size,
        model=make_model,
        batch=lambda num_samples: tokens(num_samples, size, VOCABULARY),
        loss_fn=class_loss,
        optimizer=adamw,
    )
