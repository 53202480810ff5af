"""What a bench found: for each way to make optimizer steps its speed, its peak, its gradient and its losses."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bigbatch.training.ways import Way
from bigbatch.values import Exactness, json_ready

Outcome = Literal["ran", "out of memory", "no plan", "not finite", "no time"]


@dataclass(frozen=True)
class Turn:
    """The steps that one way made of the samples of one round; all ways get the same samples.

    Attributes:
        round: From 1.
        num_samples: Samples of the round.
        weight: What the mean loss is over: samples, or tokens.
        num_steps: Optimizer steps that were made of them.
        seconds: Of these steps, without loading the data.
        optimizer_seconds: Of these, inside the optimizers.
        loss: Mean over the round, each batch before its step.
        is_full: The round had a full batch; the last one of an epoch may not.
    """

    round: int
    num_samples: int
    weight: float
    num_steps: int
    seconds: float
    optimizer_seconds: float
    loss: float
    is_full: bool = True


@dataclass(frozen=True)
class BenchRow:
    """What was found of one way.

    Attributes:
        way: Which.
        outcome: ``"ran"``, or why not, or why no further.
        why: The same in words.
        peak_bytes: Counted peak of a steady step, tried and undone (``Step.measure``).
        differences: How far the gradient of the first batch is from that of the big batch, by name of the parameter,
            worst first; see ``relative_differences``. For a smaller batch it is that of its own first batch.
        exactness: How far "equals the big batch" holds.
        turns: In order; those before it ran out, if it did.
    """

    way: Way
    outcome: Outcome = "ran"
    why: str = ""
    peak_bytes: int | None = None
    differences: Mapping[str, float] = field(default_factory=dict)
    exactness: Exactness | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def timed_turns(self) -> tuple[Turn, ...]:
        """Turns of full batches, without the first where there are others: it warms up."""
        full = tuple(turn for turn in self.turns if turn.is_full) or self.turns
        return full[1:] or full

    @property
    def step_seconds(self) -> float | None:
        """Median time of an optimizer step."""
        return _median([turn.seconds / turn.num_steps for turn in self.timed_turns])

    @property
    def samples_per_second(self) -> float | None:
        """Median over the turns."""
        return _median([turn.num_samples / turn.seconds for turn in self.timed_turns])

    @property
    def weight_per_second(self) -> float | None:
        """Median over the turns; where the loss is a mean over tokens, real tokens per second."""
        return _median([turn.weight / turn.seconds for turn in self.timed_turns])

    @property
    def optimizer_share(self) -> float | None:
        """Part of the time of the steps that the optimizers took."""
        return _median([turn.optimizer_seconds / turn.seconds for turn in self.timed_turns])

    @property
    def gradient_difference(self) -> float | None:
        """That of the worst parameter."""
        return next(iter(self.differences.values()), None)

    @property
    def seconds(self) -> float:
        """Of all turns."""
        return sum(turn.seconds for turn in self.turns)

    def seconds_to(self, loss: float) -> float | None:
        """Seconds of steps until the mean loss of a round was this or less; None: it never was."""
        seconds = 0.0
        for turn in self.turns:
            seconds += turn.seconds
            if turn.loss <= loss:
                return seconds
        return None


@dataclass(frozen=True)
class BenchResult:
    """A bench.

    Attributes:
        task: Name of the task.
        device: That it ran on.
        batch_size: Samples of a full big batch.
        unit: What a mean loss is over: ``"samples"``, ``"tokens"``, or ``"weight"`` for what the task counts itself.
        rows: The big batch at once comes first; the others are held against it.
        num_rounds: That were made.
        asked_rounds: That were asked for; less were made where time or data were over.
        seconds: Of all of it, planning included.
        budget_bytes: What was given.
        planned_bytes: What was planned for: the budget or, without one, see ``find_ways``.
        reference: How the gradient was made that the others are held against; None: there is none.
        target_loss: That the times to a loss are for.
        notes: What a reader has to know.
        versions: Of what it ran on.
    """

    task: str
    device: str
    batch_size: int
    unit: str
    rows: tuple[BenchRow, ...]
    num_rounds: int
    asked_rounds: int
    seconds: float
    budget_bytes: int | None = None
    planned_bytes: int | None = None
    reference: str | None = None
    target_loss: float | None = None
    notes: tuple[str, ...] = ()
    versions: Mapping[str, Any] = field(default_factory=dict)

    def is_over_budget(self, row: BenchRow) -> bool:
        """Whether a row needs more than the budget, where one was given."""
        return self.budget_bytes is not None and row.peak_bytes is not None and row.peak_bytes > self.budget_bytes

    def speed(self, row: BenchRow) -> float | None:
        """Samples per second over those of the first row: the median over the rounds that both ran in turns."""
        first = {turn.round: turn.seconds for turn in self.rows[0].timed_turns}
        pairs = [(first[turn.round], turn.seconds) for turn in row.timed_turns if turn.round in first]
        return _median([one / other for one, other in pairs])

    def seconds_to_target(self, row: BenchRow) -> float | None:
        """Seconds of steps to the target loss; None: it was not reached."""
        return None if self.target_loss is None else row.seconds_to(self.target_loss)

    def summaries(self) -> list[dict[str, Any]]:
        """The numbers of a table, row by row, in bytes and seconds."""
        return [
            {
                "samples_per_second": row.samples_per_second,
                f"{self.unit}_per_second": row.weight_per_second,
                "speed": self.speed(row),
                "step_seconds": row.step_seconds,
                "optimizer_share": row.optimizer_share,
                "peak_bytes": row.peak_bytes,
                "is_over_budget": self.is_over_budget(row),
                "gradient_difference": row.gradient_difference,
                "last_loss": row.turns[-1].loss if row.turns else None,
                "seconds_to_target": self.seconds_to_target(row),
            }
            for row in self.rows
        ]

    def to_json(self) -> str:
        """All of it as JSON text, with ``summaries``, one for each row."""
        value = {**dataclasses.asdict(self), "summaries": tuple(self.summaries())}
        return json.dumps(json_ready(value), indent=1)


def loss_all_reached(rows: Sequence[BenchRow]) -> float | None:
    """The lowest loss that every row with turns has been at: the highest of their lowest."""
    return max((min(turn.loss for turn in row.turns) for row in rows if row.turns), default=None)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
