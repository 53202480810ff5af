"""The order of the data: whole logical batches, the same ones however they are cut, and whoever loads them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from bigbatch.errors import TaskError
from bigbatch.stepping.learning_rate import total_steps
from bigbatch.training.task import Task

_Batch = tuple[int, list[int]]
"""Number of the step, from 0, and the indices of its samples."""


class LogicalBatches:
    """Indices of the samples of every optimizer step of a run.

    Each epoch has an order of its own, a permutation that depends on the seed and the number of the epoch alone. It
    is cut into batches of ``batch_size``; the last one of an epoch holds what is left, and no sample is dropped.

    >>> [(step, len(indices)) for step, indices in LogicalBatches(10, batch_size=4, epochs=2, seed=0)]
    [(0, 4), (1, 4), (2, 2), (3, 4), (4, 4), (5, 2)]
    """

    def __init__(self, num_samples: int, *, batch_size: int, epochs: int, seed: int):
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.epochs = epochs
        self.seed = seed

    def __len__(self) -> int:
        return total_steps(self.num_samples, self.batch_size, epochs=self.epochs)

    def __iter__(self) -> Iterator[_Batch]:
        step = 0
        for epoch in range(self.epochs):
            for indices in self._order(epoch).split(self.batch_size):
                yield step, indices.tolist()
                step += 1

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_seed_of("order", self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)


def _seed_of(*names: str | int) -> int:
    # torch's generator for the host takes 32 bits of a seed, so numbers cannot be packed side by side into it.
    return random.Random(" ".join(map(str, names))).getrandbits(32)


class _SeededData:
    """Samples of a batch, with torch's random numbers drawn from a seed of that batch.

    So augmentation in ``data[index]`` is the same whatever the model drew in between (which depends on the size of
    its micro-batches) and however many processes load the data.
    """

    def __init__(self, data: Any, seed: int):
        self.data = data
        self.seed = seed

    def __getitems__(self, batch: _Batch) -> Sequence[Any]:
        step, indices = batch
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_seed_of("samples", self.seed, step))
            if hasattr(self.data, "__getitems__"):
                return self.data.__getitems__(indices)
            return [self.data[index] for index in indices]


def train_loader(task: Task, data: Any) -> DataLoader[Any]:
    """All logical batches of a run, in order. With ``collate`` each is a list of samples.

    One loader for all epochs: its processes start once and go on loading while the model is evaluated.
    """
    order = LogicalBatches(len(data), batch_size=task.batch_size, epochs=task.epochs, seed=task.seed)
    return DataLoader(
        _SeededData(data, task.seed),  # pyright: ignore[reportArgumentType]
        batch_sampler=order,  # pyright: ignore[reportArgumentType]
        collate_fn=_as_it_is if task.collate is not None else None,
        num_workers=task.num_workers,
        # Without a generator of its own the loader draws from the one that the model draws from.
        generator=torch.Generator().manual_seed(task.seed),
    )


def first_batch(task: Task, data: Any) -> Any:
    """The first logical batch of a run."""
    return next(iter(train_loader(task, data)))


def eval_loader(task: Task, data: Any, batch_size: int) -> DataLoader[Any]:
    """The evaluation data in its own order."""
    return DataLoader(
        data,
        batch_size=batch_size,
        collate_fn=task.collate,
        num_workers=task.num_workers,
        generator=torch.Generator().manual_seed(task.seed),
    )


def _as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def check_map_style(data: Any, name: str) -> None:
    """Raise ``TaskError`` unless ``data`` has a length and samples by index."""
    if isinstance(data, DataLoader):
        raise TaskError(
            f"{name}() returned a DataLoader; return the dataset itself, because the run makes whole logical batches "
            f"of it: {name}=lambda: my_dataset. Its workers and collate function are num_workers= and collate=."
        )
    if not hasattr(type(data), "__len__") or not hasattr(type(data), "__getitem__") or isinstance(data, dict):
        raise TaskError(
            f"{name}() returned a {type(data).__name__}; a run needs a map-style dataset, with len(data) and "
            f"data[index], to put its samples in order. A list of samples will do: {name}=lambda: list(my_stream)."
        )
    if len(data) == 0:
        raise TaskError(f"{name}() returned a {type(data).__name__} of 0 samples; there is nothing to learn from.")
