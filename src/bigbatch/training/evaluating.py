"""Evaluation: sums and counts over all of the data, so that its batch size does not show in the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bigbatch.batch.moving import moved
from bigbatch.errors import TaskError
from bigbatch.stepping.precision import Precision
from bigbatch.stepping.recalibrating import eval_mode
from bigbatch.training.task import Task

_EXAMPLE = 'evaluate=lambda model, batch: {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}'


def evaluate(task: Task, model: nn.Module, batches: Iterable[Any], device: torch.device) -> dict[str, float]:
    """Results of ``task.evaluate`` over all batches: by name, the sum of the sums over the sum of the counts.

    The model runs in eval mode, without a graph, in the precision of the training; it is left in the modes that it had.

    Raises:
        TaskError: ``evaluate`` returned something else than names with a sum and a count, or nothing was counted.
    """
    totals: dict[str, list[torch.Tensor]] = {}
    with eval_mode(model), torch.no_grad(), Precision(task.precision, device.type).forward(device.type):
        for batch in batches:
            found = task.evaluate(model, moved(batch, device))  # pyright: ignore[reportOptionalCall]
            for name, pair in _checked(found).items():
                row = [_number(name, value, device) for value in pair]
                totals[name] = [a + b for a, b in zip(totals[name], row, strict=True)] if name in totals else row
    return _results(totals)


def _checked(found: Any) -> Mapping[str, Any]:
    is_pairs = isinstance(found, Mapping) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in found.values()
    )
    if not is_pairs:
        raise TaskError(
            f"evaluate(model, micro_batch) returned {_described(found)}; it must return a dict of name: (sum, count), "
            f"so that batches of different sizes add up: {_EXAMPLE}."
        )
    return found


def _described(found: Any) -> str:
    if isinstance(found, Mapping):
        return "{" + ", ".join(f"{name!r}: {type(value).__name__}" for name, value in found.items()) + "}"
    return f"a {type(found).__name__}"


def _number(name: str, value: Any, device: torch.device) -> torch.Tensor:
    """The number in float64 on the device: nobody waits, and many small sums lose nothing."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(()).double()
    if isinstance(value, torch.Tensor) or not hasattr(value, "__float__"):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise TaskError(
            f"evaluate(model, micro_batch) gave {name!r} as a {type(value).__name__}{shape}; a sum and a count are "
            f"numbers or 0-d tensors: {_EXAMPLE}."
        )
    return torch.tensor(float(value), dtype=torch.float64, device=device)


def _results(totals: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    results = {}
    for name, (total, count) in ((name, (a.item(), b.item())) for name, (a, b) in totals.items()):
        if count == 0:
            raise TaskError(
                f"evaluate counted 0 for {name!r} over all of the evaluation data; {total} / 0 is no result."
            )
        results[name] = total / count
    return results
