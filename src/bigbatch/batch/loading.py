"""A loader whose workers collate micro-batches, so that a step finds each of them ready."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from bigbatch.batch.collating import Collate, by_length, in_order, warn_where_nothing_bounds
from bigbatch.batch.dealing import Deal
from bigbatch.batch.logical import LogicalBatch
from bigbatch.batch.looking import Look, Sharing, samples_of
from bigbatch.batch.weighing import Weigher
from bigbatch.errors import BatchError, OptionError
from bigbatch.values import StepOptions, check_positive


@dataclass(frozen=True)
class _Piece:
    """One micro-batch that a worker is to make."""

    indices: list[int]
    collate: Collate


@dataclass(frozen=True)
class _Planned:
    """The micro-batches of one logical batch."""

    pieces: list[_Piece]
    weight: Any
    padding: tuple[float, float] | None


class LogicalBatchLoader:
    """Yields one ``LogicalBatch`` for each step; its micro-batches are collated, and pinned on CUDA, by workers.

    They come one by one: the first forward waits for the first of them and not for the last, and yet the weight of
    the whole batch is known before it. For that, lengths and weights are found once, by looking at every sample when
    the first epoch begins; ``length=`` may be a list of them instead. So a length must not change between two visits.

    >>> data = [torch.ones(n) for n in (5, 1, 5, 1)]
    >>> loader = LogicalBatchLoader(
    ...     data, batch_size=4, collate=torch.nn.utils.rnn.pad_sequence, length=len, max_tokens=12, shuffle=False
    ... )
    >>> [[tuple(micro_batch.shape) for micro_batch in batch.micro_batches] for batch in loader]
    [[(5, 2), (1, 2)]]

    Where there is a process group, each rank gets its share of every batch, dealt so that all have about the same to
    do; it may be empty. Each rank looks at a part of the data, and the ranks tell one another what they found, so all
    of them begin an epoch together.

    A step of such a batch cannot be cut again, so it does not shrink when memory runs out; see docs/lengths.md.

    Args:
        data: Map-style: ``len(data)`` and ``data[index]``.
        batch_size: Samples of a logical batch; the last one of an epoch holds what is left, without ``drop_last``.
        collate: Makes a micro-batch of a list of samples; it runs in the workers.
        length: ``length(sample)``, or the lengths of all samples in order. None: samples are not grouped.
        micro_batch_size, max_tokens, pad_to_multiple_of, weight: See ``StepOptions``; give the step the same weight.
        shuffle: Another order in each epoch, from ``seed`` and the number of the epoch.
        seed: Of the order, and of what workers draw.
        drop_last: Leave out a last batch that is not full.
        group: The process group whose ranks share each batch, as the model of the step does; None: the default one,
            if there is one.
        pin_memory: None: where there is CUDA.
        loader_options: Of ``torch.utils.data.DataLoader``: ``num_workers``, ``persistent_workers``, and so on; not
            those that say which samples make a batch.

    Attributes:
        epoch: The one that the next ``iter`` begins, from 0; set it to go on in the middle of a run.

    Raises:
        OptionError: Options do not go together.
        LengthError: While it runs: a sample is longer than ``max_tokens``; its index is that in its batch.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int,
        collate: Callable[..., Any],
        length: Callable[[Any], Any] | Sequence[int] | None = None,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        weight: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        group: Any = None,
        pin_memory: bool | None = None,
        **loader_options: Any,
    ):
        check_positive("batch_size", batch_size)
        _check_loader_options(loader_options)
        if micro_batch_size is not None:
            check_positive("micro_batch_size", micro_batch_size)
        known = None if length is None or callable(length) else list(length)
        if known is not None and len(known) != len(data):
            raise OptionError(f"length= holds {len(known)} lengths, but the data has {len(data)} samples.")
        self._length: Any = length if callable(length) else (None if known is None else len)
        self._options = StepOptions(
            collate=collate, length=self._length, max_tokens=max_tokens, pad_to_multiple_of=pad_to_multiple_of
        )
        self.batch_size, self.epoch, self._drop_last = batch_size, 0, drop_last
        warn_where_nothing_bounds([], micro_batch_size, self._options)
        self._data, self._micro_batch_size, self._lengths = data, micro_batch_size, known
        self._weigher, self._weights = Weigher(weight), None
        self._shuffle, self._seed = shuffle, seed
        self._loader_options = loader_options
        self._sharing = Sharing.of(group)
        self._sampler = _Sampler()
        self._loader: DataLoader[Any] = DataLoader(
            _Collated(data),  # pyright: ignore[reportArgumentType]
            batch_sampler=self._sampler,  # pyright: ignore[reportArgumentType]
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            generator=torch.Generator().manual_seed(seed),
            **loader_options,
        )

    def __len__(self) -> int:
        """Logical batches in an epoch."""
        full, rest = divmod(len(self._data), self.batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[LogicalBatch]:
        """The batches of the next epoch."""
        self._measure()
        mine, self._sampler.planned = itertools.tee(self._planned(self.epoch))
        self.epoch += 1
        micro_batches = iter(self._loader)
        for planned in mine:
            stream = _Stream(micro_batches, len(planned.pieces))
            yield LogicalBatch(stream, planned.weight, padding=planned.padding)
            stream.pass_over_the_rest()

    def _planned(self, epoch: int) -> Iterator[_Planned]:
        generator = torch.Generator().manual_seed(self._seed + epoch)
        count = len(self._data)
        order = torch.randperm(count, generator=generator) if self._shuffle else torch.arange(count)
        for chosen in order.split(self.batch_size)[: len(self)]:
            yield self._plan(chosen.tolist())

    def _plan(self, batch: list[int]) -> _Planned:
        size, options = self._micro_batch_size, self._options
        deal = Deal(self._lengths, options.max_tokens, options.pad_to_multiple_of)
        indices = [batch[place] for place in deal.shares(batch, self._sharing.num_ranks)[self._sharing.rank]]
        if not indices:
            return _Planned([], self._weight_of([]), None)
        if self._lengths is None or (size is None and options.max_tokens is None):
            found = in_order(len(indices), size, options)
        else:
            found = by_length([self._lengths[i] for i in indices], size, options)
        pieces = [
            _Piece([indices[i] for i in group], collate)
            for group, collate in zip(found.indices, found.collates, strict=True)
        ]
        return _Planned(pieces, self._weight_of(indices), found.padding)

    def _weight_of(self, indices: list[int]) -> Any:
        terms = self._weigher.by_term
        weights = self._weights
        if weights is None:
            total = dict.fromkeys(terms, float(len(indices)))
        else:
            total = {term: sum(weights[i][term] for i in indices) for term in terms}
        return total.get(None, total)

    def _measure(self) -> None:
        """Find what is not known yet of the samples, in the workers."""
        wants_lengths = self._length is not None and self._lengths is None
        wants_weights = not self._weigher.counts_samples and self._weights is None
        if not (wants_lengths or wants_weights):
            return
        look = Look(self._data, self._options, self._weigher if wants_weights else None, wants_lengths)
        num_workers = self._loader_options.get("num_workers", 0)
        found = look.around(num_workers=num_workers, seed=self._seed, sharing=self._sharing)
        if wants_lengths:
            self._lengths = [length for length, _ in found if length is not None]
        if wants_weights:
            self._weights = [weight for _, weight in found]


class _Sampler:
    """Hands the micro-batches of the epoch that runs to the loader."""

    planned: Iterator[_Planned] = iter(())

    def __iter__(self) -> Iterator[_Piece]:
        return (piece for planned in self.planned for piece in planned.pieces)


class _Collated:
    """What a worker does for one micro-batch."""

    def __init__(self, data: Any):
        self.data = data

    def __getitems__(self, piece: _Piece) -> Any:
        return piece.collate(samples_of(self.data, piece.indices))


class _Stream:
    """The micro-batches of one logical batch, read from a loader that goes on with those of the next."""

    def __init__(self, micro_batches: Iterator[Any], count: int):
        self._micro_batches, self._count, self._left = micro_batches, count, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        if self._count and not self._left:
            raise BatchError(
                "The micro-batches of this LogicalBatch are gone: each is read once, and before the loader is asked "
                "for the next batch. Make a step of each batch as it comes, not of list(loader)."
            )
        while self._left:
            self._left -= 1
            yield next(self._micro_batches)

    def pass_over_the_rest(self) -> None:
        """A step that failed has not read all of them."""
        while self._left:
            self._left -= 1
            next(self._micro_batches)


_INSTEAD = {
    "collate_fn": "Give collate=, which makes a micro-batch of a list of samples.",
    "sampler": "Give shuffle= and seed=, or data in the order that you want, such as torch.utils.data.Subset.",
    "batch_sampler": "Give batch_size=, shuffle= and seed=, or data in the order that you want with shuffle=False.",
    "generator": "Give seed=.",
}


def _check_loader_options(options: dict[str, Any]) -> None:
    for name, instead in _INSTEAD.items():
        if name in options:
            raise OptionError(f"{name}= is not an option here: LogicalBatchLoader makes its own. {instead}")


def _as_it_is(made: Any) -> Any:
    return made
