"""What the loop over micro-batches leaves: gradients, and the loss put together."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from bigbatch.stepping.gradients import Gradients, dense
from bigbatch.stepping.shares import Shares
from bigbatch.values import Exactness, StepResult


class Accumulation:
    """One step after its last backward: gradients that nothing has used yet.

    Attributes:
        gradients: In ``.grad``, still scaled and uncorrected.
        shares: The loss, its terms, and the corrections that the gradients need.
        sizes: Samples in each micro-batch.
        exactness, padding: See ``StepResult``.
        contributions: What listened to the backwards, if anything did.
    """

    def __init__(self, gradients: Gradients, shares: Shares, *, padding: tuple[float, float] | None = None):
        self.gradients = gradients
        self.shares = shares
        self.padding = padding
        self.sizes: list[int] = []
        self.exactness: Exactness = "exact"
        self.contributions: Any = None

    @cached_property
    def terms(self) -> dict[str, torch.Tensor]:
        """Each term of the whole batch, shape ``()``."""
        return self.shares.term_losses()

    @cached_property
    def loss(self) -> torch.Tensor:
        """Of the whole batch, shape ``()``."""
        first, *others = self.terms.values()
        return sum(others, start=first)

    def result(self, **happened: Any) -> StepResult:
        """What is told about it."""
        return StepResult(
            self.loss,
            terms=dict(self.terms),
            weight=self.shares.weight(),
            micro_batch_sizes=tuple(self.sizes),
            exactness=self.exactness,
            padding=self.padding,
            **happened,
        )

    def non_finite(self, named: dict[str, torch.Tensor]) -> list[str]:
        """What is NaN or infinite, in words: terms by micro-batch, then gradients of the parameters. Reads them all."""
        terms = [
            (f"the term {name!r} of micro-batch {k + 1}", value)
            for name, values in self.shares.micro_batch_losses().items()
            for k, value in enumerate(values)
        ]
        found = [(name, p.grad) for name, p in named.items() if p.grad is not None]
        gradients = [(f"the gradient of {name}", numbers) for (name, g) in found for numbers in dense([g])]
        return [name for name, tensor in [*terms, *gradients] if not bool(torch.isfinite(tensor).all())]
