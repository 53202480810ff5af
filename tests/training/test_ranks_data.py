"""What each rank loads of a batch, without any process."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, Subset

from bigbatch.training.data import LogicalBatches, Shares, eval_loader, train_loader
from tests.training.tiny import Points, tiny_task

SIZES = {
    "num_samples": st.integers(1, 60),
    "batch_size": st.integers(1, 70),
    "epochs": st.integers(1, 3),
    "world_size": st.integers(1, 12),
    "seed": st.integers(0, 3),
}


class Drawn(Points):
    """Samples with numbers of torch, Python and NumPy in them, as augmentation draws them."""

    def __getitem__(self, index):
        drawn = [float(torch.rand(())), random.random(), np.random.random()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64), self.labels[index]


def joined(task, world_size, **how):
    """The global batches, each joined from the shares of all ranks."""
    loaders = [train_loader(task, task.train_data(), rank=r, world_size=world_size, **how) for r in range(world_size)]
    return [[torch.cat(parts) for parts in zip(*shares, strict=True)] for shares in zip(*loaders, strict=True)]


@settings(max_examples=150, deadline=None)
@given(**SIZES)
def test_every_epoch_sees_every_sample_exactly_once_over_all_ranks(num_samples, batch_size, epochs, world_size, seed):
    batches = LogicalBatches(num_samples, batch_size=batch_size, epochs=epochs, seed=seed)
    shares = [list(Shares(batches, rank, world_size)) for rank in range(world_size)]

    per_epoch = len(batches) // epochs
    for epoch in range(epochs):
        steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = Counter(index for rank in shares for share in rank[steps] for index in share.indices)
        assert seen == Counter(range(num_samples))


@settings(max_examples=150, deadline=None)
@given(**SIZES, data=st.data())
def test_global_batches_are_the_same_for_any_number_of_ranks(num_samples, batch_size, epochs, world_size, seed, data):
    """In their order, from whichever step on; shares differ by one sample at most, and every rank makes every step."""
    whole = LogicalBatches(num_samples, batch_size=batch_size, epochs=epochs, seed=seed)
    first_step = data.draw(st.integers(0, len(whole)))
    rest = LogicalBatches(num_samples, batch_size=batch_size, epochs=epochs, seed=seed, first_step=first_step)
    ranks = [Shares(rest, rank, world_size) for rank in range(world_size)]

    found = []
    for shares in zip(*ranks, strict=True):
        sizes = [len(share.indices) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert [place for share in shares for place in share.places] == list(range(sum(sizes)))
        found.append((shares[0].step, [index for share in shares for index in share.indices]))

    assert found == list(whole)[first_step:]
    assert {len(rank) for rank in ranks} == {len(whole) - first_step}


def test_the_usual_sampler_sees_samples_twice():
    """Control: torch's own makes the shares equal with samples that were seen before."""
    samplers = [DistributedSampler(range(10), 4, rank, shuffle=True, seed=0) for rank in range(4)]

    seen = Counter(index for sampler in samplers for index in sampler)

    assert seen.total() == 12
    assert max(seen.values()) == 2
    assert seen != Counter(range(10))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_augmentation_does_not_depend_on_the_number_of_ranks(world_size, num_workers):
    """Of torch, Python and NumPy; also in a subset, and wherever the run began."""
    make = lambda: Subset(Drawn(30), list(range(29, 6, -1)))  # noqa: E731
    task = tiny_task(train_data=make, batch_size=6, epochs=2)
    alone = joined(task, 1)

    shared = joined(tiny_task(train_data=make, batch_size=6, epochs=2, num_workers=num_workers), world_size)
    gone_on = joined(task, world_size, first_step=5)

    for found, expected in ((shared, alone), (gone_on, alone[5:])):
        assert [len(batch[1]) for batch in found] == [len(batch[1]) for batch in expected]
        assert all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))
    drawn = torch.cat([batch[0][:, 1:] for batch in alone]).flatten()
    assert len(set(drawn.tolist())) == drawn.numel(), "Each sample of each step draws numbers of its own."


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_empty_share_has_the_form_of_the_others(num_workers):
    data = [{"x": torch.ones(3), "inner": (torch.ones(2, 2), f"{i}"), "y": i} for i in range(5)]
    task = tiny_task(train_data=lambda: data, batch_size=4, num_workers=num_workers, epochs=1)

    _, last = list(train_loader(task, data, rank=2, world_size=3))

    assert last["x"].shape == (0, 3)
    assert last["inner"][0].shape == (0, 2, 2)
    assert len(last["inner"][1]) == 0
    assert last["y"].shape == (0,)
    assert last["y"].dtype == torch.int64


def test_an_empty_share_of_samples_is_an_empty_list():
    task = tiny_task(collate=lambda samples: samples, batch_size=4, train_data=lambda: Points(5), epochs=1)

    assert [len(share) for share in train_loader(task, Points(5), rank=2, world_size=3)] == [1, 0]


def _as_given(samples):
    return samples


@pytest.mark.parametrize("num_workers", [0, 1])
def test_shares_of_samples_are_lists_that_make_the_batch(num_workers):
    """Packed on their way from a worker, which does not show."""
    task = tiny_task(collate=_as_given, batch_size=4, train_data=lambda: Points(6), epochs=1, num_workers=num_workers)
    whole = list(train_loader(tiny_task(collate=_as_given, batch_size=4, epochs=1), Points(6)))

    ranks = [list(train_loader(task, Points(6), rank=rank, world_size=3)) for rank in range(3)]

    assert {type(share) for rank in ranks for share in rank} == {list}
    assert [[len(share) for share in rank] for rank in ranks] == [[2, 1], [1, 1], [1, 0]]
    joined_again = [[sample for share in shares for sample in share] for shares in zip(*ranks, strict=True)]
    for found, expected in zip(joined_again, whole, strict=True):
        assert all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(found, expected, strict=True))


def test_an_empty_share_draws_nothing_and_reads_one_sample():
    before = torch.get_rng_state()
    task = tiny_task(train_data=lambda: Drawn(5), batch_size=4, epochs=1)

    _, last = list(train_loader(task, Drawn(5), rank=3, world_size=4))

    assert last[0].shape == (0, 4)
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=60, deadline=None)
@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 45), world_size=st.integers(1, 6))
def test_the_evaluation_sees_the_batches_of_one_process(num_samples, batch_size, world_size):
    """The very same ones, so that no product of matrices is rounded otherwise; each on one rank."""
    data = Points(num_samples)
    task = tiny_task()
    whole = [batch[0] for batch in eval_loader(task, data, batch_size)]

    ranks = [
        [b[0] for b in eval_loader(task, data, batch_size, rank=r, world_size=world_size)] for r in range(world_size)
    ]
    in_turns = [ranks[i % world_size][i // world_size] for i in range(sum(map(len, ranks)))]

    assert len(in_turns) == len(whole)
    assert all(torch.equal(a, b) for a, b in zip(in_turns, whole, strict=True))
