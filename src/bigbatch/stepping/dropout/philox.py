"""Random bits that are a function of a key and a counter alone: the same in any order, on any device.

Philox-4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011,
https://doi.org/10.1145/2063384.2063405), which CUDA's and JAX's generators use too. Written with torch's int64
operations, whose products wrap around, so that it needs no kernel of its own; the known answers of the authors'
``kat_vectors`` are in its tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

# Counters at a time: on a processor such that what is computed with stays in its cache, on a card such that few kernels
# are queued. The first is 4 MiB of work memory, the second 64 MiB.
_AT_A_TIME = {"cpu": 1 << 16}
_AT_A_TIME_ELSEWHERE = 1 << 20


def philox(counter: Sequence[torch.Tensor | int], key: tuple[int, int]) -> list[torch.Tensor]:
    """Four words of 32 random bits for each counter.

    Args:
        counter: Four words, each an int64 tensor or a number below 2**32; they are broadcast.
        key: Two words.

    Returns:
        Four int64 tensors, each entry below 2**32.
    """
    a, b, c, d = (torch.as_tensor(word) for word in counter)
    for number in range(_ROUNDS):
        first, second = ((word + number * step) & _WORD for word, step in zip(key, _WEYL, strict=True))
        # Only what is multiplied must be a clean word: what lies above the 32 bits of the others is cut off later.
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = _mixed(high, b, first)
        c = _mixed(low, d, second)
        b, d = high, low
    return [a, b & _WORD, c, d & _WORD]


def _mixed(product: torch.Tensor, word: torch.Tensor, key: int) -> torch.Tensor:
    """The upper half of a product of two words, mixed with another word and the key."""
    mixed = product >> 32
    # In place where the shapes allow it; in the first rounds words of samples meet words of elements.
    mixed = mixed.bitwise_xor_(word) if mixed.shape == word.shape else mixed ^ word
    return mixed.bitwise_xor_(key).bitwise_and_(_WORD)


def keep_mask(
    keep: float, first: int, shape: tuple[int, int], words: tuple[int, int], key: int, device: torch.device
) -> torch.Tensor:
    """Which elements are kept, each with the probability ``keep`` (up to 2**-32) and as its own place alone says.

    Args:
        first: Number of the first sample.
        shape: Samples, and elements in each.
        words: Two more numbers below 2**32 that the mask depends on.
        key: Of 64 bits.

    Returns:
        Bool, of that ``shape``.
    """
    num_samples, num_elements = shape
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    threshold = round(keep * 2**32)
    for rows, columns in _tiles(num_samples, -(-num_elements // 4), device):
        samples = torch.arange(first + rows.start, first + rows.stop, device=device).unsqueeze(1)
        blocks = torch.arange(columns.start, columns.stop, device=device)
        found = philox((blocks, samples, *words), (key & _WORD, key >> 32 & _WORD))
        kept = torch.stack([word < threshold for word in found], dim=-1).flatten(1)
        start = 4 * columns.start
        mask[rows, start : start + kept.shape[1]] = kept[:, : num_elements - start]
    return mask


def _tiles(num_rows: int, num_columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    most = _AT_A_TIME.get(device.type, _AT_A_TIME_ELSEWHERE)
    wide = min(num_columns, most)
    tall = max(1, most // max(wide, 1))
    for row in range(0, num_rows, tall):
        for column in range(0, num_columns, wide):
            yield slice(row, min(row + tall, num_rows)), slice(column, min(column + wide, num_columns))
