"""How close a run comes to the direct big batch: some steps in float64, the first gradient, the result, the peaks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from bigbatch.batch.structure import mapped
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.stepping.accumulating import accumulate
from bigbatch.stepping.step import Step
from bigbatch.training.building import Parts, build
from bigbatch.training.data import first_batch, train_loader
from bigbatch.training.direct import DirectSteps, train_directly
from bigbatch.training.events import is_accuracy, weaker
from bigbatch.training.loop import Run
from bigbatch.training.task import Task
from bigbatch.values import AFTER_THE_GRADIENT, Exactness, StepOptions

MAX_DIFFERENCE = 1e-10
"""Of a parameter after some steps in float64, relative to it."""

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
    """

    task: str
    num_steps: int
    micro_batch_size: int
    difference: float
    parameter: str
    exactness: Exactness

    @property
    def within(self) -> bool:
        """Whether it is as close as it should be."""
        return self.exactness != "exact" or self.difference <= MAX_DIFFERENCE


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
    """Make the first optimizer steps of the task in float64, through ``Step`` and directly."""
    device = torch.device(device)
    task = _in_float64(task)
    cut = build(task, device, dtype=torch.float64)
    direct = _twin(task, cut, device)
    step = Step(cut.model, task.loss_fn, cut.optimizers, micro_batch_size=micro_batch_size, **vars(cut.options))
    direct_steps = DirectSteps(task, direct, device)
    exactness: Exactness = "exact"
    batches = list(islice(train_loader(task, cut.train_data), num_steps))
    for batch in batches if task.collate is not None else map(_double, batches):
        exactness = weaker(exactness, step(batch).exactness)
        direct_steps.step(batch)
    difference, parameter = largest_difference(
        dict(cut.model.named_parameters()), dict(direct.model.named_parameters())
    )
    return StepsComparison(task.name, len(batches), micro_batch_size, difference, parameter, exactness)


def _in_float64(task: Task) -> Task:
    collate = task.collate
    doubled = None if collate is None else (lambda samples: _double(collate(samples)))
    return dataclasses.replace(task, precision="fp32", collate=doubled)


def _double(batch: Any) -> Any:
    return mapped(lambda leaf: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, batch)


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
    names = {spec.name for spec in dataclasses.fields(StepOptions)} - AFTER_THE_GRADIENT
    options = {name: getattr(task, name) for name in names}
    accumulate(cut.model, task.loss_fn, batch, micro_batch_size=micro_batch_size, **options)
    DirectSteps(task, direct, device).backward(batch)
    return largest_difference(_gradients(cut), _gradients(direct))


def _gradients(parts: Parts) -> dict[str, torch.Tensor]:
    # None is taken for zeros: whether a parameter that nothing counts for has a gradient may depend on the cut.
    named = ((name, p) for name, p in parts.model.named_parameters() if p.requires_grad)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


def largest_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    r"""The largest $\lVert\Delta_p\rVert / \max(\lVert e_p\rVert, 10^{-3} \lVert e\rVert / \sqrt{P})$, and its name.

    The floor is for what is zero in truth, where any rounding error would be infinitely large.
    """
    norms = {name: float(value.detach().double().norm()) for name, value in expected.items()}
    floor = 1e-3 * math.sqrt(sum(norm**2 for norm in norms.values()) / len(norms))
    differences = {
        name: float((found[name].detach().double() - value.detach().double()).norm()) / max(norms[name], floor)
        for name, value in expected.items()
    }
    name = max(differences, key=lambda name: differences[name])
    return differences[name], name


def direct_peak_bytes(task: Task, *, device: str | torch.device = "cpu") -> int | None:
    """Counted peak of a steady step of the big batch at once, tried and undone; None when it runs out of memory."""
    run = Run(task, device=device)
    batch = first_batch(task, run.parts.train_data)
    try:
        return run.step.measure(batch, task.batch_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None
