"""How near the gradient of micro-batches is to that of all their samples at once, where BatchNorm makes it another one.

Measured on a few micro-batches, in float32, on a private copy: enough to tell, and it needs little time and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch.batch.logical import num_samples_of
from bigbatch.batch.resizing import micro_batch_of
from bigbatch.stepping.cosine import MOST_MICRO_BATCHES, cosine, why_not_measured
from bigbatch.stepping.exactness import EXACT_BATCH_NORM, EXACT_WITH_WHOLE_BATCH_LOSS
from bigbatch.stepping.normalization import batchnorm
from bigbatch.values import StepOptions
from bigbatch.verification.runs import Runs, untouched

_NEAR = 0.99


@dataclass(frozen=True)
class Nearness:
    """What was measured.

    Attributes:
        policy: The option ``batch_norm``.
        cosine: Between the gradient of micro-batches and that of the same samples at once, over all parameters; None
            where it could not be measured.
        num_samples: That were taken.
        micro_batch_size: In which they were cut.
        why: It could not be measured.
        remedy: What is exact.
    """

    policy: str
    cosine: float | None
    num_samples: int
    micro_batch_size: int
    why: str = ""
    remedy: str = ""

    @property
    def is_near(self) -> bool:
        """Whether the gradient points where it should."""
        return self.cosine is not None and self.cosine >= _NEAR

    def __str__(self) -> str:
        """In words."""
        if self.cosine is None:
            return f'how far batch_norm="{self.policy}" turns the gradient could not be measured ({self.why})'
        return (
            f'under batch_norm="{self.policy}" the gradient of {self.num_samples} samples in micro-batches of '
            f"{self.micro_batch_size} has a cosine of {self.cosine:.3f} to that of these samples at once"
        )


def nearness(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, micro_batch_size: int | None, options: StepOptions
) -> Nearness | None:
    """Compare the gradient of the first few micro-batches with that of their samples at once.

    Args:
        model: As it is trained; it stays as it is.
        loss_fn: Of the step.
        batch: What a step gets.
        micro_batch_size: Samples in a micro-batch, at most.
        options: Of the step.

    Returns:
        None where no layer sees the statistics of a micro-batch, or the batch is run at once.
    """
    layers, policy = batchnorm.layers_of(model), options.batch_norm
    sees = policy != "exact" and any(batchnorm.uses_batch_statistics(layer, policy) for layer in layers)
    if not sees or micro_batch_size is None:
        return None
    remedy = EXACT_BATCH_NORM
    try:
        num_samples = num_samples_of(batch, options)
        if num_samples <= micro_batch_size:
            return None
        taken = min(num_samples, MOST_MICRO_BATCHES * micro_batch_size)
        few = batch[:taken] if options.collate is not None else micro_batch_of(batch, taken, options)
        with untouched(model):
            runs = Runs(model, loss_fn, few, options, torch.float32)
            remedy = EXACT_WITH_WHOLE_BATCH_LOSS if runs.is_of_whole_batch else EXACT_BATCH_NORM
            found = cosine(runs.cut(micro_batch_size).gradients, runs.whole().gradients)
        return Nearness(policy, found, taken, micro_batch_size, remedy=remedy)
    except Exception as error:
        return Nearness(policy, None, 0, micro_batch_size, why=why_not_measured(error), remedy=remedy)
