"""How evenly the samples of a batch are dealt to ranks, and how much the slowest rank pads: counted, not timed.

See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from bigbatch.batch.dealing import Deal, dealt
from bigbatch.batch.lengths import Bound, best_cut
from bigbatch.batch.sizes import spans
from bigbatch.tasks.text import Paragraphs, text

Places = list[list[int]]
MAX_TOKENS = text().max_tokens


def by_count(lengths: Sequence[int], num_ranks: int) -> Places:
    return Deal().shares(range(len(lengths)), num_ranks)


def to_the_least_loaded(lengths: Sequence[int], num_ranks: int) -> Places:
    """The longest sample first, each to the rank with the fewest tokens so far."""
    shares: Places = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        rank = loads.index(min(loads))
        shares[rank].append(place)
        loads[rank] += lengths[place]
    return shares


def by_length(lengths: Sequence[int], num_ranks: int) -> Places:
    return dealt(lengths, num_ranks, MAX_TOKENS)


WAYS: dict[str, Callable[[Sequence[int], int], Places]] = {
    "by count": by_count,
    "least loaded": to_the_least_loaded,
    "by length": by_length,
}


def cost_of(lengths: Sequence[int], bound: Bound) -> float:
    """Padded tokens after the best cut, with the overhead of each micro-batch."""
    ascending = sorted(lengths)
    sizes = best_cut(ascending, bound)
    return sum(n * ascending[start + n - 1] + bound.overhead for start, n in spans(sizes))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args(arguments)
    data, bound = Paragraphs(train=True).lengths, Bound(MAX_TOKENS or 0, options.batch_size)
    print(f"text task, batch {options.batch_size}, micro-batches of {MAX_TOKENS} tokens, {options.batches} batches")
    print(f"{'ranks':>5} {'dealt':14} {'max / mean':>11} {'max / ideal':>12} {'worst':>6} {'ms a batch':>11}")
    for num_ranks in (2, 4, 8):
        for name, way in WAYS.items():
            draw, uneven, slower, seconds = random.Random(0), [], [], []
            for _ in range(options.batches):
                lengths = draw.sample(data, options.batch_size)
                before = time.perf_counter()
                shares = way(lengths, num_ranks)
                seconds.append(time.perf_counter() - before)
                costs = [cost_of([lengths[place] for place in share], bound) for share in shares if share]
                uneven.append(max(costs) * num_ranks / sum(costs))
                slower.append(max(costs) * num_ranks / cost_of(lengths, bound))
            figures = f"{statistics.mean(uneven):11.3f} {statistics.mean(slower):12.3f} {max(slower):6.2f}"
            print(f"{num_ranks:5} {name:14} {figures} {1e3 * statistics.median(seconds):11.2f}")
    print("ideal: an equal part of the whole batch as one process cuts it.")


if __name__ == "__main__":
    main()
