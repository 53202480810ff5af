"""A task that trains in a moment: points in the plane, one of three classes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import bigbatch as bb


class Points(Dataset):
    """Points and their classes; ``noisy`` draws a random number for each one, as augmentation does."""

    def __init__(self, num_samples: int, seed: int = 0, *, noisy: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(num_samples, 2, generator=generator)
        self.labels = (self.points[:, 0] > 0).long() + (self.points[:, 1] > 0).long()
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(2) if self.noisy else 0.0
        return self.points[index] + noise, self.labels[index]


def network(*, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    layers = [nn.Linear(2, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def evaluate(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits = model(batch[0])
    return {
        "accuracy": ((logits.argmax(1) == batch[1]).sum(), len(batch[1])),
        "loss": (F.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])),
    }


def tiny_task(**changes: Any) -> bb.Task:
    fields: dict[str, Any] = dict(
        model=network,
        train_data=lambda: Points(50),
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        eval_data=lambda: Points(37, seed=1),
        evaluate=evaluate,
        batch_size=16,
        epochs=3,
        name="tiny",
    )
    return bb.Task(**{**fields, **changes})
