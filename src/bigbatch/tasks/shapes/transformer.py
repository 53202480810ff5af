"""The block of GPT-2 and of ViT: attention and two linear layers, each behind a LayerNorm."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """``(N, T, width)`` to the same.

    Args:
        causal: Each position attends to itself and those before it.
        approximate: Of the GELU.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        hidden: int | None = None,
        causal: bool = False,
        eps: float = 1e-5,
        approximate: Literal["none", "tanh"] = "none",
    ):
        super().__init__()
        hidden = hidden or 4 * width
        self.norm1 = nn.LayerNorm(width, eps)
        self.attention = Attention(width, num_heads, causal=causal)
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """What goes in, plus attention, plus what the linear layers add to each position."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Of ``num_heads`` heads, with biases; query, key and value come from one linear layer."""

    def __init__(self, width: int, num_heads: int, *, causal: bool):
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, T, width)`` to the same."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))
