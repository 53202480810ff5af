"""The order of the data: whole logical batches, the same ones however they are cut, shared and loaded."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, default_collate

from bigbatch.batch.dealing import Deal
from bigbatch.batch.lengths import lengths_of
from bigbatch.batch.looking import Look, Sharing
from bigbatch.batch.structure import is_array, mapped
from bigbatch.errors import TaskError
from bigbatch.stepping.generators import host_generators_put_back, seed_host
from bigbatch.stepping.learning_rate import total_steps
from bigbatch.training.packing import PackedList
from bigbatch.training.randomness import seed_of
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
        generator = torch.Generator().manual_seed(seed_of("order", self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)


class Share(NamedTuple):
    """What one rank loads of a batch.

    Attributes:
        step: Number of the step, from 0.
        places: Of its samples in the batch, ascending; none when there are more ranks than samples.
        indices: Of its samples in the data.
        example: Index of some sample of the batch, which says what none of them look like.
    """

    step: int
    places: list[int]
    indices: list[int]
    example: int


class Shares:
    """The share of one rank in every batch.

    Each sample belongs to exactly one rank, and together they are the batch, so that no sample is dropped or seen
    twice, as it is when shares are made equal (``torch.utils.data.DistributedSampler``).

    >>> batches = LogicalBatches(5, batch_size=3, epochs=1, seed=0)
    >>> [[len(share.indices) for share in Shares(batches, rank, 4)] for rank in range(4)]
    [[1, 1], [1, 0], [1, 1], [0, 0]]

    Args:
        deal: Says which samples are whose; without lengths, neighbours, at most one more or less than any other rank.
    """

    def __init__(self, batches: LogicalBatches, rank: int, world_size: int, deal: Deal | None = None):
        self.batches = batches
        self.rank = rank
        self.world_size = world_size
        self.deal = deal or Deal()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Share]:
        for step, indices in self.batches:
            places = self.deal.shares(indices, self.world_size)[self.rank]
            yield Share(step, places, [indices[place] for place in places], indices[0])


class _NoSamples(NamedTuple):
    """In the place of the samples of an empty share."""

    example: Any


class _SeededData:
    """Samples of a share, with random numbers of torch, Python and NumPy drawn from a seed of that sample and step.

    So augmentation in ``data[index]`` is the same whatever the model drew in between (which depends on the size of
    its micro-batches), however many processes load the data, and whichever rank does. Data that makes several samples
    at once (``__getitems__``) draws from the seed of the first.
    """

    def __init__(self, data: Any, seed: int):
        self.data = data
        self.seed = seed

    def __getitems__(self, share: Share) -> Sequence[Any]:
        data: Any = self.data
        indices = share.indices or [share.example]
        while type(data) is Subset:  # it has __getitems__ for the data in it, which may have none
            data, indices = data.dataset, [data.indices[index] for index in indices]
        draw = random.Random(f"samples {self.seed} {share.step}")
        of_place = [draw.getrandbits(32) for _ in range(max(share.places, default=0) + 1)]
        seeds = [of_place[place] for place in share.places] or of_place
        with host_generators_put_back():
            if hasattr(data, "__getitems__"):
                seed_host(seeds[0])
                samples = data.__getitems__(indices)
            else:
                samples = [_seeded_sample(data, index, seed) for index, seed in zip(indices, seeds, strict=True)]
        return samples if share.indices else _NoSamples(samples[0])


def _seeded_sample(data: Any, index: int, seed: int) -> Any:
    seed_host(seed)
    return data[index]


def train_loader(
    task: Task,
    data: Any,
    *,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    lengths: Sequence[int] | None = None,
) -> DataLoader[Any]:
    """The share of a rank in all logical batches of a run from a step on, in order.

    With ``collate`` each is a list of samples. An empty share is an empty list, or tensors of length 0.

    One loader for all epochs: its processes start once and go on loading while the model is evaluated.

    Args:
        lengths: Of all samples, the same on all ranks, to deal them by; see ``lengths_to_deal_by``.
    """
    deal = Deal(lengths, task.max_tokens, task.pad_to_multiple_of)
    order = LogicalBatches(
        len(data), batch_size=task.batch_size, epochs=task.epochs, seed=task.seed, first_step=first_step
    )
    return DataLoader(
        _SeededData(data, task.seed),  # pyright: ignore[reportArgumentType]
        batch_sampler=Shares(order, rank, world_size, deal),  # pyright: ignore[reportArgumentType]
        collate_fn=_collated if task.collate is None else _packed if task.num_workers else _as_they_are,
        num_workers=task.num_workers,
        worker_init_fn=_begin_worker,
        # Without a generator of its own the loader draws from the one that the model draws from.
        generator=torch.Generator().manual_seed(task.seed),
    )


def _as_they_are(samples: Any) -> list[Any]:
    return [] if isinstance(samples, _NoSamples) else list(samples)


def _packed(samples: Any) -> PackedList:
    return PackedList(_as_they_are(samples))


def _collated(samples: Any) -> Any:
    if isinstance(samples, _NoSamples):
        return mapped(_none_of, default_collate([samples.example]))
    return default_collate(samples)


def _none_of(leaf: Any) -> Any:
    return leaf[:0] if is_array(leaf) or isinstance(leaf, list | tuple) else leaf


@contextmanager
def going_through(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """What a loader gives; its workers end with the block, also when it is left early or never left.

    A worker that is there when the interpreter ends is told so by one SIGTERM, takes it for that of a terminal (see
    ``_begin_worker``), and is waited for without end.
    """
    batches = iter(loader)
    close = getattr(batches, "_shutdown_workers", _nothing)
    # For a block in a generator that nobody goes on with: it is left only after all that.
    atexit.register(close)
    try:
        yield batches
    finally:
        atexit.unregister(close)
        close()


def _nothing() -> None:
    """A loader without workers has nothing to close."""


def first_batch(task: Task, data: Any, **of_rank: Any) -> Any:
    """The first logical batch of a run, or the share of a rank in it; see ``train_loader``."""
    with going_through(train_loader(task, data, **of_rank)) as batches:
        return next(batches)


def lengths_to_deal_by(task: Task, data: Any, sharing: Sharing) -> list[int] | None:
    """The length of every sample, the same on all ranks; None where samples have none, or there is one rank.

    Data with an attribute ``lengths`` knows them. Otherwise each rank looks at a part of the samples, once in a run,
    and the ranks tell one another. All of them call this.

    Raises:
        TaskError: The data has more or fewer lengths than samples.
        BatchError: A length is no whole number, or negative.
    """
    if task.length is None or sharing.num_ranks == 1:
        return None
    known = _known_lengths(data)
    if known is None:
        with host_generators_put_back():
            found = Look(data, task).around(num_workers=task.num_workers, seed=task.seed, sharing=sharing)
        return [length for length, _ in found if length is not None]
    if len(known) != len(data):
        raise TaskError(
            f"train_data() returned a {type(data).__name__} with {len(known)} lengths and {len(data)} samples. Make "
            f"its lengths one for each sample, in order, or leave them out: then every sample is looked at."
        )
    return lengths_of(known, lambda length: length)


def _known_lengths(data: Any) -> Any:
    if type(data) is Subset:
        inner = _known_lengths(data.dataset)
        return None if inner is None else [inner[index] for index in data.indices]
    found = getattr(data, "lengths", None)
    return None if callable(found) else found


def eval_loader(task: Task, data: Any, batch_size: int, *, rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
    """The evaluation data in its own order; of several ranks each has every so-many-th batch."""
    batches = BatchSampler(SequentialSampler(data), batch_size, drop_last=False)
    return DataLoader(
        data,
        batch_sampler=_EverySoMany(batches, rank, world_size),  # pyright: ignore[reportArgumentType]
        collate_fn=task.collate,
        num_workers=task.num_workers,
        worker_init_fn=_begin_worker,
        generator=torch.Generator().manual_seed(task.seed),
    )


class _EverySoMany:
    """Of what can be gone through: the one at ``first``, and every ``each``-th after it."""

    def __init__(self, found: Iterable[Any], first: int, each: int):
        self.found, self.first, self.each = found, first, each

    def __iter__(self) -> Iterator[Any]:
        return islice(self.found, self.first, None, self.each)


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
