"""One way to make optimizer steps, at work: tried once, and then in turns with the others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bigbatch.memory.limit import limit_memory
from bigbatch.stepping.gradients import clear_gradients
from bigbatch.training.bench_result import Turn
from bigbatch.training.building import build
from bigbatch.training.comparison import cut_gradients
from bigbatch.training.parking import Parked, num_bytes
from bigbatch.training.task import Task
from bigbatch.training.ways import Way
from bigbatch.values import Exactness
from bigbatch.verification.comparison import relative_differences
from bigbatch.verification.runs import untouched


class Contender:
    """Model, optimizer and ``Step`` of one way. On a card they lie there only while it has its turn.

    Args:
        weights: That it begins with, as all others do.

    Attributes:
        step: Its step, with the options of the task.
    """

    def __init__(self, way: Way, task: Task, device: torch.device, weights: Mapping[str, torch.Tensor]):
        self.task = dataclasses.replace(task, batch_size=way.batch_size)
        self.way = way
        self.device = device
        self.parts = build(self.task, device)
        self.parts.model.load_state_dict(weights)
        self.step = self.parts.step(plan=way.plan)
        self._optimizer_clock = _OptimizerClock(self.parts.optimizers, device)
        self._parked = Parked(self.parts, device)
        self._parked.park()

    def peak_bytes(self, batch: Any, budget_bytes: int | None) -> int:
        """Counted peak of a steady step, tried and undone; on a card the budget is a hard limit meanwhile.

        Raises:
            RuntimeError: Memory ran out, or it is one of CUDA's errors that say so.
        """
        with self._parked, self._limited(budget_bytes):
            return self.step.measure(batch, self.way.plan.micro_batch_size)

    @contextmanager
    def _limited(self, budget_bytes: int | None) -> Iterator[None]:
        # On CPU the whole process would be limited, with all the other ways in it.
        if budget_bytes is None or self.device.type != "cuda":
            yield
            return
        left = budget_bytes - num_bytes(self.parts)  # the limit is on what comes on top
        if left <= 0:
            raise torch.OutOfMemoryError("Parameters and optimizer state alone are more than the budget.")
        with limit_memory(left, device=self.device):
            yield

    def differences(self, batch: Any, reference: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
        """How far its gradient of this batch is from the other, in the precision of the parameters; nothing moves."""
        task = dataclasses.replace(self.task, precision="fp32")
        with self._parked, untouched(self.parts.model):
            try:
                found = cut_gradients(task, self.parts, batch, micro_batch_size=self.way.plan.micro_batch_size)
                return relative_differences(on_host(found), reference)
            finally:
                clear_gradients(self.parts.model.parameters())

    def turn(self, number: int, batches: Sequence[Any], *, is_full: bool) -> tuple[Turn, Exactness]:
        """Make a step of each batch; with the exactness of the last.

        Raises:
            OutOfMemoryError: A step ran out of memory and was made in smaller micro-batches, which is another way.
        """
        with self._parked:
            self._optimizer_clock.reset()
            self._wait()
            start = time.perf_counter()
            results = [self.step(batch) for batch in batches]
            self._wait()
            seconds = time.perf_counter() - start
        if any(result.retries for result in results):
            sizes = sorted({size for result in results for size in result.micro_batch_sizes})
            raise torch.OutOfMemoryError(f"In round {number} only smaller micro-batches went: {sizes}.")
        weights = [float(result.weight) for result in results]
        loss = sum(weight * float(result.loss) for weight, result in zip(weights, results, strict=True))
        turn = Turn(
            round=number,
            num_samples=sum(sum(result.micro_batch_sizes) for result in results),
            weight=sum(weights),
            num_steps=len(results),
            seconds=seconds,
            optimizer_seconds=self._optimizer_clock.take(),
            loss=loss / sum(weights),
            is_full=is_full,
        )
        return turn, results[-1].exactness

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def on_host(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Copies in host memory."""
    return {name: None if t is None else t.detach().to("cpu", copy=True) for name, t in tensors.items()}


class _OptimizerClock:
    """Seconds inside ``optimizer.step()``; on CUDA of the device, read only when somebody asks."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._mark)
            optimizer.register_step_post_hook(self._mark)

    def _mark(self, *_: Any) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def reset(self) -> None:
        """Forget what was noted, half a step that failed too."""
        self._marks = []

    def take(self) -> float:
        """Seconds since this was called last; the device must have come to the end."""
        marks, self._marks = self._marks, []
        pairs = zip(marks[::2], marks[1::2], strict=True)
        if self._is_cuda:
            return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        return sum(end - begin for begin, end in pairs)
