"""Make micro-batches of samples: in their order, or grouped by length and padded to what was asked for."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bigbatch.batch.lengths import Grouping, bound_of, check_fits, grouped, lengths_of, padding_rule
from bigbatch.batch.sizes import micro_batch_sizes, spans
from bigbatch.errors import BatchError, EmptyBatchError, OptionError, warn
from bigbatch.values import Plan, StepOptions

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Room:
    """What the micro-batches of a step must respect, beside their size.

    Attributes:
        smallest: Samples in one, at least, where they are not grouped; see ``micro_batch_sizes``.
        plan: That the micro-batch size comes from.
        few_lengths: The model is compiled, and each shape takes time.
    """

    smallest: int = 1
    plan: Plan | None = None
    few_lengths: bool = False


PLAIN = Room()
"""Of a model that asks for nothing."""


@dataclass(frozen=True)
class Collation:
    """Samples of each micro-batch, and how they are collated.

    Attributes:
        indices: Of the samples of each micro-batch.
        collates: One for each micro-batch.
        padding: See ``Grouping``; None when samples are not grouped.
    """

    indices: Sequence[Sequence[int]]
    collates: Sequence[Collate]
    padding: tuple[float, float] | None = None

    def micro_batches(self, samples: Sequence[Any]) -> list[tuple[Any, int]]:
        """All micro-batches with their numbers of samples."""
        return [
            (collate([samples[i] for i in chosen]), len(chosen))
            for chosen, collate in zip(self.indices, self.collates, strict=True)
        ]


def collation_of(samples: Sequence[Any], micro_batch_size: int | None, options: StepOptions, room: Room) -> Collation:
    """Choose the micro-batches of a list of samples.

    Args:
        samples: The batch.
        micro_batch_size: See ``bound_of``; None and no ``max_tokens``: the whole batch at once.
        options: Of them ``collate``, ``length``, ``max_tokens`` and ``pad_to_multiple_of``.
        room: What else there is to respect.

    Raises:
        BatchError: The batch is no list of samples, is empty, or has a sample without a length.
        LengthError: A sample is longer than ``max_tokens``.
    """
    check_list_of_samples(samples)
    # The whole batch at once has nothing to group.
    if options.length is not None and not (micro_batch_size is None and options.max_tokens is None):
        return by_length(lengths_of(samples, options.length), micro_batch_size, options, room)
    return in_order(len(samples), micro_batch_size, options, room)


def in_order(num_samples: int, micro_batch_size: int | None, options: StepOptions, room: Room = PLAIN) -> Collation:
    """Micro-batches of samples as they come."""
    sizes = micro_batch_sizes(num_samples, micro_batch_size or num_samples, room.smallest)
    indices = [range(start, start + length) for start, length in spans(sizes)]
    return Collation(indices, [_padding_to(options.collate, options.pad_to_multiple_of)] * len(sizes))


def by_length(lengths: list[int], micro_batch_size: int | None, options: StepOptions, room: Room = PLAIN) -> Collation:
    """Micro-batches of samples of these lengths, grouped.

    Raises:
        LengthError: One is longer than ``max_tokens``.
    """
    few = room.few_lengths and _is_told(options.collate)
    padded = padding_rule(options.pad_to_multiple_of, few=few)
    bound = bound_of(padded(max(lengths)), len(lengths), micro_batch_size, options.max_tokens, room.plan)
    by = "the few lengths of a compiled model" if few else f"pad_to_multiple_of={options.pad_to_multiple_of}"
    check_fits(lengths, options.max_tokens, padded, by)
    found: Grouping = grouped(lengths, bound, padded)
    # Of one of few lengths: a multiple of that length itself, which is all that a collate can be told.
    multiples = found.padded_lengths if few else [options.pad_to_multiple_of] * len(found.groups)
    return Collation(found.groups, [_padding_to(options.collate, n) for n in multiples], found.padding)


def warn_where_nothing_bounds(batch: Any, micro_batch_size: int | None, options: StepOptions) -> None:
    """Warn where ``length=`` has nothing to group a list of samples by, so that it is one micro-batch."""
    is_bounded = micro_batch_size is not None or options.max_tokens is not None
    if options.length is not None and not is_bounded and isinstance(batch, Sequence):
        warn(
            "length= groups samples under a bound, and none was given: the whole batch is one micro-batch, padded to "
            "its longest sample. Give max_tokens= or micro_batch_size= (or a Step a plan= or memory_budget=)."
        )


def longest_of(samples: Sequence[Any], options: StepOptions) -> int:
    """The padded length of the longest sample."""
    check_list_of_samples(samples)
    return padding_rule(options.pad_to_multiple_of, few=False)(max(lengths_of(samples, options.length)))  # pyright: ignore


def samples_for(batch: Sequence[Any], num_samples: int, options: StepOptions) -> list[Any]:
    """So many samples to plan with: those of the batch again and again or, with ``length``, its longest."""
    if options.length is not None:
        lengths = lengths_of(batch, options.length)
        return [batch[lengths.index(max(lengths))]] * num_samples
    return [batch[i % len(batch)] for i in range(num_samples)]


def collated(samples: Sequence[Any], options: StepOptions) -> Any:
    """One micro-batch of all of them, padded as in a step."""
    return _padding_to(options.collate, options.pad_to_multiple_of)(list(samples))


def check_list_of_samples(batch: Any) -> None:
    """Raise ``BatchError`` unless it is a list, and ``EmptyBatchError`` when there is no sample in it."""
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
        raise BatchError(f"With collate= a batch is a list of samples, but this is a {type(batch).__name__}.")
    if not batch:
        raise EmptyBatchError("The batch is empty: a list of 0 samples.")


def _padding_to(collate: Any, multiple: int | None) -> Collate:
    """The collate that pads to a multiple, told as data collators of transformers are: by ``pad_to_multiple_of``.

    Raises:
        OptionError: It cannot be told.
    """
    if multiple is None:
        return collate
    if hasattr(collate, "pad_to_multiple_of"):
        told = copy.copy(collate)
        told.pad_to_multiple_of = multiple
        return told
    if not _takes_multiple(collate):
        raise OptionError(
            f"pad_to_multiple_of={multiple}, but collate cannot be told: it has no attribute and no parameter of that "
            f"name. Write def collate(samples, pad_to_multiple_of=1), or leave the option out."
        )
    return partial(collate, pad_to_multiple_of=multiple)


def _is_told(collate: Any) -> bool:
    """Whether a collate can be told what to pad to; a warning says so where it cannot."""
    if hasattr(collate, "pad_to_multiple_of") or _takes_multiple(collate):
        return True
    warn(
        "The model is compiled, and collate= cannot be told what to pad to, so micro-batches have many lengths and the "
        "model may be compiled again for some. Write def collate(samples, pad_to_multiple_of=1)."
    )
    return False


def _takes_multiple(collate: Any) -> bool:
    try:
        return "pad_to_multiple_of" in inspect.signature(collate).parameters
    except (TypeError, ValueError):  # a builtin has none
        return False
