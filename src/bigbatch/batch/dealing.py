"""Deal the samples of a batch to ranks, so that all of them have about the same to do: pure numbers, without torch.

A step is as fast as its slowest rank, and a share of as many samples may be one of many more tokens. Evening out the
tokens (the longest sample to the rank that has least, and so on) is not enough: then each rank has samples of all
lengths, and fewer to put together with any of them, so that much is padded. So the sorted samples are cut into
neighbours of equal cost: a rank has samples of like length, few long ones or many short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bigbatch.batch.lengths import Bound, cheapest_cuts, padding_rule

_NEAR = 0.005
"""Share of the most costly rank to which the search for it is exact; a sample is often more. It begins so near to an
equal part of the batch, because that is about where it ends."""

_Places = list[list[int]]
"""By rank: places in a batch, ascending."""


@dataclass(frozen=True)
class Deal:
    """What is known of the samples when they are dealt; all ranks know the same, and deal alike.

    >>> Deal([9, 1, 1, 9, 1, 1, 1, 1, 1]).shares(range(9), num_ranks=3)
    [[3], [0], [1, 2, 4, 5, 6, 7, 8]]
    >>> Deal().shares(range(9), num_ranks=3)
    [[0, 1, 2], [3, 4, 5], [6, 7, 8]]

    Attributes:
        lengths: Of all samples of the data; None: ranks get as many samples, neighbours in the batch.
        max_tokens: Padded tokens of a micro-batch; None: a rank may have all of its share in one.
        pad_to_multiple_of: Lengths are padded to a multiple of this.
    """

    lengths: Sequence[int] | None = None
    max_tokens: int | None = None
    pad_to_multiple_of: int | None = None

    def shares(self, indices: Sequence[int], num_ranks: int) -> _Places:
        """Places in the batch of the samples of each rank.

        Each place is in one share. Where there are fewer samples than ranks, the last ranks get none.

        Args:
            indices: Of the samples of the batch, in the data.
            num_ranks: That share it.
        """
        if self.lengths is None or num_ranks == 1:
            return _as_many(len(indices), num_ranks)
        padded = padding_rule(self.pad_to_multiple_of, few=False)
        return dealt([padded(self.lengths[i]) for i in indices], num_ranks, self.max_tokens)


def _as_many(num_samples: int, num_ranks: int) -> _Places:
    # Rounded up: of a batch that is smaller than the number of ranks, the first rank gets a sample.
    ends = [-(-num_samples * rank // num_ranks) for rank in range(num_ranks + 1)]
    return [list(range(first, end)) for first, end in pairwise(ends)]


def dealt(lengths: Sequence[int], num_ranks: int, max_tokens: int | None = None) -> _Places:
    """Places of the samples of each rank, the longest on the first, so that the most costly share costs least.

    The cost of a share is that of its best cut into micro-batches, with the overhead of each; see ``best_cut``. It
    grows with each sample, so for a given limit the shares are filled one after another, and the smallest limit for
    which there are ranks enough is found by halving.
    """
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    ascending = [lengths[place] for place in order]
    most = max_tokens or max(-(-sum(ascending) // num_ranks), 1)
    bound = Bound(max(most, ascending[-1]), len(ascending))

    def shares_within(limit: float) -> list[range] | None:
        return _filled(ascending, bound, limit, num_ranks)

    shares = _smallest_limit(shares_within, at_least=_cost(ascending, bound) / num_ranks)
    found = [sorted(order[at] for at in share) for share in reversed(shares)]
    return found + [[] for _ in range(num_ranks - len(found))]


def _smallest_limit(shares_within: Callable[[float], list[range] | None], at_least: float) -> list[range]:
    low, above = at_least, _NEAR
    while (found := shares_within(high := at_least * (1 + above))) is None:
        low, above = high, 2 * above
    while high - low > _NEAR * high:
        middle = (low + high) / 2
        shares = shares_within(middle)
        if shares is None:
            low = middle
        else:
            high, found = middle, shares
    return found


def _filled(ascending: Sequence[int], bound: Bound, limit: float, num_ranks: int) -> list[range] | None:
    """Shares of a cost up to the limit, each as long as may be; None when there are not ranks enough."""
    shares, start = [], 0
    while start < len(ascending):
        if len(shares) == num_ranks:
            return None
        end = start
        for cost, _ in cheapest_cuts(ascending, bound, start):
            if cost > limit:
                break
            end += 1
        if end == start:
            return None  # a sample alone costs more
        shares.append(range(start, end))
        start = end
    return shares


def _cost(ascending: Sequence[int], bound: Bound) -> float:
    *_, (cost, _) = cheapest_cuts(ascending, bound)
    return cost
