"""How far a run has come: what its results are made of, and what it is saved with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from bigbatch.training.events import EpochRecord, StepRecord, weaker
from bigbatch.values import Exactness


@dataclass
class Progress:
    """What is kept of the steps and epochs so far.

    Attributes:
        num_steps: Steps that were made, with those that were skipped.
        num_skipped: Steps that moved nothing.
        num_samples: Samples in all of them.
        seconds: What they took, with the evaluations; brought up to date when it is saved.
        exactness: The weakest of all steps.
        micro_batch_sizes: Of the first step.
        epochs: Those that are done.
    """

    num_steps: int = 0
    num_skipped: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    exactness: Exactness = "exact"
    micro_batch_sizes: tuple[int, ...] = ()
    epochs: list[EpochRecord] = field(default_factory=list)
    _losses: list[tuple[Any, Any]] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        result = record.result
        if self.num_steps == 0:
            self.micro_batch_sizes = result.micro_batch_sizes
        self.exactness = weaker(self.exactness, result.exactness)
        self.num_steps += 1
        self.num_samples += record.num_samples
        self.num_skipped += bool(result.skipped)
        if not result.skipped:
            self._losses.append((result.loss, result.weight))

    def end_epoch(self) -> float | None:
        """The mean loss of the epoch. This reads the tensors, once an epoch."""
        pairs, self._losses = self._read(), []
        total = sum(weight for _, weight in pairs)
        return sum(loss * weight for loss, weight in pairs) / total if total else None

    def state_dict(self) -> dict[str, Any]:
        """All of it in plain values. This reads the losses of the epoch that is running."""
        self._losses = self._read()
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Progress:
        """What ``state_dict`` gave."""
        epochs = [EpochRecord(**epoch) for epoch in state["epochs"]]
        return cls(**{**state, "epochs": epochs, "micro_batch_sizes": tuple(state["micro_batch_sizes"])})

    def _read(self) -> list[tuple[Any, Any]]:
        return [(float(loss), float(weight)) for loss, weight in self._losses]
