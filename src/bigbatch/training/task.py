"""A task: everything that a run needs, made of callables, so that each run builds its own from a seed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bigbatch.errors import OptionError, TaskError
from bigbatch.stepping.checks import check_loss_fn
from bigbatch.values import StepOptions, check_positive

Metrics = Mapping[str, tuple[Any, Any]]
"""By name: a sum over the samples (or tokens) of a micro-batch, and how many they are."""


@dataclass(frozen=True, kw_only=True)
class Task(StepOptions):
    """A model, its data, its loss and its optimizer, and every option of a step as a field.

    >>> import torch
    >>> task = Task(
    ...     model=lambda: torch.nn.Linear(2, 1),
    ...     train_data=lambda: torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)),
    ...     loss_fn=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     batch_size=4,
    ...     max_grad_norm=1.0,
    ... )

    Two of the options are made for each run, and are functions here: ``scheduler`` and ``ema``. With ``collate`` a
    batch is a list of samples, and this function makes a micro-batch of some of them, in training and in evaluation;
    without it, ``DataLoader``'s default makes the batch.

    Attributes:
        model: Makes the model. It runs after the seed is set.
        train_data: Makes the training data, map-style: ``len(data)`` and ``data[index]``.
        loss_fn: ``loss_fn(model, micro_batch)``, as for ``Step``.
        optimizer: ``optimizer(model)`` makes the optimizer, or a sequence of them.
        scheduler: ``scheduler(optimizer, total_steps)`` makes the scheduler (or a sequence), where ``optimizer`` is
            what ``optimizer(model)`` returned and ``total_steps`` counts the optimizer steps of the whole run.
        ema: ``ema(model)`` makes an ``AveragedModel`` or an object with ``update``.
        eval_data: Makes the evaluation data; needs ``evaluate``.
        evaluate: ``evaluate(model, micro_batch)`` returns a dict of ``name: (sum, count)``. The result of a name is
            the sum of all sums over that of all counts, so it does not depend on how the data was cut.
        batch_size: Samples in a batch, over all ranks; the last batch of an epoch holds what is left.
        epochs: Passes over the training data.
        eval_batch_size: Samples in a batch of the evaluation; None: as many as in a micro-batch.
        evaluate_every: Epochs from one evaluation to the next; the last epoch is always evaluated.
        seed: Of the model, of the order of the data and of the random numbers drawn in it.
        num_workers: Processes that load the data.
        name: What the run is called.

    Raises:
        TaskError: A field is missing, unknown or of the wrong kind; the message shows the line to write.
        ArgumentError: ``loss_fn`` is no function of the model and a micro-batch.
        OptionError: An option of the step has a value that it cannot have.
    """

    model: Callable[[], nn.Module]
    train_data: Callable[[], Any]
    loss_fn: Callable[[nn.Module, Any], Any]
    optimizer: Callable[[nn.Module], Any]
    scheduler: Callable[[Any, int], Any] | None = None
    ema: Callable[[nn.Module], Any] | None = None
    eval_data: Callable[[], Any] | None = None
    evaluate: Callable[[nn.Module, Any], Metrics] | None = None
    batch_size: int = 64
    epochs: int = 1
    eval_batch_size: int | None = None
    evaluate_every: int = 1
    seed: int = 0
    num_workers: int = 0
    name: str = "task"

    def __new__(cls, **fields: Any) -> Task:
        """Refuse unknown and missing fields in our words; a dataclass would only name them."""
        own = {spec.name for spec in dataclasses.fields(cls)}
        for name, line in _REQUIRED.items():
            if fields and name not in fields:  # copying a task makes an empty one first
                raise TaskError(f"The task has no {name}. Write {line}.")
        for name in fields.keys() - own:
            try:
                StepOptions.of({name: None})
            except OptionError as error:
                others = ", ".join(sorted(own - {spec.name for spec in dataclasses.fields(StepOptions)}))
                raise TaskError(f"{error} A Task also has the fields {others}.") from None
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_callables(self)
        _check_numbers(self)
        if self.eval_data is not None and self.evaluate is None:
            raise TaskError(
                "eval_data is given, but evaluate is not. Write what to measure, as sums and counts: "
                'evaluate=lambda model, batch: {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), '
                "len(batch[1]))}."
            )
        self.step_options(scheduler=None, ema=None)

    def step_options(self, *, scheduler: Any, ema: Any) -> StepOptions:
        """The options of the step, with what was made for this run.

        Raises:
            OptionError: An option has a value that it cannot have.
        """
        options = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(StepOptions)}
        # One's own GradScaler learns its scale, and each run begins with the one that was given.
        own = {"scheduler": scheduler, "ema": ema, "precision": copy.deepcopy(self.precision)}
        return StepOptions(**{**options, **own})


_REQUIRED = {
    "model": "model=lambda: MyModel()",
    "train_data": "train_data=lambda: my_dataset",
    "optimizer": "optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "loss_fn": "loss_fn=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])",
}
_OPTIONAL = {
    "scheduler": "scheduler=lambda optimizer, total_steps: "
    "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=total_steps)",
    "ema": "ema=lambda model: torch.optim.swa_utils.AveragedModel(model)",
    "eval_data": "eval_data=lambda: my_eval_dataset",
    "evaluate": 'evaluate=lambda model, batch: {"accuracy": (num_correct, num_samples)}',
}


def _check_callables(task: Task) -> None:
    check_loss_fn(task.loss_fn)
    for name, line in {**_REQUIRED, **_OPTIONAL}.items():
        found = getattr(task, name)
        if found is None and name in _OPTIONAL:
            continue
        # A module can be called, but here it is what the function should make.
        if not callable(found) or isinstance(found, nn.Module):
            raise TaskError(
                f"{name} is {_described(found)}. A Task is made of functions, so that each run builds its own: {line}."
            )


def _described(found: object) -> str:
    if found is None or isinstance(found, str | int | float | dict | list | tuple):
        return repr(found)[:80]
    return f"a {type(found).__name__} that is already there"


def _check_numbers(task: Task) -> None:
    check_positive("batch_size", task.batch_size)
    check_positive("epochs", task.epochs)
    check_positive("evaluate_every", task.evaluate_every)
    if task.eval_batch_size is not None:
        check_positive("eval_batch_size", task.eval_batch_size)
    for name in ("seed", "num_workers"):
        found = getattr(task, name)
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise OptionError(f"{name}={found!r}; it is a whole number of at least 0.")
    if not isinstance(task.name, str) or not task.name:
        raise OptionError(f"name={task.name!r}; it is a text, and names the folder of the run.")
