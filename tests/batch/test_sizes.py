from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbatch.batch.sizes import micro_batch_sizes, spans

sizes = st.integers(1, 300)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(sizes, sizes, st.integers(1, 3))
def test_sizes_of_micro_batches(num_samples, micro_batch_size, smallest):
    found = micro_batch_sizes(num_samples, micro_batch_size, smallest)

    assert sum(found) == num_samples
    assert len(found) == math.ceil(num_samples / micro_batch_size), "more micro-batches than are needed"
    assert 1 <= min(found) <= max(found) <= micro_batch_size
    assert found == sorted(found, reverse=True)
    # No cut into so many has a larger smallest piece than the most equal one.
    assert min(found) >= min(smallest, num_samples // len(found))
    assert len(set(found)) <= 2, "a compiled model compiles two shapes at most"


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(sizes, sizes)
def test_all_but_the_last_micro_batch_are_full(num_samples, micro_batch_size):
    assert set(micro_batch_sizes(num_samples, micro_batch_size)[:-1]) <= {micro_batch_size}


@pytest.mark.parametrize(
    ("num_samples", "micro_batch_size", "smallest", "wanted"),
    [
        (10, 4, 1, [4, 4, 2]),
        (10, 4, 2, [4, 4, 2]),
        (9, 4, 1, [4, 4, 1]),
        (9, 4, 2, [3, 3, 3]),
        (3, 8, 2, [3]),
        (1, 8, 2, [1]),
        (8, 8, 2, [8]),
        (4, 1, 2, [1, 1, 1, 1]),
        (4, 3, 2, [2, 2]),
        (5, 2, 2, [2, 2, 1]),
    ],
)
def test_the_cut(num_samples, micro_batch_size, smallest, wanted):
    assert micro_batch_sizes(num_samples, micro_batch_size, smallest) == wanted


def test_spans_follow_each_other():
    assert list(spans([3, 3, 1])) == [(0, 3), (3, 3), (6, 1)]
    assert list(spans([])) == []
