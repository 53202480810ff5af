"""What a run builds from the functions of its task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch.errors import TaskError, warn
from bigbatch.stepping.checks import optimizers_of
from bigbatch.stepping.learning_rate import total_steps
from bigbatch.stepping.step import Step
from bigbatch.training import randomness
from bigbatch.training.data import check_map_style
from bigbatch.training.group import ALONE, Group
from bigbatch.training.switches import Switches
from bigbatch.training.task import Task
from bigbatch.values import StepOptions


@dataclass(frozen=True)
class Parts:
    """The parts of one run.

    Attributes:
        model: On the device of the run.
        stepped: The model as a step gets it: wrapped, when there are several ranks.
        loss_fn: That of the task.
        optimizers: In the order of the task.
        options: Of the step, with the scheduler and the EMA of this run.
        train_data: Map-style.
        eval_data: Map-style, or None.
        total_steps: Optimizer steps of the whole run.
    """

    model: nn.Module
    stepped: nn.Module
    loss_fn: Callable[[nn.Module, Any], Any]
    optimizers: tuple[torch.optim.Optimizer, ...]
    options: StepOptions
    train_data: Any
    eval_data: Any
    total_steps: int

    def step(self, **how: Any) -> Step:
        """A step of these parts, with the options of the task.

        Args:
            how: Plan, budget or micro-batch size, as for ``Step``.
        """
        return Step(self.stepped, self.loss_fn, self.optimizers, **how, **vars(self.options))

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated: the averaged one when there is an EMA that is a module."""
        return self.options.ema if isinstance(self.options.ema, nn.Module) else self.model


def build(
    task: Task,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    group: Group = ALONE,
    switches: Switches | None = None,
) -> Parts:
    """Set the seed, and call the functions of a task once each.

    Args:
        dtype: Cast the model to it before the optimizer is made.
        group: The ranks of the run. All begin with the weights of rank 0, and each goes on with random numbers of its
            own; those of rank 0 are those of a run of one process.
        switches: What makes the model faster; switched on before it is wrapped, which takes it as it lies in memory.

    Raises:
        OptionError: A switch does not go with FSDP2.
        TaskError: A function returned what a run cannot use.
    """
    train_data = task.train_data()
    check_map_style(train_data, "train_data")
    eval_data = task.eval_data() if task.eval_data is not None else None
    if eval_data is not None:
        check_map_style(eval_data, "eval_data")
    if task.batch_size > len(train_data):
        warn(
            f"batch_size={task.batch_size}, but there are {len(train_data)} samples: each step sees {len(train_data)}."
        )
    torch.manual_seed(task.seed)
    model = _model_of(task).to(device=device, dtype=dtype)
    if group.is_sharded and task.ema is not None:
        raise TaskError("The task has an ema, and weights that are spread over ranks cannot be averaged yet: use DDP.")
    if switches is not None:
        switches.apply(model, device, is_sharded=group.is_sharded)
    # Before anything copies weights: they may have been drawn from something else than the seed of torch.
    stepped = group.wrapped(model, device)
    num_steps = total_steps(len(train_data), task.batch_size, epochs=task.epochs)
    made = task.optimizer(model)
    optimizers = optimizers_of(made)
    options = task.step_options(
        scheduler=task.scheduler(made, num_steps) if task.scheduler is not None else None,
        ema=task.ema(model) if task.ema is not None else None,
    )
    if not group.is_first:
        randomness.begin("rank", task.seed, group.rank)
    return Parts(model, stepped, task.loss_fn, optimizers, options, train_data, eval_data, num_steps)


def _model_of(task: Task) -> nn.Module:
    model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() returned a {type(model).__name__}; it must return a torch.nn.Module.")
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError(f"model() returned a {type(model).__name__} without a parameter to train.")
    return model
