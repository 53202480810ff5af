"""What a built-in shape is: a model to plan without weights, with a batch, a loss and an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A well-known model with random weights.

    Everything is made on the default device, so that with ``torch.device("meta")`` nothing is allocated:

    >>> import torch
    >>> from bigbatch.tasks.shapes import find_shape
    >>> shape = find_shape("resnet50")
    >>> with torch.device("meta"):
    ...     model, (images, labels) = shape.model(), shape.batch(64)
    >>> sum(parameter.numel() for parameter in model.parameters()), images.shape
    (25557032, torch.Size([64, 3, 224, 224]))

    Attributes:
        name: What it is found by.
        description: One line: what it is, and what is assumed of its training.
        size: Tokens in a sample of text, or pixels on each side of an image.
        model: Makes the model.
        batch: ``batch(num_samples)`` makes inputs and targets of so many samples.
        loss_fn: ``loss_fn(model, batch)``, the mean over the samples.
        optimizer: ``optimizer(model)`` makes the optimizer.
    """

    name: str
    description: str
    size: int
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, in float32, of logits ``(N, ..., classes)`` and targets ``(N, ...)``."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2).float(), targets.flatten())


def pixel_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, in float32, of logits ``(N, classes, ...)`` and targets ``(N, ...)``."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float(), targets)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as it comes."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def tokens(num_samples: int, length: int, vocabulary: int) -> Batch:
    """Random tokens and the ones that follow them, each ``(num_samples, length)``."""
    return tuple(torch.randint(vocabulary, (num_samples, length)) for _ in range(2))  # type: ignore[return-value]


def images(num_samples: int, size: int, *target_shape: int, num_classes: int) -> Batch:
    """Random images ``(num_samples, 3, size, size)`` and their targets ``(num_samples, *target_shape)``."""
    return torch.randn(num_samples, 3, size, size), torch.randint(num_classes, (num_samples, *target_shape))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating-point parameters of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
