"""Samples that go from a worker to the run in one piece are the same samples."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from bigbatch.training.data import train_loader
from bigbatch.training.packing import PackedList
from tests.training.tiny import tiny_task


def sent(samples: Any) -> Any:
    """What arrives on the other side of a queue, and how many tensors were sent."""
    written = io.BytesIO()
    pickler = ForkingPickler(written)
    pickler.dump(samples)
    return ForkingPickler.loads(written.getvalue())


SAMPLES = [
    {"tokens": torch.arange(n), "weight": torch.tensor(0.5 * n), "name": f"sample {n}", "pair": (torch.ones(n, 2), n)}
    for n in (3, 1, 0, 4)
]


def test_samples_arrive_as_they_were():
    found = sent(PackedList(SAMPLES))

    assert type(found) is list
    for sample, expected in zip(found, SAMPLES, strict=True):
        assert sample["name"] == expected["name"]
        assert sample["pair"][1] == expected["pair"][1]
        for a, b in [(sample["tokens"], expected["tokens"]), (sample["pair"][0], expected["pair"][0])]:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        assert torch.equal(sample["weight"], expected["weight"])
        assert sample["tokens"].untyped_storage().nbytes() == 8 * len(expected["tokens"]), "And keeps no other."


def test_tensors_that_are_not_plain_are_sent_by_themselves():
    samples = [torch.eye(2).to_sparse(), torch.nn.Parameter(torch.ones(2)), torch.ones(3)]

    sparse, parameter, plain = sent(PackedList(samples))

    assert sparse.layout == torch.sparse_coo
    assert isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(plain, samples[2])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_gets_the_same_batches_from_a_worker(num_workers):
    task = tiny_task(collate=torch.utils.data.default_collate, num_workers=num_workers, epochs=1)
    batches = list(train_loader(task, task.train_data()))

    assert [len(batch) for batch in batches] == [16, 16, 16, 2]
    assert all(isinstance(batch, list) for batch in batches)
    x, y = batches[0][0]
    assert x.shape == (2,)
    assert y.dim() == 0
