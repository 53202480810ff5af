"""Evaluation: sums and counts over all of the data, so that its batch size does not show in the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from bigbatch.batch.moving import moved
from bigbatch.errors import TaskError
from bigbatch.stepping.normalization.recalibrating import eval_mode
from bigbatch.stepping.precision import Precision
from bigbatch.training.data import going_through
from bigbatch.training.group import ALONE, Group
from bigbatch.training.task import Task

_Row = dict[str, tuple[float, float]]
"""Of one batch: sum and count by name."""
_EXAMPLE = 'evaluate=lambda model, batch: {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}'


def evaluate(
    task: Task, model: nn.Module, batches: Iterable[Any], device: torch.device, group: Group = ALONE
) -> dict[str, float]:
    """Results of ``task.evaluate`` over all batches: by name, the sum of the sums over the sum of the counts.

    On several ranks ``batches`` are those of this one (see ``eval_loader``), and the results are those of all: the same
    numbers as in one process, to the last bit, because the same numbers are added in the same order.

    The model runs in eval mode, without a graph, in the precision of the training; it is left in the modes that it had.

    Raises:
        TaskError: ``evaluate`` returned something else than names with a sum and a count, or nothing was counted.
    """
    rows: list[dict[str, torch.Tensor]] = []
    forward = Precision(task.precision, device.type).forward(device.type)
    with going_through(batches) as found, eval_mode(model), torch.no_grad(), forward:
        for batch in found:
            returned = task.evaluate(model, moved(batch, device))  # pyright: ignore[reportOptionalCall]
            pairs = _checked(returned).items()
            rows.append({name: torch.stack([_number(name, value, device) for value in pair]) for name, pair in pairs})
    return _results(_in_turns(group.gathered([_read(row) for row in rows])))


def _read(row: dict[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """The numbers of a batch, after all batches: reading waits for the device."""
    return {name: tuple(pair.tolist()) for name, pair in row.items()}  # pyright: ignore[reportReturnType]


def _in_turns(found: list[list[_Row]]) -> Iterator[_Row]:
    """What the ranks have, as one process would have had it: the first of each, then the second of each."""
    for turn in zip_longest(*found):
        yield from (row for row in turn if row is not None)


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


def _results(rows: Iterable[_Row]) -> dict[str, float]:
    totals: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, (total, count) in row.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = before[0] + total, before[1] + count
    results = {}
    for name, (total, count) in totals.items():
        if count == 0:
            raise TaskError(
                f"evaluate counted 0 for {name!r} over all of the evaluation data; {total} / 0 is no result."
            )
        results[name] = total / count
    return results
