"""Groups of like length: the best there are, never over the bound, and the same each time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

import bigbatch as bb
from bigbatch.batch.lengths import Bound, best_cut, bound_of, check_fits, grouped, lengths_of, padding_rule
from bigbatch.footprint import Footprint
from bigbatch.values import Plan


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put the items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for i, group in enumerate(partition):
            yield [*partition[:i], [first, *group], *partition[i + 1 :]]


def cost_of(groups: Any, lengths: list[int], bound: Bound) -> float:
    """Padded tokens and the overhead of each group; infinite when one is over the bound."""
    total = 0.0
    for group in groups:
        tokens = len(group) * max(lengths[i] for i in group)
        if len(group) > bound.samples or tokens > bound.tokens:
            return math.inf
        total += tokens + bound.overhead
    return total


def fits(group: Any, lengths: list[int], footprint: Footprint) -> bool:
    """Whether its bytes are within the limit; a sample alone may be above it."""
    return len(group) == 1 or footprint.bytes_of(len(group), max(lengths[i] for i in group)) <= footprint.limit_bytes


def bytes_instance(seed: int) -> tuple[list[int], Footprint]:
    """With a moment that is linear in the length and one that grows with its square."""
    draw = random.Random(seed)
    longest = draw.choice([10, 30, 60])
    lengths = [draw.randint(0, longest) for _ in range(draw.randint(1, 7))]
    moments = ((100.0, 0.0, 0.0, 3.0, 20.0, 0.0), (50.0, 2.0, 1.0, 0.0, 4.0, draw.choice([0.2, 1.0])))
    return lengths, Footprint(moments, draw.randint(300, 5000))


def test_no_grouping_within_the_bytes_costs_less_on_200_random_instances():
    for seed in range(200):
        lengths, footprint = bytes_instance(seed)
        plan = Plan(micro_batch_size=4, max_tokens=80, footprint=footprint)
        bound = bound_of(max(lengths), len(lengths), 4, None, plan)
        allowed = (
            groups
            for groups in partitions(list(range(len(lengths))))
            if all(fits(group, lengths, footprint) for group in groups)
        )
        costs = (
            sum(len(g) * max(lengths[i] for i in g) for g in groups) + len(groups) * bound.overhead
            for groups in allowed
        )
        optimum = min(costs)

        found = grouped(lengths, bound).groups

        assert all(fits(group, lengths, footprint) for group in found), (seed, lengths)
        cost = sum(len(g) * max(lengths[i] for i in g) for g in found) + len(found) * bound.overhead
        assert cost <= 1.02 * optimum + 1e-9, (seed, lengths)


def test_a_bound_of_tokens_is_not_one_of_bytes():
    """Control: on many of the same instances, as many tokens as fit of samples of length 4 are above the limit."""
    above = 0
    for seed in range(200):
        lengths, footprint = bytes_instance(seed)
        tokens = max(4 * int(footprint.most(4)), *lengths, 1)
        groups = grouped(lengths, Bound(tokens, 7)).groups
        above += not all(fits(group, lengths, footprint) for group in groups)

    assert above > 30


def test_a_size_that_shrank_takes_as_large_a_part_of_the_bytes():
    footprint = Footprint(((0.0, 0.0, 0.0, 0.0, 10.0, 0.0),), limit_bytes=8000)
    plan = Plan(micro_batch_size=8, max_tokens=800, footprint=footprint)

    assert bound_of(100, 99, 8, None, plan).most(100) == 8
    assert bound_of(100, 99, 2, None, plan).most(100) == 2
    assert bound_of(100, 99, 2, None, plan).most(10) == 20
    assert bound_of(100, 99, 8, 500, plan).most(100) == 5  # max_tokens beside it
    assert bound_of(9000, 99, 8, None, plan).most(9000) == 1  # one that is longer than planned stands alone


def instance(seed: int) -> tuple[list[int], Bound]:
    draw = random.Random(seed)
    longest = draw.choice([3, 10, 100])
    lengths = [draw.randint(0, longest) for _ in range(draw.randint(1, 7))]
    return lengths, Bound(draw.randint(max(*lengths, 1), 4 * longest), draw.randint(1, 7))


def test_no_grouping_costs_less_on_200_random_instances():
    """Against every way to put the samples into groups, and not only those that keep them sorted."""
    for seed in range(200):
        lengths, bound = instance(seed)
        optimum = min(cost_of(groups, lengths, bound) for groups in partitions(list(range(len(lengths)))))

        found = cost_of(grouped(lengths, bound).groups, lengths, bound)

        assert found == pytest.approx(optimum, rel=1e-12), (seed, lengths, bound)


def test_sorting_and_cutting_at_full_micro_batches_is_not_optimal():
    """Control: what people write first is more than 2 % above the optimum on many of these instances."""
    above = 0
    for seed in range(200):
        lengths, bound = instance(seed)
        ordered = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        size = bound.most(max(lengths))
        full = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        above += cost_of(full, lengths, bound) > 1.02 * cost_of(grouped(lengths, bound).groups, lengths, bound)

    assert above > 60


def random_batch(draw: random.Random) -> list[int]:
    num_samples = draw.choice([1, 2, 7, 33, 64, 150])
    if draw.random() < 0.5:
        return [min(512, 1 + int(draw.lognormvariate(4, 1.2))) for _ in range(num_samples)]
    return [draw.choice([1, 5, 5, 40]) for _ in range(num_samples)]


def test_max_tokens_is_never_exceeded_and_no_sample_is_lost_in_2000_random_batches():
    draw = random.Random(0)
    for _ in range(2000):
        lengths = random_batch(draw)
        padded = padding_rule(draw.choice([None, 8]), few=draw.random() < 0.3)
        max_tokens = padded(max(lengths)) * draw.randint(1, 20) + draw.randint(0, 7)
        size = draw.choice([None, 1, 4, 100])
        bound = bound_of(padded(max(lengths)), len(lengths), size, max_tokens, None)

        found = grouped(lengths, bound, padded)

        assert sorted(i for group in found.groups for i in group) == list(range(len(lengths)))
        for group, padded_length in zip(found.groups, found.padded_lengths, strict=True):
            assert padded_length == padded(max(lengths[i] for i in group))
            assert len(group) * padded_length <= max_tokens
            assert len(group) <= (size or len(lengths))


def test_groups_are_the_same_each_time_and_keep_the_order_of_equals():
    lengths = [3, 9, 3, 9, 3, 9]

    found = grouped(lengths, Bound(tokens=27, samples=6))

    assert found.groups == ((1, 3, 5), (0, 2, 4))
    assert found == grouped(lengths, Bound(tokens=27, samples=6))


def test_padding_is_counted_before_and_after():
    # As they came: 2 x 10 and 2 x 10 tokens for 24 real ones.
    found = grouped([10, 2, 2, 10], Bound(tokens=20, samples=4))

    assert found.groups == ((0, 3), (1, 2))
    assert found.padding == (1 - 24 / 40, 0.0)


def test_samples_of_no_length_are_grouped_too():
    assert best_cut([0, 0, 0], Bound(tokens=4, samples=3)) == [3]
    assert grouped([0, 0], Bound(tokens=4, samples=3)).padding == (0.0, 0.0)


@pytest.mark.parametrize(
    ("size", "max_tokens", "plan", "expected"),
    [
        (4, 100, None, Bound(100, 4)),  # beside max_tokens, the most samples
        (None, 100, None, Bound(100, 32)),
        (4, None, None, Bound(40, 32)),  # alone: so many of the longest
        (4, None, Plan(micro_batch_size=4, max_tokens=80), Bound(80, 32)),  # planned with samples of 20
        (
            1,
            None,
            Plan(micro_batch_size=1, max_tokens=5),
            Bound(10, 32),
        ),  # one that is longer than planned stands alone
        (2, None, Plan(micro_batch_size=4, max_tokens=80), Bound(40, 32)),  # memory ran out, and it shrank
        (4, 30, Plan(micro_batch_size=4, max_tokens=80), Bound(30, 32)),
    ],
)
def test_a_bound_comes_from_the_size_the_tokens_and_the_plan(size, max_tokens, plan, expected):
    assert bound_of(10, 32, size, max_tokens, plan) == expected


def test_a_sample_above_max_tokens_is_named():
    with pytest.raises(bb.LengthError, match=r"Sample 2 of the batch has length 700, but max_tokens=512") as caught:
        check_fits([3, 512, 700, 900], 512)

    error = caught.value
    assert (error.index, error.length, error.max_tokens) == (2, 700, 512)
    assert "Raise max_tokens to 900" in str(error)
    check_fits([3, 512], 512)


@pytest.mark.parametrize("found", [None, 2.5, "3", True, -1])
def test_a_length_that_is_none_is_refused(found):
    with pytest.raises(bb.BatchError, match="for sample 1; it is a whole number"):
        lengths_of([4, found], lambda sample: sample)


def test_a_compiled_model_sees_few_lengths():
    few, all_lengths = padding_rule(None, few=True), range(1, 513)

    assert len({few(n) for n in all_lengths}) == 9
    assert all(n <= few(n) <= max(32, 1.5 * n) for n in all_lengths)
    assert {padding_rule(64, few=True)(n) % 64 for n in all_lengths} == {0}
