"""The order of the data: whole logical batches, the same ones however they are cut, and whoever loads them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    Args:
        first_step: Begin with the batch of this step, from 0; the others are passed over without being loaded.
    """

    def __init__(self, num_samples: int, *, batch_size: int, epochs: int, seed: int, first_step: int = 0):
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.epochs = epochs
        self.seed = seed
        self.first_step = first_step

    def __len__(self) -> int:
        return total_steps(self.num_samples, self.batch_size, epochs=self.epochs) - self.first_step

    def __iter__(self) -> Iterator[_Batch]:
        steps_per_epoch = total_steps(self.num_samples, self.batch_size)
        first_epoch, passed_over = divmod(self.first_step, steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            batches = self._order(epoch).split(self.batch_size)
            for i in range(passed_over, steps_per_epoch):
                yield epoch * steps_per_epoch + i, batches[i].tolist()
            passed_over = 0

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_seed_of("order", self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)


def _seed_of(*names: str | int) -> int:
    # torch's generator for the host takes 32 bits of a seed, so numbers cannot be packed side by side into it.
    return random.Random(" ".join(map(str, names))).getrandbits(32)


class _SeededData:
    """Samples of a batch, with random numbers of torch, Python and NumPy drawn from a seed of that batch.

    So augmentation in ``data[index]`` is the same whatever the model drew in between (which depends on the size of
    its micro-batches) and however many processes load the data.
    """

    def __init__(self, data: Any, seed: int):
        self.data = data
        self.seed = seed

    def __getitems__(self, batch: _Batch) -> Sequence[Any]:
        step, indices = batch
        with _seeded(_seed_of("samples", self.seed, step)):
            if hasattr(self.data, "__getitems__"):
                return self.data.__getitems__(indices)
            return [self.data[index] for index in indices]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from that seed, and leave the generators as they were."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])


def train_loader(task: Task, data: Any, *, first_step: int = 0) -> DataLoader[Any]:
    """All logical batches of a run from a step on, in order. With ``collate`` each is a list of samples.

    One loader for all epochs: its processes start once and go on loading while the model is evaluated.
    """
    order = LogicalBatches(
        len(data), batch_size=task.batch_size, epochs=task.epochs, seed=task.seed, first_step=first_step
    )
    return DataLoader(
        _SeededData(data, task.seed),  # pyright: ignore[reportArgumentType]
        batch_sampler=order,  # pyright: ignore[reportArgumentType]
        collate_fn=_as_it_is if task.collate is not None else None,
        num_workers=task.num_workers,
        worker_init_fn=_begin_worker,
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
        worker_init_fn=_begin_worker,
        generator=torch.Generator().manual_seed(task.seed),
    )


def _as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def _begin_worker(worker: int) -> None:
    """Leave signals to the run, and end with it.

    A terminal sends Ctrl-C to all processes, and others send SIGTERM so; the run still needs its workers then. A second
    SIGTERM ends them: that is how a loader ends one that hangs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    # The loader's own watchdog looks every five seconds whether its parent is another one; if the run was killed before
    # the watchdog began, it never is, and the worker stays for ever.
    run = multiprocessing.parent_process()
    if run is not None:
        run.join()
        os._exit(1)


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
