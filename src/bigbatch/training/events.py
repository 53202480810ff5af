"""What a run tells those who listen: values for a panel, a log, or a test."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bigbatch.values import Exactness, Plan, StepResult, json_ready

_WEAKEST_LAST: tuple[Exactness, ...] = ("exact", "same in distribution", "approximate")


def weaker(a: Exactness, b: Exactness) -> Exactness:
    """The weaker of the two. A rest that fits into one micro-batch is exact, but not the run that it ends."""
    return a if _WEAKEST_LAST.index(a) > _WEAKEST_LAST.index(b) else b


def is_accuracy(name: str) -> bool:
    """Whether the result of this name is a share, to be shown in per cent and held to half a point."""
    return name.endswith("accuracy")


@dataclass(frozen=True)
class RunInfo:
    """What a run is about to do.

    Attributes:
        task: Name of the task.
        device: For example ``"cpu"``.
        num_parameters: Numbers that are trained.
        num_samples: Of the training data.
        batch_size: Samples in a logical batch; never more than there are.
        num_epochs: Passes over the training data.
        total_steps: Optimizer steps.
        seed: Of the task.
        budget_bytes: The memory budget, or None.
        first_step: Steps that were made before, by a run that this one goes on from.
        num_ranks: Processes that share each batch.
        num_workers: Processes that load the data.
        switches: What was switched on to make it faster, as on the command line.
    """

    task: str
    device: str
    num_parameters: int
    num_samples: int
    batch_size: int
    num_epochs: int
    total_steps: int
    seed: int
    budget_bytes: int | None = None
    first_step: int = 0
    num_ranks: int = 1
    num_workers: int = 0
    switches: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of a run.

    Attributes:
        step: From 1 to ``total_steps``.
        epoch: From 1.
        total_steps: Of the run.
        num_samples: Samples in the batch.
        learning_rate: That this step was made with, of the first group of the first optimizer.
        result: What ``Step`` returned; reading its tensors may wait for the device.
        seconds: From the batch being ready to the step being queued or done.
        seconds_left: Expected time to the end of the run.
        samples_per_second: Over the run so far, evaluation included.
        peak_bytes: Counted peak of a step of this run, when one was counted; on CUDA, of the allocator.
        data_seconds: What the run waited for this batch; not in ``seconds``.
        data_share: Of the time since the first batch of this process: what went into waiting for batches.
    """

    step: int
    epoch: int
    total_steps: int
    num_samples: int
    learning_rate: float
    result: StepResult
    seconds: float
    seconds_left: float
    samples_per_second: float
    peak_bytes: int | None = None
    data_seconds: float = 0.0
    data_share: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for a log, flat. This reads the tensors."""
        result = self.result
        plain = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if spec.name != "result"}
        sizes = result.micro_batch_sizes
        return plain | {
            "loss": float(result.loss),
            "terms": {name: float(term) for name, term in result.terms.items()},
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            "noise_scale": None if result.noise_scale is None else json_ready(result.noise_scale),
            "weight": float(result.weight),
            "skipped": bool(result.skipped),
            "micro_batch_size": max(sizes, default=None),
            "accumulation_steps": len(sizes),
            "retries": result.retries,
            "padding": result.padding,
        }


@dataclass(frozen=True)
class EpochRecord:
    """One pass over the training data.

    Attributes:
        epoch: From 1.
        step: Optimizer steps of the run so far.
        loss: Mean loss of the steps of this epoch, each by its weight; steps that were skipped count for nothing.
            None when all were.
        metrics: Results of the evaluation by name; empty when there was none after this epoch.
        seconds: Of the training steps and of loading their data.
        eval_seconds: Of the evaluation.
    """

    epoch: int
    step: int
    loss: float | None
    metrics: dict[str, float]
    seconds: float
    eval_seconds: float


@dataclass(frozen=True)
class RunResult:
    """How a run went.

    Attributes:
        task: Name of the task.
        device: That it ran on.
        batch_size: Samples in a full logical batch.
        micro_batch_sizes: Samples in each micro-batch of the first step, in order; those of rank 0.
        num_steps: Optimizer steps, with those that were skipped.
        num_skipped: Steps that moved nothing.
        exactness: How far "equals the big batch" holds: the weakest of all steps.
        loss: Mean loss of the last epoch, as in ``EpochRecord``.
        metrics: Results of the last evaluation.
        budget_bytes: The memory budget, or None.
        peak_bytes: Counted peak of a real steady step of this run, of the rank that needed most; on CUDA, what the
            allocator counted.
        peak_step: The step that was counted; the first one only when there was no other.
        seconds: From the first batch to the end of the last evaluation.
        fit_seconds: What choosing the micro-batch size took before that.
        samples_per_second: Training samples over ``seconds``.
        epochs: All epochs.
        noise_scale: Gradient noise scale after the last step, in samples, as in ``StepResult``; None: not asked for.
        num_ranks: Processes that shared each batch.
        data_share: See ``StepRecord``.
        data_advice: What to do when the run waited long for its data; empty when it did not.
    """

    task: str
    device: str
    batch_size: int
    micro_batch_sizes: tuple[int, ...]
    num_steps: int
    num_skipped: int
    exactness: Exactness
    loss: float | None
    metrics: dict[str, float]
    budget_bytes: int | None
    peak_bytes: int | None
    peak_step: int | None
    seconds: float
    fit_seconds: float
    samples_per_second: float
    epochs: tuple[EpochRecord, ...] = ()
    noise_scale: float | None = None
    num_ranks: int = 1
    data_share: float = 0.0
    data_advice: str = ""


class Listener:
    """Hears of a run. Every method may be left out; they are called in the order in which they stand here."""

    def began(self, info: RunInfo) -> None:
        """The parts are built; no step was made, or none since the checkpoint that the run goes on from."""

    def fitting(self, budget_bytes: int) -> None:
        """The micro-batch size is being looked for."""

    def fitted(self, plan: Plan) -> None:
        """It was found."""

    def micro_batch(self, number: int, count: int | None) -> None:
        """Micro-batch ``number`` of ``count``, from 1, begins; ``count`` is None when only its end will tell."""

    def stepped(self, record: StepRecord) -> None:
        """A step is done."""

    def evaluating(self) -> None:
        """The evaluation begins."""

    def epoch_ended(self, record: EpochRecord) -> None:
        """An epoch is done, and evaluated."""

    def saving(self) -> None:
        """The run is about to be saved; what is to be known of its steps should be on the disk before that."""

    def ended(self, result: RunResult) -> None:
        """The run is done."""

    def close(self) -> None:
        """Called last, also when the run failed."""
