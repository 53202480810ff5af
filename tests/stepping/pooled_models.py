"""Models with BatchNorm, small, and what is needed to run them as the big batch; imports nothing of bigbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual block; its activation works in place, as in torchvision."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


def resnet(width: int = 8, num_blocks: int = 4) -> nn.Sequential:
    """1 + 2 * num_blocks BatchNorm layers."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    blocks = [Block(width) for _ in range(num_blocks)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def transformers_resnet() -> nn.Module:
    """29 BatchNorm layers, in bottleneck blocks."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[2, 2, 2, 2], layer_type="bottleneck", num_labels=5
    )
    return Logits(ResNetForImageClassification(config))


def dcgan_discriminator() -> nn.Module:
    """As in the DCGAN tutorial, for images of 16 x 16; a class for each of five kinds instead of real and fake."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for width in (8, 16):
        layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width)]
        layers += [nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(32, 5, 2, 1, 0, bias=False), nn.Flatten())


Batch = tuple[Tensor, Tensor]


def images(num_samples: int, size: int = 16) -> Batch:
    """Images whose mean and contrast drift from sample to sample, so that micro-batches differ; float64."""
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, 3, size, size, generator=generator, dtype=torch.float64)
    drift = torch.linspace(-1, 2, num_samples, dtype=torch.float64).view(-1, 1, 1, 1)
    return x * (1 + drift.abs()) + drift, torch.randint(5, (num_samples,), generator=generator)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Big(NamedTuple):
    """What the one big batch gives."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def big_batch(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor] = loss_fn) -> Big:
    """On a copy, in the dtype that model and batch have."""
    private = copy.deepcopy(model)
    loss = loss_fn(private, batch)
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in private.named_parameters()}
    return Big(float(loss.detach()), gradients, {name: b.clone() for name, b in private.named_buffers()})


def buffers_error(model: nn.Module, big: Big) -> float:
    """The largest relative difference of any buffer."""
    errors = [
        float((buffer.double() - big.buffers[name].double()).norm() / big.buffers[name].double().norm().clamp_min(1e-9))
        for name, buffer in model.named_buffers()
    ]
    return max(errors, default=0.0)
