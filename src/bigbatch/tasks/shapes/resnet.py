"""ResNet, with bottleneck blocks and the stride in their 3 x 3 convolution (version 1.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bigbatch.tasks.shapes.shape import Shape, class_loss, images

NUM_CLASSES = 1000


class ResNet(nn.Module):
    """Images ``(N, 3, H, W)`` to logits ``(N, num_classes)``.

    All blocks are in one ``nn.Sequential``, so that neighbours of different stages are neighbours too.

    Args:
        depths: Blocks in each stage; each stage has twice the channels of the one before, and half the pixels.
        width: Channels of the first stage inside its blocks; four times as many go out.
    """

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, num_classes: int = NUM_CLASSES):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks, num_in = [], width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                blocks.append(Bottleneck(num_in, width << stage, stride=2 if stage and not index else 1))
                num_in = 4 * width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(num_in, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Bottleneck(nn.Module):
    """Three convolutions, 1 x 1, 3 x 3 and 1 x 1, around a skip connection."""

    def __init__(self, num_in: int, width: int, *, stride: int):
        super().__init__()
        num_out = 4 * width
        self.inner = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, num_out, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        same = num_in == num_out and stride == 1
        projection = nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
        self.skip = nn.Identity() if same else nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, num_in, H, W)`` to ``(N, 4 * width, H / stride, W / stride)``."""
        y = self.inner(x)
        y += self.skip(x)
        return y.relu_()


def resnet50(size: int = 224) -> Shape:
    """ResNet-50 on images of ``size`` pixels."""
    return Shape(
        name="resnet50",
        description="ResNet-50, 25.6 M parameters, ImageNet classes, SGD with momentum",
        size=size,
        model=ResNet,
        batch=lambda num_samples: images(num_samples, size, num_classes=NUM_CLASSES),
        loss_fn=class_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
    )
