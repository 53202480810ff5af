"""GPT-2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigbatch.tasks.shapes.shape import Shape, adamw, class_loss, tokens
from bigbatch.tasks.shapes.transformer import Block

VOCABULARY = 50257


class Gpt2(nn.Module):
    """Tokens ``(N, T)`` to logits ``(N, T, vocabulary)``.

    Args:
        length: The most tokens T in a sample.
        tied: The head is the embedding.
    """

    def __init__(
        self,
        num_layers: int = 12,
        width: int = 768,
        num_heads: int = 12,
        vocabulary: int = VOCABULARY,
        length: int = 1024,
        *,
        tied: bool = True,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, causal=True, approximate="tanh") for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for weight in (self.embed.weight, self.position.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at each position."""
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt2(size: int = 1024) -> Shape:
    """GPT-2 of 124 M parameters on ``size`` tokens, 1024 at most."""
    return Shape(
        name="gpt2",
        description="GPT-2, 124 M parameters, float32, head tied to the embedding, no dropout, AdamW",
        size=size,
        model=Gpt2,
        batch=lambda num_samples: tokens(num_samples, size, VOCABULARY),
        loss_fn=class_loss,
        optimizer=adamw,
    )
