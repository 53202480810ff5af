"""Built-in task ``digits``: a residual network on scikit-learn's 1,797 images of handwritten digits."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

from bigbatch.errors import MissingExtraError, OptionError
from bigbatch.training.task import Metrics, Task

Norm = Literal["batch", "group", "layer"]

_WIDTH = 32
_LEARNING_RATE = 5e-3
_DISTORTION = torch.tensor([math.radians(12), 0.1, 0.1, 1 / 4, 1 / 4])  # a quarter of the way from middle to edge


def digits(norm: Norm = "batch") -> Task:
    """The task; 99 % of the test images are right after some seconds of training.

    Args:
        norm: ``"batch"``: BatchNorm, which sees the statistics of a micro-batch; ``"group"``: GroupNorm of 8 groups;
            ``"layer"``: one group of all channels. With the last two, a cut batch is exactly the big batch.

    Raises:
        OptionError: There is no such norm.
    """
    if norm not in ("batch", "group", "layer"):
        raise OptionError(f"norm={norm!r}; it is one of 'batch', 'group', 'layer'.")
    return Task(
        name="digits",
        model=lambda: ResidualNetwork(norm),
        train_data=lambda: Digits(train=True),
        loss_fn=_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE),
        scheduler=lambda optimizer, total_steps: OneCycleLR(optimizer, _LEARNING_RATE, total_steps),
        eval_data=lambda: Digits(train=False),
        evaluate=_evaluate,
        batch_size=512,
        epochs=40,
        evaluate_every=5,
    )


class ResidualNetwork(nn.Module):
    """Six residual blocks, five on 8 x 8 pixels and one that goes down to 4 x 4.

    The input has shape ``(N, 1, 8, 8)``, the output, logits, ``(N, 10)``.
    """

    def __init__(self, norm: Norm = "batch", width: int = _WIDTH):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), _norm(norm, width), nn.ReLU())
        self.blocks = nn.Sequential(
            *(_Block(norm, width, width) for _ in range(5)),
            _Block(norm, width, 2 * width, stride=2),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the ten digits."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, norm: Norm, num_in: int, num_out: int, stride: int = 1):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False),
            _norm(norm, num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            _norm(norm, num_out),
        )
        same = num_in == num_out and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inner(x) + self.skip(x))


def _norm(norm: Norm, num_channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(num_channels)
    return nn.GroupNorm(8 if norm == "group" else 1, num_channels)


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Half of the images for training, a little turned, sheared, scaled and shifted each time; half for the test.

    Half, and not the usual fifth: one image of 360 is 0.28 points of accuracy, too coarse to tell whether two runs
    differ by half a point.

    Args:
        train: The half for training; otherwise the one for the test, which is left as it is.
    """

    def __init__(self, *, train: bool):
        self.train = train
        self.images, self.labels = _halves()[0 if train else 1]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        """Images, each ``(1, 8, 8)``, and their digits; all at once, because one by one takes longer than training."""
        images = self.images[indices]
        if self.train:
            images = _distorted(images)
        return [(image, self.labels[index]) for image, index in zip(images, indices, strict=True)]


def _distorted(images: torch.Tensor) -> torch.Tensor:
    """Turned by up to 12 degrees, scaled and sheared by a tenth, shifted by one of eight pixels; ``(n, 1, 8, 8)``."""
    angle, scale, shear, right, down = (torch.rand(5, len(images)) * 2 - 1) * _DISTORTION[:, None]
    cos, sin = (1 + scale) * angle.cos(), (1 + scale) * angle.sin()
    maps = torch.stack([torch.stack([cos, shear - sin, right], 1), torch.stack([sin, cos, down], 1)], 1)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


_Half = tuple[torch.Tensor, list[int]]


@cache
def _halves() -> tuple[_Half, _Half]:
    """Images, shape ``(n, 1, 8, 8)``, from 0 to 1, and their digits; each digit in both halves alike."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingExtraError(
            'The images of the task "digits" come with scikit-learn, which is not installed: '
            'pip install "bigbatch[demo]".'
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=0.5, stratify=labels, random_state=0
    )
    return (_images(train), [*map(int, train_labels)]), (_images(test), [*map(int, test_labels)])


def _images(pixels: Any) -> torch.Tensor:
    return torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def _evaluate(model: nn.Module, batch: Any) -> Metrics:
    images, labels = batch
    logits = model(images)
    return {
        "accuracy": ((logits.argmax(1) == labels).sum(), len(labels)),
        "loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
    }
