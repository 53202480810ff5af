"""Built-in task ``text``: a small GPT on the text of the standard library's help topics, byte by byte."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

from bigbatch.batch.weighing import IGNORED
from bigbatch.training.task import Metrics, Task

_MAX_TOKENS = 512
_NUM_BYTES = 256
_LEARNING_RATE = 4e-3
_MOST_IN_A_MICRO_BATCH = 16 * _MAX_TOKENS


def text() -> Task:
    """The task: predict the next byte. A sample is a paragraph, of 1 to 512 tokens.

    So a mean is one over tokens, and samples are grouped by length: in the order in which they come, two of three
    tokens of a micro-batch would be padding.
    """
    return Task(
        name="text",
        model=Gpt,
        train_data=lambda: Paragraphs(train=True),
        loss_fn=_loss,
        weight="tokens",
        collate=_padded,
        length=_num_tokens,
        max_tokens=_MOST_IN_A_MICRO_BATCH,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE),
        scheduler=lambda optimizer, total_steps: OneCycleLR(optimizer, _LEARNING_RATE, total_steps),
        max_grad_norm=1.0,
        eval_data=lambda: Paragraphs(train=False),
        evaluate=_evaluate,
        batch_size=128,
        eval_batch_size=16,
        epochs=6,
    )


class Gpt(nn.Module):
    """A transformer that sees only what came before; the embedding of the bytes is the output head too.

    The input has shape ``(N, T)`` with ``T`` up to 512, the output, logits, ``(N, T, 256)``.
    """

    def __init__(self, width: int = 96, num_layers: int = 2, num_heads: int = 4):
        super().__init__()
        self.bytes = nn.Embedding(_NUM_BYTES, width)
        self.places = nn.Embedding(_MAX_TOKENS, width)
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _NUM_BYTES, bias=False)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the byte that follows each one."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        # Without biases: that of the keys has no gradient but rounding errors, which Adam would make large.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (N, heads, T, width / heads)
        # Padding stands at the end, where the causal mask hides it from every token that counts.
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Paragraphs(Dataset[torch.Tensor]):
    """Paragraphs as bytes, each with the newline before it; a long one is several samples.

    A sample has shape ``(T + 1,)``: ``T`` tokens and, shifted by one, ``T`` targets.

    Args:
        train: Nine of ten paragraphs; otherwise the others.

    Attributes:
        lengths: ``T`` of each sample.
    """

    def __init__(self, *, train: bool):
        self.samples = _samples(train=train)
        self.lengths = [_num_tokens(sample) for sample in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]


@cache
def _samples(*, train: bool) -> list[torch.Tensor]:
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = [part for part in re.split(r"\n\s*\n", joined) if part.strip()]
    chosen = [part for i, part in enumerate(paragraphs) if (i % 10 == 0) != train]
    return [piece for part in chosen for piece in _pieces(f"\n{part}".encode())]


def _pieces(paragraph: bytes) -> list[torch.Tensor]:
    """Windows that overlap by one byte, so that every byte but the first is a target once."""
    tokens = torch.tensor(list(paragraph))
    starts = range(0, len(paragraph) - 1, _MAX_TOKENS)
    return [tokens[start : start + _MAX_TOKENS + 1] for start in starts]


def _num_tokens(sample: torch.Tensor) -> int:
    return len(sample) - 1


def _padded(samples: list[torch.Tensor], pad_to_multiple_of: int = 1) -> dict[str, torch.Tensor]:
    """Tokens and labels, each ``(N, T)`` with ``T`` of the longest sample; labels are -100 where there is padding."""
    tokens = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    labels = pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=IGNORED)
    more = -tokens.shape[1] % pad_to_multiple_of
    return {"tokens": F.pad(tokens, (0, more)), "labels": F.pad(labels, (0, more), value=IGNORED)}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def _evaluate(model: nn.Module, batch: dict[str, Any]) -> Metrics:
    labels = batch["labels"].flatten()
    nats = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return {"bits_per_byte": (nats / math.log(2), (labels != IGNORED).sum())}
