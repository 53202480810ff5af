"""ViT, the vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigbatch.tasks.shapes.shape import Shape, adamw, class_loss, images
from bigbatch.tasks.shapes.transformer import Block

NUM_CLASSES = 1000


class ViT(nn.Module):
    """Images ``(N, 3, size, size)`` to logits ``(N, num_classes)``; the defaults are those of ViT-L/16."""

    def __init__(
        self,
        num_layers: int = 24,
        width: int = 1024,
        num_heads: int = 16,
        patch: int = 16,
        size: int = 224,
        num_classes: int = NUM_CLASSES,
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads, eps=1e-6) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes, from the token that was put first."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(images), -1, -1), patches], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_l(size: int = 224) -> Shape:
    """ViT-L/16 on images of ``size`` pixels, a multiple of 16."""
    return Shape(
        name="vit-l",
        description="ViT-L/16, 304 M parameters, float32, ImageNet classes, no dropout, AdamW",
        size=size,
        model=lambda: ViT(size=size),
        batch=lambda num_samples: images(num_samples, size, num_classes=NUM_CLASSES),
        loss_fn=class_loss,
        optimizer=adamw,
    )
