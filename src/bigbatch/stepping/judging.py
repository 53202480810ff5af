"""Whether a step may go on: the loss and all gradients are finite, or it is said what is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from bigbatch.errors import NonFiniteError
from bigbatch.stepping.after_backward import Accumulation
from bigbatch.stepping.checks import parameters_of
from bigbatch.stepping.norms import overflow_free_norm

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step


def judged(step: Step, norm: torch.Tensor, done: Accumulation) -> tuple[torch.Tensor, bool]:
    """The norm, and whether the step may go on. The one read of the device in a step is here.

    Raises:
        NonFiniteError: A loss or gradient is NaN or infinite, and the options do not skip such a step.
    """
    scaled = step.accumulator.precision.scaler is not None
    if math.isfinite(float(norm if scaled else norm + done.loss.to(norm.device))):
        return norm, True
    done.shares.check_denominators()
    of_optimizers = {id(p) for p in parameters_of(step.optimizers)}
    names = done.non_finite({name: p for name, p in step.named_parameters().items() if id(p) in of_optimizers})
    names = step.accumulator.ranks.together(names)
    if not names:  # every entry is finite, but the sum of their squares is not
        return overflow_free_norm(step.check_reached(), norm.device), True
    if not scaled and step.options.on_non_finite == "raise":
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise NonFiniteError(
            f"Not finite: {', '.join(names[:4])}{more}. Nothing was moved. Look for a bad sample or a "
            'learning rate that is too high; on_non_finite="skip" drops such steps.',
            tuple(names),
        )
    return norm, False
