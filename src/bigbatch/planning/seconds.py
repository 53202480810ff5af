"""How long a step takes: micro-batches of each size without recompute, and what each block costs when it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bigbatch.planning.chain import Chain
from bigbatch.planning.costs import Line, MemoryProfile, Part

_SECONDS_PER_BYTE = 1e-13
"""No recompute is faster than writing what it saves at 10 TB/s. So one that is of no use always costs something."""

_UNKNOWN_SECONDS = 1e-9
"""Added to each micro-batch where sizes were not timed: at equal time for each sample, fewer of them are better."""

_BACKWARD_PER_FORWARD = 2
"""A backward has about twice the operations of its forward: one product for the input, one for the weight."""


def micro_seconds(profile: MemoryProfile, num_samples: int) -> float:
    """Seconds of one forward-backward without recompute.

    Between timed sizes this is linear. Beyond them the last slope goes on, but never downwards; below them the first
    one does, but a sample is never faster than in the smallest size that was timed.
    """
    timed = sorted(dict(profile.micro_seconds).items())
    if not timed:
        return _UNKNOWN_SECONDS + _forward_seconds(profile, num_samples) * (1 + _BACKWARD_PER_FORWARD)
    smallest, seconds = timed[0]
    share = seconds * num_samples / smallest
    if len(timed) == 1:
        return _UNKNOWN_SECONDS + share
    index = next((i for i in range(1, len(timed)) if num_samples <= timed[i][0]), len(timed) - 1)
    (size, seconds), (other_size, other_seconds) = timed[index - 1], timed[index]
    slope = (other_seconds - seconds) / (other_size - size)
    if num_samples > other_size:
        return other_seconds + max(0.0, slope) * (num_samples - other_size)
    line = seconds + slope * (num_samples - size)
    return max(line, share) if num_samples < smallest else line


def _forward_seconds(profile: MemoryProfile, num_samples: int) -> float:
    return sum(max(0.0, slot.forward_seconds.at(num_samples)) for slot in profile.slots)


def seconds_without_recompute(profile: MemoryProfile, sizes: Sequence[int]) -> float:
    """Seconds of a step of micro-batches of these sizes that recomputes nothing."""
    counted = Counter(sizes).items()
    seconds = profile.update_seconds + sum(count * micro_seconds(profile, size) for size, count in counted)
    if profile.loss_bytes and len(sizes) > 1:  # a loss of the whole batch needs all forwards first
        seconds += sum(count * _forward_seconds(profile, size) for size, count in counted)
        seconds -= _forward_seconds(profile, sizes[0]) if profile.keeps_first else 0.0
    return seconds


def recompute_seconds(chain: Chain, sizes: Sequence[int]) -> tuple[list[float], list[float]]:
    """By slot, the seconds that recompute adds to a step: of a whole second forward, and of one up to its last save."""
    forward, again = [0.0] * len(chain.slots), [0.0] * len(chain.slots)
    for size, count in Counter(sizes).items():
        for position, slot in enumerate(chain.slots):
            least = _least(chain.written[position], size) if slot.name is not None else 0.0
            forward[position] += count * max(least, slot.forward_seconds.at(size))
            again[position] += count * max(least, slot.recompute_seconds.at(size))
    return forward, again


def part_seconds(chain: Chain, sizes: Sequence[int]) -> list[list[float]]:
    """By slot, the seconds that recomputing each of its parts adds to a step."""
    counted = Counter(sizes).items()

    def seconds_of(part: Part, written: Line) -> float:
        return sum(count * max(_least(written, size), part.recompute_seconds.at(size)) for size, count in counted)

    return [
        [seconds_of(part, line) for part, line in zip(slot.parts, lines, strict=True)]
        for slot, lines in zip(chain.slots, chain.parts_written, strict=True)
    ]


def _least(written: Line, num_samples: int) -> float:
    return _SECONDS_PER_BYTE * (1 + max(0.0, written.at(num_samples)))
