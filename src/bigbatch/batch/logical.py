"""A logical batch: everything that one optimizer step sees, as weighed micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from bigbatch.batch.collating import PLAIN, Room, check_list_of_samples, collation_of
from bigbatch.batch.cutting import lay_out
from bigbatch.batch.sizes import micro_batch_sizes, spans
from bigbatch.batch.weighing import Weigher, Weights, checked_weight, for_term
from bigbatch.errors import ArgumentError, BatchError, EmptyBatchError, LossError
from bigbatch.values import StepOptions

_NO_LISTS = (torch.Tensor, str, bytes, Mapping)


@dataclass(frozen=True)
class LogicalBatch:
    """A batch that is already cut: for loaders that cut in their workers, or yield micro-batches.

    Attributes:
        micro_batches: The micro-batches, in order. A list is weighed before the first forward; an iterator is read
            as the step goes, so that the first forward does not wait for the last micro-batch.
        weight: What the mean loss of the whole batch is over: samples, or tokens, as the step's ``weight`` says; a
            dict when that is one. It is checked. Known beforehand for an iterator, it saves a pass over the gradient.
        whole: What the loss of a ``WholeBatchLoss`` gets as the batch, such as all labels.
        padding: Share of padding before and after samples were grouped by length; None when they were not.
    """

    micro_batches: Iterable[Any]
    weight: float | Mapping[str, float] | None = None
    whole: Any = None
    padding: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batches, Iterable) or isinstance(self.micro_batches, _NO_LISTS):
            raise ArgumentError(
                f"LogicalBatch was given a {type(self.micro_batches).__name__}; it takes a list or an iterator of "
                f"micro-batches: LogicalBatch([first, second])."
            )
        for weight in (self.total_weights or {}).values():
            checked_weight(weight, "LogicalBatch.weight is {}")

    def __repr__(self) -> str:
        """How many micro-batches and their weight, and not all of their numbers."""
        count = len(self.micro_batches) if isinstance(self.micro_batches, Sized) else "an iterator of"
        return f"LogicalBatch({count} micro-batch{'' if count == 1 else 'es'}, weight={self.weight})"

    @property
    def total_weights(self) -> Weights | None:
        """The weight by term, as a ``Weigher`` names them."""
        if self.weight is None:
            return None
        return {**self.weight} if isinstance(self.weight, Mapping) else {None: self.weight}


class Piece(NamedTuple):
    """One micro-batch with its weight.

    Attributes:
        micro_batch: What ``loss_fn`` gets.
        num_samples: Its length; 0 when only its loss knows.
        weights: By term of the loss.
        idle: It counts nothing, and runs only because other ranks have one more.
    """

    micro_batch: Any
    num_samples: int
    weights: Weights
    idle: bool = False


class Part(NamedTuple):
    """What a process has to do with the whole batch, when several ranks make one step of it.

    Attributes:
        num_micro_batches: Over all ranks; None when only the end of the iterator tells.
        num_samples: Over all ranks; 0 when that is not known before the end.
        has_constants: Whether terms that count once in a step count here.
        scale: What a loss is multiplied by, because what sums the gradients over the ranks divides by as much.
        summed_inside: Gradients are summed over ranks inside backward. Then every micro-batch needs a backward, and
            what is corrected afterwards must be divided by the same number on all ranks before.
        is_joined: Ranks get parts of their gradients from the losses of others inside backward, with the same need.
        first_sample: Place of the first sample of this process in the whole batch, which is that of the ranks in order.
        seed: Of dropout by sample, the same on all ranks; None: this process is by itself.
    """

    num_micro_batches: int | None
    num_samples: int
    has_constants: bool = True
    scale: float = 1.0
    summed_inside: bool = False
    is_joined: bool = False
    first_sample: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class Pieces:
    """The micro-batches of one step, in order.

    Attributes:
        pieces: Weighed micro-batches; may be read only once.
        count: How many there are; None when only the end of the iterator tells.
        totals: Weight of the whole batch by term; None when it is not known before the end.
        padding: See ``LogicalBatch``.
        over_ranks: What they are of the batch, when other ranks have the rest.
    """

    pieces: Iterable[Piece]
    count: int | None
    totals: Weights | None
    padding: tuple[float, float] | None = None
    over_ranks: Part | None = None

    @property
    def part(self) -> Part:
        """What these micro-batches are of the whole batch: all of it, unless other ranks have some too."""
        return self.over_ranks or Part(self.count, self.num_samples)

    @property
    def num_samples(self) -> int:
        """How many samples there are; 0 when that is not known before the end."""
        return sum(piece.num_samples for piece in self.pieces) if isinstance(self.pieces, list) else 0


def pieces_of(
    batch: Any, micro_batch_size: int | None, options: StepOptions, weigher: Weigher, room: Room = PLAIN
) -> Pieces:
    """Cut and weigh a batch.

    Args:
        batch: What a step gets: a batch, a list of samples with ``collate``, or a ``LogicalBatch``.
        micro_batch_size: Samples in one micro-batch, at most; None: the whole batch at once.
        options: Of them ``collate`` and what goes with it, ``split`` and ``batch_dims``.
        weigher: The option ``weight``.
        room: What the micro-batches must respect.

    Raises:
        BatchError: The batch cannot be cut.
        LossError: A weight is no number, negative or not finite, or they do not add up.
    """
    if isinstance(batch, LogicalBatch):
        return _of_logical(batch, options, weigher)
    if options.split is not None:
        return _of_logical(_split(batch, micro_batch_size, options), options, weigher)
    padding = None
    if options.collate is not None:
        collation = collation_of(batch, micro_batch_size, options, room)
        parts, padding = collation.micro_batches(batch), collation.padding
    else:
        parts = _cut(batch, micro_batch_size, options, room.smallest)
    weights = weigher.weigh(parts)
    weighed = [Piece(*part, w) for part, w in zip(parts, weights, strict=True)]
    return Pieces(weighed, len(parts), _added(weights), padding=padding)


def read_to_the_end(pieces: Pieces) -> Pieces:
    """The same micro-batches, all of them there: then it is known how many there are and what they weigh."""
    if isinstance(pieces.pieces, list):
        return pieces
    found = list(pieces.pieces)
    totals = pieces.totals or _added([piece.weights for piece in found])
    return replace(pieces, pieces=found, count=len(found), totals=totals)


def _cut(batch: Any, micro_batch_size: int | None, options: StepOptions, smallest: int) -> list[tuple[Any, int]]:
    layout = lay_out(batch, options.batch_dims)
    sizes = micro_batch_sizes(layout.num_samples, micro_batch_size or layout.num_samples, smallest)
    if len(sizes) == 1:
        return [(batch, layout.num_samples)]
    return [(layout.cut(start, length), length) for start, length in spans(sizes)]


def pieces_at(batch: Any, places: Iterable[tuple[int, int]], options: StepOptions, weigher: Weigher) -> list[Piece]:
    """Chosen micro-batches of a batch that we can cut, by their starts and lengths."""
    layout = lay_out(batch, options.batch_dims)
    parts = [(layout.cut(start, length), length) for start, length in places]
    return [Piece(*part, w) for part, w in zip(parts, weigher.weigh(parts), strict=True)]


def num_samples_of(batch: Any, options: StepOptions) -> int:
    """Samples in a batch that is not cut yet.

    Raises:
        BatchError: It has none, or they cannot be counted.
    """
    if options.collate is None:
        return lay_out(batch, options.batch_dims).num_samples
    check_list_of_samples(batch)
    return len(batch)


def _split(batch: Any, micro_batch_size: int | None, options: StepOptions) -> LogicalBatch:
    if micro_batch_size is None:
        raise BatchError("split= cuts a batch into micro-batches of micro_batch_size samples; give micro_batch_size=.")
    found = options.split(batch, micro_batch_size)  # pyright: ignore[reportOptionalCall]
    if not isinstance(found, LogicalBatch | Iterable) or isinstance(found, _NO_LISTS):
        raise BatchError(
            f"split returned a {type(found).__name__}; it returns a list of micro-batches or a LogicalBatch."
        )
    return found if isinstance(found, LogicalBatch) else LogicalBatch(list(found))


def _of_logical(batch: LogicalBatch, options: StepOptions, weigher: Weigher) -> Pieces:
    given = batch.total_weights
    if given is not None and set(given) != set(weigher.by_term):
        raise LossError(
            f"LogicalBatch.weight has {_terms(given)}, but the step's weight has {_terms(weigher.by_term)}."
        )
    if not isinstance(batch.micro_batches, Sequence):
        count = len(batch.micro_batches) if isinstance(batch.micro_batches, Sized) else None
        return Pieces(_weighed_as_they_come(batch, options, weigher), count, given, padding=batch.padding)
    if not batch.micro_batches:
        raise EmptyBatchError("The batch is empty: a LogicalBatch of 0 micro-batches.")
    parts = [(micro_batch, _num_samples(micro_batch, options, weigher)) for micro_batch in batch.micro_batches]
    weights = weigher.weigh(parts)
    check_adds_up(weights, given)
    weighed = [Piece(*part, w) for part, w in zip(parts, weights, strict=True)]
    return Pieces(weighed, len(parts), _added(weights), padding=batch.padding)


def _weighed_as_they_come(batch: LogicalBatch, options: StepOptions, weigher: Weigher) -> Iterator[Piece]:
    so_far: list[Weights] = []
    for micro_batch in batch.micro_batches:
        num_samples = _num_samples(micro_batch, options, weigher)
        so_far += weigher.weigh([(micro_batch, num_samples)])
        yield Piece(micro_batch, num_samples, so_far[-1])
    if not so_far:
        raise EmptyBatchError("The batch is empty: a LogicalBatch of 0 micro-batches.")
    check_adds_up(so_far, batch.total_weights)


def _num_samples(micro_batch: Any, options: StepOptions, weigher: Weigher) -> int:
    try:
        return lay_out(micro_batch, options.batch_dims).num_samples
    except BatchError as error:
        if weigher.counts_samples:
            raise BatchError(
                f"The samples of a micro-batch cannot be counted. {error} Or give weight=, a function."
            ) from error
        return 0


def check_adds_up(weights: Sequence[Weights], totals: Weights | None) -> None:
    """Raise ``LossError`` unless the weights of the micro-batches add up to the total, term by term."""
    for term, total in (totals or {}).items():
        added = sum(weight[term] for weight in weights)
        if abs(added - total) > 1e-6 * abs(total):
            raise LossError(
                f"The weights of the micro-batches add up to {added:g}{for_term(term)}, but that of the whole batch is "
                f"{total:g}. A weight is what the mean is over; it must add up: weight(a) + weight(b) == weight(both)."
            )


def _added(weights: Sequence[Weights]) -> Weights:
    return {term: sum(weight[term] for weight in weights) for term in weights[0]}


def _terms(weights: Mapping[Any, Any]) -> str:
    return "one weight" if None in weights else f"weights for {sorted(weights)}"
