"""How close a run comes to the direct big batch: some steps in float64, the first gradient, the result, the peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.stepping.accumulate import accumulate
from bigbatch.training.building import Parts, build
from bigbatch.training.data import first_batch, going_through, train_loader
from bigbatch.training.direct import DirectSteps, train_directly
from bigbatch.training.events import is_accuracy, weaker
from bigbatch.training.loop import Run
from bigbatch.training.task import Task
from bigbatch.values import AFTER_THE_GRADIENT, Exactness, StepOptions
from bigbatch.verification.comparison import MAX_DIFFERENCE, relative_differences
from bigbatch.verification.widening import wide_batch

MAX_ACCURACY_DIFFERENCE = 0.005
"""Half a point, for a run that is only approximately the big batch's."""


@dataclass(frozen=True)
class StepsComparison:
    """Some optimizer steps in float64, cut and direct, from the same weights.

    Attributes:
        task: Name of the task.
        num_steps: Steps that were made on each side.
        micro_batch_size: Of the cut side.
        difference: The largest over the parameters: norm of the difference over norm of the direct one (or, for a
            parameter near zero, over a thousandth of the root mean square norm of all).
        parameter: That one.
        exactness: Of the cut side; the bound holds when it is "exact".
        whole: Samples in a batch, where micro-batches as large were asked for, which cut nothing: then others are
            taken, of ``micro_batch_size``. None: those that were asked for.
    """

    task: str
    num_steps: int
    micro_batch_size: int
    difference: float
    parameter: str
    exactness: Exactness
    whole: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether there was anything to compare: a batch of one sample cannot be cut."""
        return self.whole is None or self.micro_batch_size < self.whole

    @property
    def within(self) -> bool:
        """Whether it is as close as it should be."""
        return self.exactness != "exact" or self.difference <= MAX_DIFFERENCE["float64"]


@dataclass(frozen=True)
class RunsComparison:
    """A whole run, cut and direct, from the same seed.

    Attributes:
        gradient_difference: The largest over the parameters, of the gradient of the first step; measured as in
            ``StepsComparison``.
        parameter: That one.
        cut: Results of the last evaluation by name.
        direct: The same of the direct run.
    """

    gradient_difference: float
    parameter: str
    cut: Mapping[str, float]
    direct: Mapping[str, float]

    @property
    def accuracy_differences(self) -> dict[str, float]:
        """How far the accuracies are apart, by name."""
        return {name: abs(self.cut[name] - direct) for name, direct in self.direct.items() if is_accuracy(name)}

    @property
    def within(self) -> bool:
        """Whether accuracies differ by half a point at most."""
        return all(difference <= MAX_ACCURACY_DIFFERENCE for difference in self.accuracy_differences.values())


def compare_steps(
    task: Task, *, micro_batch_size: int, num_steps: int = 10, device: str | torch.device = "cpu"
) -> StepsComparison:
    """Make the first optimizer steps of the task in float64, through ``Step`` and directly.

    Micro-batches that hold the whole batch would compare it with itself, so others are taken: see ``uneven_cut``.
    """
    device = torch.device(device)
    task = _in_float64(task)
    cut = build(task, device, dtype=torch.float64)
    direct = _twin(task, cut, device)
    whole = min(task.batch_size, len(cut.train_data))
    step = cut.step(micro_batch_size=micro_batch_size)
    if micro_batch_size >= whole:
        micro_batch_size = uneven_cut(whole, smallest=step.accumulator.smallest_micro_batch)
        step = cut.step(micro_batch_size=micro_batch_size)
    else:
        whole = None
    direct_steps = DirectSteps(task, direct, device)
    exactness: Exactness = "exact"
    with going_through(train_loader(task, cut.train_data)) as loaded:
        batches = list(islice(loaded, num_steps))
    for batch in batches if task.collate is not None else (wide_batch(batch, torch.float64) for batch in batches):
        exactness = weaker(exactness, step(batch).exactness)
        direct_steps.step(batch)
    differences = relative_differences(dict(cut.model.named_parameters()), dict(direct.model.named_parameters()))
    parameter, difference = next(iter(differences.items()))
    return StepsComparison(task.name, len(batches), micro_batch_size, difference, parameter, exactness, whole)


def uneven_cut(num_samples: int, *, smallest: int = 1) -> int:
    """Samples in a micro-batch: about a third of the batch, such that the last micro-batch holds fewer if it can.

    An even cut would be right even where micro-batches are weighed alike.

    >>> uneven_cut(512), uneven_cut(9), uneven_cut(9, smallest=2), uneven_cut(1)
    (171, 2, 5, 1)

    Args:
        num_samples: In the batch; returned where it cannot be cut.
        smallest: Samples in a micro-batch, at least.
    """

    def faults(size: int) -> tuple[bool, bool, bool, int]:
        cut = micro_batch_sizes(num_samples, size, smallest)
        return min(cut) < smallest, len(cut) == 1, len(set(cut)) == 1, abs(3 * size - num_samples)

    return min(range(smallest, num_samples + 1), key=faults, default=num_samples)


def _in_float64(task: Task) -> Task:
    collate = task.collate
    doubled = None if collate is None else (lambda samples: wide_batch(collate(samples), torch.float64))
    return dataclasses.replace(task, precision="fp32", collate=doubled, pad_to_multiple_of=None)


def _twin(task: Task, parts: Parts, device: torch.device) -> Parts:
    """Another build of the task with the same weights, whatever its model drew them from."""
    dtype = next(parts.model.parameters()).dtype
    twin = build(task, device, dtype=dtype if dtype == torch.float64 else None)
    twin.model.load_state_dict(parts.model.state_dict())
    return twin


def compare_runs(
    task: Task, cut: Mapping[str, float], *, micro_batch_size: int, device: str | torch.device = "cpu"
) -> RunsComparison:
    """Train the task directly from its seed, and compare with the results of the cut run."""
    device = torch.device(device)
    difference, parameter = _first_gradients(task, micro_batch_size, device)
    return RunsComparison(difference, parameter, cut, train_directly(task, device))


def _first_gradients(task: Task, micro_batch_size: int, device: torch.device) -> tuple[float, str]:
    task = dataclasses.replace(task, precision="fp32")
    cut = build(task, device)
    direct = _twin(task, cut, device)
    batch = first_batch(task, cut.train_data)
    found = cut_gradients(task, cut, batch, micro_batch_size=micro_batch_size)
    expected = direct_gradients(task, direct, batch, device=device)
    parameter, difference = next(iter(relative_differences(found, expected).items()))
    return difference, parameter


def cut_gradients(
    task: Task, parts: Parts, batch: Any, *, micro_batch_size: int | None
) -> dict[str, torch.Tensor | None]:
    """The gradient of a batch by name, through ``accumulate``; it is left in ``.grad``, and buffers have moved."""
    names = {spec.name for spec in dataclasses.fields(StepOptions)} - AFTER_THE_GRADIENT
    options = {name: getattr(task, name) for name in names}
    accumulate(parts.model, task.loss_fn, batch, micro_batch_size=micro_batch_size, **options)
    return _gradients(parts)


def direct_gradients(task: Task, parts: Parts, batch: Any, *, device: torch.device) -> dict[str, torch.Tensor | None]:
    """The same of the batch at once, by autograd alone."""
    DirectSteps(task, parts, device).backward(batch)
    return _gradients(parts)


def _gradients(parts: Parts) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in parts.model.named_parameters() if p.requires_grad}


def direct_peak_bytes(task: Task, *, device: str | torch.device = "cpu") -> int | None:
    """Counted peak of a steady step of the big batch at once, tried and undone; None when it runs out of memory."""
    run = Run(task, device=device)
    try:
        return run.step.measure(run.first_batch(), task.batch_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None
