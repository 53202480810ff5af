"""Sizes of micro-batches: pure numbers, without torch, so that a plan is made where no torch is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator


def micro_batch_sizes(num_samples: int, micro_batch_size: int, smallest: int = 1) -> list[int]:
    """Sizes of the micro-batches: full ones and a rest.

    A rest below ``smallest`` is never made: then the cut is as equal as possible, with as many micro-batches.

    >>> micro_batch_sizes(10, 4), micro_batch_sizes(9, 4, smallest=2), micro_batch_sizes(3, 8)
    ([4, 4, 2], [3, 3, 3], [3])

    Args:
        num_samples: Samples in the batch.
        micro_batch_size: Samples in one micro-batch, at most.
        smallest: Samples in one micro-batch, at least, where that can be had; 2 for BatchNorm, which refuses one
            value per channel.
    """
    full, rest = divmod(num_samples, micro_batch_size)
    if rest == 0 or full == 0 or rest >= smallest:
        return [micro_batch_size] * full + [rest] * (rest > 0)
    size, larger = divmod(num_samples, full + 1)
    return [size + 1] * larger + [size] * (full + 1 - larger)


def part_sizes(num_samples: int, smallest: int = 1) -> list[int]:
    """Sizes of two or more micro-batches, ascending, one for each number of them; none with too small a rest.

    >>> part_sizes(9), part_sizes(9, smallest=2)
    ([1, 2, 3, 5], [3, 5])
    """
    sizes = {math.ceil(num_samples / count) for count in range(2, num_samples + 1)}
    return sorted(size for size in sizes if min(micro_batch_sizes(num_samples, size, smallest)) >= smallest)


def smallest_without_single(num_samples: int) -> int:
    """The smallest micro-batch size that leaves no micro-batch of one sample.

    >>> smallest_without_single(8), smallest_without_single(9)
    (2, 3)
    """
    sizes = range(2, max(num_samples, 2) + 1)
    return next((size for size in sizes if min(micro_batch_sizes(num_samples, size, 2), default=2) >= 2), 2)


def sizes_without_rest_of_one(num_samples: int) -> Iterator[int]:
    """Micro-batch sizes that cut full ones and a rest, none of one sample, ascending.

    >>> list(sizes_without_rest_of_one(7)), list(sizes_without_rest_of_one(3))
    ([4, 5], [])
    """
    return (size for size in range(2, num_samples) if num_samples % size != 1)


def spans(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Start and length of each micro-batch."""
    start = 0
    for size in sizes:
        yield start, size
        start += size
