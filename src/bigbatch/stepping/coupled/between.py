"""What lies between the two passes of a loss of outputs, and where the second one begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bigbatch.batch.logical import Piece
from bigbatch.errors import LossError
from bigbatch.stepping.coupled.masks import Masks
from bigbatch.stepping.coupled.outputs import num_rows
from bigbatch.stepping.generators import Generators


@dataclass(frozen=True)
class Numbered:
    """A micro-batch, and its place among those of this rank.

    Attributes:
        number: Its place, from 0.
        num_samples: In it, where that is known.
        idle: It counts nothing, and runs because other ranks have one more.
        is_last: None comes after it on this rank.
    """

    micro_batch: Any
    number: int
    num_samples: int
    idle: bool
    is_last: bool


@dataclass
class Between:
    """What the second pass needs of the first.

    Attributes:
        paths: Of the leaves of the outputs.
        sizes: By micro-batch, the rows of each leaf; None for one that is added up or no tensor.
        terms: The loss of the whole batch; zeros where another rank counts it.
        gradients: At each leaf, the rows of this rank; None where there is none.
        inside: Parameters in the loss, with their gradients; zeros where another rank counts them.
        unit: What the gradients were begun with: the loss scale.
        before: Random numbers before each micro-batch.
        masks: By micro-batch, those of dropout that it need not draw again.
        after: Random numbers after the loss.
    """

    paths: list[str]
    sizes: list[list[int | None]]
    terms: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]
    inside: list[tuple[torch.Tensor, torch.Tensor]]
    unit: torch.Tensor | None
    before: list[Generators]
    masks: dict[int, Masks]
    after: Generators

    def rows(self, numbered: Numbered) -> Iterator[torch.Tensor | None]:
        """The gradients at the leaves of a micro-batch; of one that counts nothing, those of all."""
        number = numbered.number
        for i, gradient in enumerate(self.gradients):
            size = None if numbered.idle else self.sizes[number][i]
            if gradient is None or size is None:
                yield gradient
            else:
                start = sum(sizes[i] or 0 for sizes in self.sizes[:number])
                yield gradient[start : start + size]


class _WithGradients(torch.autograd.Function):
    """A number whose gradients at some tensors are known: a chain rule that begins there."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, unit: Any, gradients: Sequence[Any], *tensors: torch.Tensor) -> Any:
        ctx.unit, ctx.gradients = unit, gradients
        return number.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, start: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # With a loss scale the gradients have it already, or 16 bits would have lost them; and so has the start.
        factor = start if ctx.unit is None else start / ctx.unit
        wanted = zip(ctx.gradients, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(g * factor.to(g) if needed else None for g, needed in wanted)


def with_gradients(number: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], unit: Any) -> Any:
    """The number, with a graph in which the tensors of the pairs have the gradients of the pairs.

    Args:
        unit: What these gradients were begun with, the loss scale; None: 1.
    """
    return _WithGradients.apply(number, unit, [g for _, g in pairs], *(tensor for tensor, _ in pairs))


def with_numbers(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The same micro-batches, each of which knows its place."""
    for k, piece in enumerate(pieces):
        inner = Numbered(piece.micro_batch, k, piece.num_samples, piece.idle, is_last=k == len(pieces) - 1)
        yield piece._replace(micro_batch=inner)


def check_same_again(found: Sequence[tuple[str, Any]], between: Between, number: int) -> None:
    """Raise ``LossError`` when the second forward of a micro-batch gives other outputs than the first one."""
    now = [(path, num_rows(leaf)) for path, leaf in found]
    before = list(zip(between.paths, between.sizes[number], strict=True))
    if now != before:
        raise LossError(
            f"forward returned outputs {now} (path, rows), but {before} for the same micro-batch the first time. It "
            f"depends on more than the model and the micro-batch: a counter, a cache, a generator of its own."
        )
