"""Built-in task ``resnet50``: ResNet-50 on images of one's own, or on made ones that can be learned."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from bigbatch.errors import MissingExtraError, OptionError, TaskError
from bigbatch.tasks.shapes.resnet import NUM_CLASSES
from bigbatch.tasks.shapes.resnet import resnet50 as shape_of
from bigbatch.training.task import Task

_LEARNING_RATE = 0.025
"""0.1 for batches of 256 (Goyal et al. 2017, https://arxiv.org/abs/1706.02677), by their linear rule for 64."""
_NUM_MADE, _NUM_MADE_CLASSES = 12_800, 10
_PATTERN, _NOISE = 6, 0.5
_MEAN, _DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
_LARGER = 1.15
"""An image is made so much larger than the part of it that is cut out: 256 to 224, as is usual."""


def resnet50(image_size: int = 224, images: str | None = None) -> Task:
    """The task: the model, loss and optimizer that ``bigbatch plan resnet50`` plans, in batches of 64.

    Args:
        image_size: Pixels on each side.
        images: A folder with a folder of images for each class. None: images are made, each a pattern of its class
            under noise, so that there is something to learn.

    Raises:
        OptionError: The size is no size.
    """
    if image_size < 32:
        raise OptionError(f"image_size={image_size}; ResNet-50 halves it five times, so it is at least 32 pixels.")
    shape = shape_of(image_size)

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        found = shape.optimizer(model)
        for group in found.param_groups:
            group["lr"] = _LEARNING_RATE
        return found

    return Task(
        name="resnet50",
        model=shape.model,
        train_data=lambda: MadeImages(image_size) if images is None else Images(images, image_size),
        loss_fn=shape.loss_fn,
        optimizer=optimizer,
        batch_size=64,
    )


class MadeImages(Dataset[tuple[torch.Tensor, int]]):
    """Images ``(3, size, size)`` of ten classes, each made when it is asked for, from its number."""

    def __init__(self, size: int, num_samples: int = _NUM_MADE):
        self.size = size
        self.num_samples = num_samples
        coarse = torch.randn(_NUM_MADE_CLASSES, 3, _PATTERN, _PATTERN, generator=torch.Generator().manual_seed(0))
        self._patterns = F.interpolate(coarse, (size, size), mode="bilinear", align_corners=False)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % _NUM_MADE_CLASSES
        noise = torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(index))
        return self._patterns[label] + _NOISE * noise, label


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of a folder with a folder for each class, a random square of each, half of them mirrored.

    Raises:
        TaskError: There is no such folder, or it is not made so.
        MissingExtraError: Pillow, which reads images, is not installed.
    """

    def __init__(self, folder: str | Path, size: int):
        self.size = size
        self._pillow = _pillow()
        self.classes, self.files = _found(Path(folder))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with self._pillow.open(path) as image:
            pixels = _pixels(image.convert("RGB"), round(self.size * _LARGER))
        down, right = (int(torch.randint(length - self.size + 1, ())) for length in pixels.shape[1:])
        square = pixels[:, down : down + self.size, right : right + self.size]
        return square.flip(2) if torch.rand(()) < 0.5 else square.clone(), label


def _pixels(image: Any, short_side: int) -> torch.Tensor:
    """The image as ``(3, H, W)`` with this shorter side, of mean 0 and deviation 1 over many images."""
    ratio = short_side / min(image.size)
    width, height = (max(short_side, round(side * ratio)) for side in image.size)
    values = torch.frombuffer(bytearray(image.resize((width, height)).tobytes()), dtype=torch.uint8)
    return ((values.view(height, width, 3) / 255 - _MEAN) / _DEVIATION).permute(2, 0, 1)


@cache
def _found(folder: Path) -> tuple[tuple[str, ...], tuple[tuple[Path, int], ...]]:
    """Names of the classes, and the files with the numbers of their classes."""
    if not folder.is_dir():
        raise TaskError(f"There is no folder {str(folder)!r}. Give one that holds a folder of images for each class.")
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    files = tuple(
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in _SUFFIXES
    )
    if not files or len(classes) > NUM_CLASSES:
        raise TaskError(
            f"{str(folder)!r} has {len(classes)} folders with {len(files)} images in them. It needs a folder of images "
            f"({', '.join(sorted(_SUFFIXES))}) for each class, of which there are at most {NUM_CLASSES}."
        )
    return classes, files


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            'Reading images needs Pillow, which is not installed: pip install "bigbatch[demo]".'
        ) from error
    return Image
