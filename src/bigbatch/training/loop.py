"""A run: one ``Step`` over epochs of logical batches, and evaluations between. It prints nothing: others listen."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from bigbatch.memory.measure import count_peak_bytes
from bigbatch.stepping.step import Step
from bigbatch.training.building import Parts, build
from bigbatch.training.data import eval_loader, first_batch, going_through, lengths_to_deal_by, train_loader
from bigbatch.training.evaluating import evaluate
from bigbatch.training.events import EpochRecord, Listener, RunInfo, RunResult, StepRecord
from bigbatch.training.group import ALONE, Group
from bigbatch.training.progress import Progress
from bigbatch.training.saving import Saver
from bigbatch.training.sharding import reshard
from bigbatch.training.switches import Switches
from bigbatch.training.task import Task
from bigbatch.training.waiting import Waiting, advice
from bigbatch.values import StepResult


class Run:
    """One run of a task.

    Args:
        device: Where the model is trained; ``"cpu"`` or ``"cuda"``.
        memory_budget: Bytes, or a text such as ``"64MiB"``. A plan that fits is made with the first batch.
        micro_batch_size: Samples in one forward-backward, at most; with a budget, the plan has this size. With neither,
            a batch is run at once.
        listeners: Who hears of it; more can be added to ``run.listeners``.
        group: The ranks that run it together, each with its share of every batch.
        count_every_step: Count the peak of all full steps and not of one. On CPU this takes time.
        switches: What makes it faster.

    Attributes:
        task: What is run.
        parts: What was built from it; ``parts.model`` is the trained model.
        step: The ``Step``.
        info: What it is about to do.
        progress: How far it has come.
        listeners: As given, and added.
        peak_bytes: Counted peak of a real steady step, as soon as there was one.
        peak_step: That step.
    """

    def __init__(
        self,
        task: Task,
        *,
        device: str | torch.device = "cpu",
        memory_budget: int | str | None = None,
        micro_batch_size: int | None = None,
        listeners: Sequence[Listener] = (),
        count_every_step: bool = False,
        group: Group = ALONE,
        switches: Switches | None = None,
    ):
        self.task = task
        self.device = torch.device(device)
        self.group = group
        switches = switches or Switches()
        self.parts = build(task, self.device, group=group, switches=switches)
        self.peak_bytes: int | None = None
        self.peak_step: int | None = None
        self._count_every_step = count_every_step
        self.listeners = list(listeners)
        self.step = self.parts.step(memory_budget=memory_budget, micro_batch_size=micro_batch_size)
        self.step.on_micro_batch = lambda number, count: self._tell("micro_batch", number, count)
        self.info = _info_of(task, self.parts, self.step, self.device, group, switches)
        self.progress = Progress()
        self._clock = _Clock()
        self._waiting = Waiting()

    def train(self, saver: Saver | None = None) -> RunResult:
        """Run all epochs, or those that are left.

        Args:
            saver: Saves the run between steps, and when it is told to stop.

        Raises:
            BigBatchError: A step, the evaluation or the search for a micro-batch size failed.
            CheckpointError: The run cannot be saved.
            RunStopped: A signal told it to stop; it is saved.
        """
        try:
            with saver.at_work(self) if saver is not None else nullcontext(), closing(self.steps()) as records:
                for record in records:
                    self.progress.add(record)
                    if record.step % self._steps_per_epoch == 0:
                        self.progress.epochs.append(self._end_epoch(record))
                    if saver is not None:
                        saver.after_step(self)
            result = self._result()
            self._tell("ended", result)
            return result
        finally:
            for listener in self.listeners:
                listener.close()

    def steps(self, limit: int | None = None) -> Generator[StepRecord, None, None]:
        """Make the optimizer steps that are left, or the first ``limit`` of them, one for each record."""
        self._tell("began", self.info)
        self._clock.start(self.progress.seconds, self.progress.num_samples)
        first = self.progress.num_steps
        loader = train_loader(self.task, self.parts.train_data, first_step=first, **self._dealt)
        with going_through(loader) as batches:
            for index, batch in enumerate(self._waiting.timed(islice(batches, limit)), first):
                if index == first and self.step.budget_bytes is not None and self.step.plan is None:
                    # A run that goes on may begin with the rest of an epoch, which says nothing about a full batch.
                    self._fit(batch if index == 0 else self.first_batch())
                record = self._make_step(index, batch)
                self._tell("stepped", record)
                yield record

    def first_batch(self) -> Any:
        """The first batch, or the share of this rank in it."""
        return first_batch(self.task, self.parts.train_data, **self._dealt)

    def bring_up_to_date(self) -> None:
        """Before the run is saved: note the time, and let everyone write what waits."""
        self.progress.seconds = self._clock.seconds
        self._tell("saving")

    def evaluate(self) -> dict[str, float]:
        """Results of the evaluation; empty when the task has none."""
        if self.parts.eval_data is None:
            return {}
        self._tell("evaluating")
        batch_size = self.task.eval_batch_size or self.step.micro_batch_size or self.task.batch_size
        # Ranks that have a part of the weights each need one another in every forward, so each runs all batches.
        of_rank, group = ({}, ALONE) if self.group.is_sharded else (self._of_this_rank, self.group)
        batches = eval_loader(self.task, self.parts.eval_data, batch_size, **of_rank)
        try:
            return evaluate(self.task, self.parts.evaluated, batches, self.device, group)
        finally:
            reshard(self.parts.model)

    @property
    def _of_this_rank(self) -> dict[str, int]:
        return {"rank": self.group.rank, "world_size": self.group.world_size}

    @cached_property
    def _dealt(self) -> dict[str, Any]:
        lengths = lengths_to_deal_by(self.task, self.parts.train_data, self.group.sharing)
        return {**self._of_this_rank, "lengths": lengths}

    @property
    def _steps_per_epoch(self) -> int:
        return self.parts.total_steps // self.task.epochs

    def _tell(self, event: str, *values: Any) -> None:
        for listener in self.listeners:
            getattr(listener, event)(*values)

    def _fit(self, batch: Any) -> None:
        self._tell("fitting", self.step.budget_bytes)
        plan = self.step.fit(batch)
        self._clock.fitted()
        self._tell("fitted", plan)

    def _make_step(self, index: int, batch: Any) -> StepRecord:
        num_samples = self._num_samples(index)
        learning_rate = float(self.step.optimizers[0].param_groups[0]["lr"])
        start = time.perf_counter()
        # From the second full batch on all is there that stays: the state of the optimizer, for one.
        is_steady = index > 0 and num_samples == self.info.batch_size
        is_counted = is_steady and (self.peak_bytes is None or self._count_every_step)
        result = self._counted(index, batch) if is_counted else self.step(batch)
        self._clock.stepped(num_samples)
        return StepRecord(
            step=index + 1,
            epoch=index // self._steps_per_epoch + 1,
            total_steps=self.parts.total_steps,
            num_samples=num_samples,
            learning_rate=learning_rate,
            result=result,
            seconds=time.perf_counter() - start,
            seconds_left=self._clock.seconds / (index + 1) * (self.parts.total_steps - index - 1),
            samples_per_second=self._clock.samples_per_second,
            peak_bytes=self.peak_bytes,
            data_seconds=self._waiting.last_seconds,
            data_share=self._waiting.share,
        )

    def _counted(self, index: int, batch: Any) -> StepResult:
        """A step whose live bytes are counted, which takes it a little longer."""
        alive = [self.parts.model, self.parts.optimizers, self.parts.options.ema, batch]
        with count_peak_bytes(self.device, track=alive) as peak:
            result = self.step(batch)
        if peak.peak_bytes > (self.peak_bytes or 0):
            self.peak_bytes, self.peak_step = peak.peak_bytes, index + 1
        return result

    def _num_samples(self, index: int) -> int:
        num_samples, batch_size = len(self.parts.train_data), self.task.batch_size
        return min(batch_size, num_samples - index % self._steps_per_epoch * batch_size)

    def _end_epoch(self, last: StepRecord) -> EpochRecord:
        seconds = self._clock.lap()
        is_due = last.epoch % self.task.evaluate_every == 0 or last.epoch == self.task.epochs
        metrics = self.evaluate() if is_due else {}
        record = EpochRecord(last.epoch, last.step, self.progress.end_epoch(), metrics, seconds, self._clock.lap())
        self._tell("epoch_ended", record)
        return record

    def _result(self) -> RunResult:
        progress = self.progress
        peaks = self.group.gathered((self.peak_bytes, self.peak_step))
        peak_bytes, peak_step = max(peaks, key=lambda peak: peak[0] or 0)
        return RunResult(
            task=self.task.name,
            device=self.info.device,
            num_ranks=self.group.world_size,
            batch_size=self.info.batch_size,
            micro_batch_sizes=progress.micro_batch_sizes,
            num_steps=progress.num_steps,
            num_skipped=progress.num_skipped,
            exactness=progress.exactness,
            loss=progress.epochs[-1].loss,
            metrics=progress.epochs[-1].metrics,
            budget_bytes=self.step.budget_bytes,
            peak_bytes=peak_bytes,
            peak_step=peak_step,
            seconds=self._clock.seconds,
            fit_seconds=self._clock.fit_seconds,
            samples_per_second=self._clock.samples_per_second,
            epochs=tuple(progress.epochs),
            noise_scale=self.step.noise_scale.value,
            data_share=self._waiting.share,
            data_advice=advice(self._waiting.share, self.task.num_workers),
        )


def _info_of(task: Task, parts: Parts, step: Step, device: torch.device, group: Group, switches: Switches) -> RunInfo:
    return RunInfo(
        task=task.name,
        device=str(device) if group.world_size == 1 else device.type,
        num_ranks=group.world_size,
        num_parameters=sum(p.numel() for p in parts.model.parameters() if p.requires_grad),
        num_samples=len(parts.train_data),
        batch_size=min(task.batch_size, len(parts.train_data)),
        num_epochs=task.epochs,
        total_steps=parts.total_steps,
        seed=task.seed,
        budget_bytes=step.budget_bytes,
        num_workers=task.num_workers,
        switches=switches.names,
    )


@dataclass
class _Clock:
    """Times of a run: since its first batch, and since the last lap. Choosing the micro-batch size does not count."""

    fit_seconds: float = 0.0
    _before: float = 0.0
    _began: float = 0.0
    _lap: float = 0.0
    _num_samples: int = 0

    def start(self, seconds_before: float, num_samples: int) -> None:
        self._before, self._num_samples = seconds_before, num_samples
        self._began = self._lap = time.perf_counter()

    def fitted(self) -> None:
        self.fit_seconds = self.seconds - self._before
        self.start(self._before, self._num_samples)

    def stepped(self, num_samples: int) -> None:
        self._num_samples += num_samples

    def lap(self) -> float:
        before, self._lap = self._lap, time.perf_counter()
        return self._lap - before

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    @property
    def samples_per_second(self) -> float:
        return self._num_samples / self.seconds
