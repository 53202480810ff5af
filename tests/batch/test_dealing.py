"""Samples dealt to ranks: each to one of them, about as much to do for all, and little padding on any."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbatch.batch.dealing import Deal, dealt
from bigbatch.batch.lengths import Bound, best_cut
from bigbatch.batch.sizes import spans
from bigbatch.tasks.text import Paragraphs

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=60)


def cost_of(lengths: list[int], bound: Bound) -> float:
    """Padded tokens of the best cut, and the overhead of each micro-batch."""
    ascending = sorted(lengths)
    sizes = best_cut(ascending, bound)
    return sum(n * ascending[start + n - 1] + bound.overhead for start, n in spans(sizes))


def costs_of(shares: list[list[int]], lengths: list[int], bound: Bound) -> list[float]:
    return [cost_of([lengths[place] for place in share], bound) for share in shares]


@settings(max_examples=300, deadline=None)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 12), max_tokens=st.one_of(st.none(), st.integers(1, 2000)))
def test_each_sample_is_dealt_once_and_all_deal_alike(lengths, num_ranks, max_tokens):
    """Also samples that are longer than a micro-batch may be: the step says what is wrong with them."""
    shares = dealt(lengths, num_ranks, max_tokens)

    assert len(shares) == num_ranks
    assert Counter(place for share in shares for place in share) == Counter(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    assert shares[0]
    assert shares == dealt(tuple(lengths), num_ranks, max_tokens)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=9), num_ranks=st.integers(1, 4), factor=st.floats(1, 9)
)
def test_no_cut_of_the_sorted_samples_is_more_even(lengths, num_ranks, factor):
    """Against all of them, up to what the search leaves open."""
    bound = Bound(int(factor * max(lengths)), len(lengths))
    ordered = sorted(range(len(lengths)), key=lambda place: lengths[place])
    cuts = combinations(range(1, len(lengths)), min(num_ranks, len(lengths)) - 1)
    every = ([ordered[a:b] for a, b in pairwise([0, *cut, len(lengths)])] for cut in cuts)
    best = min(max(costs_of(shares, lengths, bound)) for shares in every)

    assert max(costs_of(dealt(lengths, num_ranks, bound.tokens), lengths, bound)) <= 1.005 * best + 1e-9


def by_count(lengths: list[int], num_ranks: int) -> list[list[int]]:
    return Deal().shares(range(len(lengths)), num_ranks)


def to_the_least_loaded(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """The longest first, as one reads it everywhere."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        min(shares, key=lambda share: sum(lengths[p] for p in share)).append(place)
    return shares


@pytest.mark.parametrize(("num_ranks", "slower", "padded"), [(2, 1.05, 1.03), (4, 1.1, 1.08), (8, 1.15, 1.15)])
def test_on_real_texts_ranks_have_about_the_same_to_do(num_ranks, slower, padded):
    """Of 256 paragraphs: the slowest rank has at most 6 % more than a share of the whole batch in one process.

    Controls: as many samples for each rank, and the longest to the least loaded, which is even, but pads more.
    """
    data, draw, bound = Paragraphs(train=True).lengths, random.Random(0), Bound(8192, 256)
    found: dict[str, list[float]] = {"dealt": [], "by count": [], "least loaded": []}
    for _ in range(20):
        lengths = draw.sample(data, 256)
        ideal = cost_of(lengths, bound) / num_ranks
        for name, shares in (
            ("dealt", dealt(lengths, num_ranks, bound.tokens)),
            ("by count", by_count(lengths, num_ranks)),
            ("least loaded", to_the_least_loaded(lengths, num_ranks)),
        ):
            found[name].append(max(costs_of(shares, lengths, bound)) / ideal)

    mean = {name: statistics.mean(slowest) for name, slowest in found.items()}
    assert mean["dealt"] < 1.06
    assert mean["by count"] > slower * mean["dealt"]
    assert mean["least loaded"] > padded * mean["dealt"]


def test_without_lengths_shares_are_neighbours_of_equal_number():
    assert Deal().shares([7, 3, 9, 1, 4], 2) == [[0, 1, 2], [3, 4]]
    assert Deal().shares([7], 3) == [[0], [], []]


def test_lengths_are_those_of_the_data_and_padded():
    lengths, batch = [1, 8, 100, 1, 1, 1, 1], [6, 5, 4, 3, 1, 0]

    assert Deal(lengths).shares(batch, 2) == [[4], [0, 1, 2, 3, 5]]
    assert Deal(lengths, pad_to_multiple_of=8).shares(batch, 2) == [[3, 4, 5], [0, 1, 2]]
