"""Group the samples of a batch by length, so that micro-batches hold little padding: pure numbers, without torch.

A sum does not depend on its order, so inside one logical batch samples may stand in any micro-batch. Putting those of
like length together is the bucketing of sequence models; here it stays inside one optimizer step, so that it changes
what is padded and not what is learned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bigbatch.batch.sizes import micro_batch_sizes, spans
from bigbatch.errors import BatchError, LengthError
from bigbatch.footprint import Footprint
from bigbatch.values import Plan

_OVERHEAD = 1 / 16
"""Of the bound: what a micro-batch costs beside its tokens. Without it each length would get micro-batches of its own,
and a device that is half idle takes as long as a full one."""


@dataclass(frozen=True)
class Bound:
    """What a micro-batch may hold.

    Attributes:
        tokens: Its samples times its longest padded length, at most; where there is room by length, about.
        samples: At most.
        room: Samples of a padded length that fit, in the place of ``tokens``.
    """

    tokens: int
    samples: int
    room: Callable[[int], float] | None = None

    @property
    def overhead(self) -> float:
        """What a micro-batch costs beside its padded tokens, in tokens."""
        return self.tokens * _OVERHEAD

    def most(self, length: int) -> int:
        """Samples of this padded length in one micro-batch, at most; 1 for one that is too long."""
        if not length:
            return self.samples
        fits = self.tokens // length if self.room is None else self.room(length)
        return max(int(min(self.samples, fits)), 1)


@dataclass(frozen=True)
class Grouping:
    """Which samples make a micro-batch.

    Attributes:
        groups: Indices of the samples of each micro-batch, ascending; the longest samples come first, so that what
            does not fit shows itself before anything was computed.
        padded_lengths: Of each micro-batch.
        padding: Share of the padded tokens that stand for nothing: as the samples came, cut under the same bound, and
            in these groups.
    """

    groups: tuple[tuple[int, ...], ...]
    padded_lengths: tuple[int, ...]
    padding: tuple[float, float]


def lengths_of(samples: Sequence[Any], length: Callable[[Any], Any]) -> list[int]:
    """The length of each sample.

    Raises:
        BatchError: One is no whole number, or negative.
    """
    return [_checked(length(sample), index) for index, sample in enumerate(samples)]


def _checked(found: Any, index: int) -> int:
    try:
        number = operator.index(found)
    except TypeError:
        number = -1
    if number < 0 or isinstance(found, bool):
        raise BatchError(
            f"length returned {found!r} ({type(found).__name__}) for sample {index}; it is a whole number, the tokens "
            f"of one sample: length=lambda sample: len(sample['input_ids'])."
        )
    return number


def bound_of(
    longest: int, num_samples: int, micro_batch_size: int | None, max_tokens: int | None, plan: Plan | None
) -> Bound:
    """What a micro-batch may hold.

    ``micro_batch_size`` beside ``max_tokens`` is the most samples. Alone, or planned, it speaks of the longest samples:
    a micro-batch may hold as many tokens as so many of them, which is what the cut without groups has too. Memory that
    grows with the square of a length, as that of attention does, is inside this bound as well: at no more tokens
    and no greater length there are no more of their products. A plan with a footprint knows the bytes: it has room for
    more short samples, and for fewer of those that are longer than what it was made for.

    Args:
        longest: Padded length of the longest sample of the batch.
        num_samples: Of the batch.
        micro_batch_size: Samples, at most; None: all.
        max_tokens: As given.
        plan: That the micro-batch size comes from; None, or without ``Plan.max_tokens``: not planned with lengths.
    """
    size = micro_batch_size or num_samples
    if plan is None or plan.max_tokens is None:
        if max_tokens is not None:
            return Bound(max_tokens, size)
        return Bound(max(size * longest, longest), num_samples)
    planned_length = max(plan.max_tokens // plan.micro_batch_size, 1)
    tokens = max(size * planned_length, longest)
    tokens = tokens if max_tokens is None else min(tokens, max_tokens)
    if plan.footprint is None:
        return Bound(tokens, num_samples)
    # Where memory ran out nevertheless, the size is a part of the planned one, and so is the room.
    share = min(size / plan.micro_batch_size, 1.0)
    return Bound(tokens, num_samples, partial(_room, plan.footprint, share, max_tokens))


def _room(footprint: Footprint, share: float, max_tokens: int | None, length: int) -> float:
    fits = share * footprint.most(length)
    return fits if max_tokens is None else min(fits, max_tokens // length)


def check_fits(
    lengths: Sequence[int], max_tokens: int | None, padded: Callable[[int], int] = int, by: str = ""
) -> None:
    """Raise ``LengthError`` for a sample that is longer than a micro-batch may be.

    Args:
        lengths: Of each sample.
        max_tokens: Of a micro-batch.
        padded: What a length is padded to.
        by: What pads it, in words.
    """
    if max_tokens is None or padded(longest := max(lengths)) <= max_tokens:
        return
    index, length = next((i, length) for i, length in enumerate(lengths) if padded(length) > max_tokens)

    def shown(length: int) -> str:
        return f"{length}" if padded(length) == length else f"{length}, padded to {padded(length)}{by and f' by {by}'}"

    more = "" if length == longest else f" (The longest of the batch has {shown(longest)}.)"
    raise LengthError(
        f"Sample {index} of the batch has length {shown(length)}, but max_tokens={max_tokens} is all that a "
        f"micro-batch may hold. Raise max_tokens to {padded(longest)}, or cut or leave out longer samples.{more}",
        index=index,
        length=padded(length),
        max_tokens=max_tokens,
    )


def grouped(lengths: Sequence[int], bound: Bound, padded: Callable[[int], int] = int) -> Grouping:
    """The groups of least padded tokens, with an overhead for each micro-batch.

    Args:
        lengths: Of the samples.
        bound: Of a micro-batch.
        padded: What a length is padded to when it is the longest of its micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])  # stable: reproducible among equals
    ascending = [padded(lengths[index]) for index in order]
    sizes = best_cut(ascending, bound)
    ends = [start + size for start, size in spans(sizes)]
    groups = [tuple(sorted(order[end - size : end])) for end, size in zip(ends, sizes, strict=True)]
    longest = [ascending[end - 1] for end in ends]
    after = sum(size * length for size, length in zip(sizes, longest, strict=True))
    before = _padded_tokens([padded(length) for length in lengths], bound.most(ascending[-1]))
    real = sum(lengths)
    return Grouping(tuple(groups[::-1]), tuple(longest[::-1]), (_share(before, real), _share(after, real)))


def best_cut(ascending: Sequence[int], bound: Bound) -> list[int]:
    r"""Sizes of the micro-batches of least cost, for padded lengths in ascending order.

    With lengths $l_1 \le \dots \le l_n$ and the overhead $o$ the least cost of the first $j$ samples is

    $$ C_j = \min_i \; C_i + o + (j - i)\, l_j, $$

    over the $i$ for which the samples $i + 1$ to $j$ are within the bound. No other way to put samples together costs
    less: of any groups, give the longest samples to the group of the longest, and so on, and no group gets longer. An
    $i$ that is beaten by a later one stays beaten, because $l_j$ only grows; so the search goes on from the last.
    """
    starts = [first for _, first in cheapest_cuts(ascending, bound)]
    sizes, end = [], len(ascending)
    while end:
        sizes.append(end - starts[end - 1])
        end = starts[end - 1]
    return sizes[::-1]


def cheapest_cuts(ascending: Sequence[int], bound: Bound, start: int = 0) -> Iterator[tuple[float, int]]:
    """For each end after ``start``: the least cost of the samples between, and where their last micro-batch begins."""
    costs, first = [0.0], 0
    for j in range(1, len(ascending) - start + 1):
        length = ascending[start + j - 1]
        first = max(first, j - bound.most(length))
        candidates = [costs[i] - i * length for i in range(first, j)]
        cheapest = min(candidates)
        first += candidates.index(cheapest)
        costs.append(cheapest + j * length + bound.overhead)
        yield costs[-1], start + first


def _padded_tokens(lengths: Sequence[int], micro_batch_size: int) -> int:
    """Padded tokens of the samples in the order in which they came."""
    sizes = micro_batch_sizes(len(lengths), micro_batch_size)
    return sum(size * max(lengths[start : start + size]) for start, size in spans(sizes))


def _share(padded_tokens: int, real_tokens: int) -> float:
    return 1 - real_tokens / padded_tokens if padded_tokens else 0.0


def padding_rule(multiple: int | None, *, few: bool) -> Callable[[int], int]:
    """What a length is padded to.

    >>> [padding_rule(8, few=False)(n) for n in (1, 8, 9)], [padding_rule(None, few=True)(n) for n in (3, 33, 49, 65)]
    ([8, 8, 16], [32, 48, 64, 96])

    Args:
        multiple: To a multiple of this.
        few: To one of few lengths, two for each doubling, so that a compiled model sees few shapes: 9 up to 512.
    """
    step = multiple or 1

    def padded(length: int) -> int:
        if few:
            length = _one_of_few(length)
        return -(-length // step) * step

    return padded


def _one_of_few(length: int) -> int:
    power = max(32, 1 << (length - 1).bit_length())  # the next power of two
    return power * 3 // 4 if power > 32 and length <= power * 3 // 4 else power
