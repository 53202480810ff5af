"""How far BatchNorm turns the gradient of micro-batches, measured beside what is written out by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bigbatch as bb
from bigbatch.values import StepOptions
from bigbatch.verification.nearness import nearness


def model_with(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batch_of(num_samples):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(num_samples, 6, generator=draw), torch.randint(0, 3, (num_samples,), generator=draw)


def flat_gradient(model, parts):
    """By hand, without dropout; equal parts."""
    model = copy.deepcopy(model)
    model[3].p = 0.0
    for part in parts:
        (loss_fn(model, part) / len(parts)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_the_cosine_is_that_of_the_first_four_micro_batches():
    model, batch = model_with(nn.BatchNorm1d(8)), batch_of(40)
    before = copy.deepcopy(model.state_dict())

    found = nearness(model, loss_fn, batch, 4, StepOptions())

    first = tuple(leaf[:16] for leaf in batch)
    cut = flat_gradient(model, list(zip(*(leaf.split(4) for leaf in first), strict=True)))
    expected = F.cosine_similarity(cut, flat_gradient(model, [first]), dim=0)
    assert found.cosine == pytest.approx(float(expected), abs=1e-5)
    assert found.cosine < 0.95
    assert not found.is_near
    assert (found.num_samples, found.micro_batch_size) == (16, 4)
    assert str(found).startswith(
        'under batch_norm="merge" the gradient of 16 samples in micro-batches of 4 has a cosine'
    )
    assert 'batch_norm="exact"' in found.remedy
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_larger_micro_batches_are_nearer():
    model, batch = model_with(nn.BatchNorm1d(8)), batch_of(256)
    cosines = [nearness(model, loss_fn, batch, size, StepOptions()).cosine for size in (4, 16, 64)]

    assert cosines == sorted(cosines)


@pytest.mark.parametrize(
    ("norm", "size", "policy"),
    [
        (nn.GroupNorm(2, 8), 4, "merge"),
        (nn.BatchNorm1d(8), 4, "exact"),
        (nn.BatchNorm1d(8), 4, "frozen"),
        (nn.BatchNorm1d(8).eval(), 4, "merge"),
        (nn.BatchNorm1d(8), 16, "merge"),
        (nn.BatchNorm1d(8), None, "merge"),
    ],
)
def test_where_nothing_is_off_nothing_is_measured(norm, size, policy):
    assert nearness(model_with(norm), loss_fn, batch_of(16), size, StepOptions(batch_norm=policy)) is None


def test_a_list_of_samples_is_collated():
    batch, model = batch_of(16), model_with(nn.BatchNorm1d(8))
    samples = list(zip(*batch, strict=True))
    collate = torch.utils.data.default_collate

    found = nearness(model, loss_fn, samples, 4, StepOptions(collate=collate))

    assert found.cosine == nearness(model, loss_fn, batch, 4, StepOptions()).cosine


def test_what_cannot_be_measured_is_said():
    def short_of_memory(model, batch):
        raise torch.OutOfMemoryError("out of memory")

    found = nearness(model_with(nn.BatchNorm1d(8)), short_of_memory, batch_of(16), 4, StepOptions())

    assert found.cosine is None
    assert not found.is_near
    assert "could not be measured (OutOfMemoryError: out of memory)" in str(found)


def test_the_verdict_of_verify_states_it():
    model, batch = model_with(nn.BatchNorm1d(8)), batch_of(16)

    found = bb.verify(model, loss_fn, batch, micro_batch_size=4)

    assert found.cosine == pytest.approx(nearness(model, loss_fn, batch, 4, StepOptions()).cosine, abs=1e-5)
    assert f"a cosine of {found.cosine:.3f} to that of the whole batch" in found.findings[0]
    assert f"cosine of the two gradients: {found.cosine:.3f}" in str(found)
    assert bb.verify(model, loss_fn, batch, micro_batch_size=4, batch_norm="exact").cosine == pytest.approx(1.0)
