"""U-Net: down to few pixels and many channels, and up again with what was there on the way down."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from bigbatch.tasks.shapes.shape import Shape, adamw, images, pixel_loss

NUM_CLASSES = 2


class UNet(nn.Module):
    """Images ``(N, 3, size, size)`` to logits ``(N, num_classes, size, size)``.

    Args:
        levels: How often the pixels are halved; ``size`` is a multiple of ``2 ** levels``.
        width: Channels at full size; twice as many at each level down.
    """

    def __init__(self, levels: int = 4, width: int = 64, num_classes: int = NUM_CLASSES):
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.stem = _two_convolutions(3, width)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), *_two_convolutions(above, below))
            for above, below in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(_Up(below, above) for below, above in itertools.pairwise(reversed(widths)))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes at each pixel."""
        x = self.stem(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


class _Up(nn.Module):
    """``(N, num_in, H, W)`` and ``(N, num_out, 2 H, 2 W)`` to the shape of the second."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.larger = nn.ConvTranspose2d(num_in, num_out, 2, 2)
        self.inner = _two_convolutions(2 * num_out, num_out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.inner(torch.cat([skip, self.larger(x)], 1))


def _two_convolutions(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU(inplace=True),
    )


def unet(size: int = 256) -> Shape:
    """U-Net of four levels on images of ``size`` pixels, a multiple of 16."""
    return Shape(
        name="unet",
        description="U-Net, 31.0 M parameters, float32, four levels, two classes a pixel, AdamW",
        size=size,
        model=UNet,
        batch=lambda num_samples: images(num_samples, size, size, size, num_classes=NUM_CLASSES),
        loss_fn=pixel_loss,
        optimizer=adamw,
    )
