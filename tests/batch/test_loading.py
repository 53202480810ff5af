"""The loader whose workers collate: what it yields, when, and that a step of it is the step of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import bigbatch as bb
from tests.reference import assert_same_gradients, big_batch_gradients, gradients

LENGTHS = [3, 30, 5, 4, 28, 6, 31, 2, 9, 30, 7]


def make_data() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randint(1, 20, (n,)) for n in LENGTHS]


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    tokens = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    labels = pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=-100)
    return {"tokens": tokens, "labels": labels}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).double()


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def loader(data: Any, **changes: Any) -> bb.LogicalBatchLoader:
    options: dict[str, Any] = {"batch_size": 8, "collate": padded, "length": len, "max_tokens": 64, "seed": 3}
    return bb.LogicalBatchLoader(data, **{**options, **changes})


def make_step() -> bb.Step:
    model = make_model()
    return bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), weight="tokens")


def seen(batches: Any) -> list[list[list[list[int]]]]:
    """Tokens of each sample, by logical batch and micro-batch."""
    return [[micro_batch["tokens"].tolist() for micro_batch in batch.micro_batches] for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_of_what_it_yields_is_that_of_the_whole_batch(num_workers):
    data = make_data()
    found = loader(data, weight="tokens", num_workers=num_workers, shuffle=False)
    assert len(found) == 2
    for batch, samples in zip(found, (data[:8], data[8:]), strict=True):
        model = make_model()
        assert batch.weight == sum(len(sample) - 1 for sample in samples)

        result = bb.accumulate(model, loss_fn, batch, weight="tokens")

        assert_same_gradients(gradients(model), big_batch_gradients(make_model(), loss_fn, padded(samples)))
        assert result.padding is not None
        assert result.padding[1] < result.padding[0]
        assert sum(result.micro_batch_sizes) == len(samples)


def test_the_first_micro_batch_is_there_before_the_last_is_collated():
    collated = []

    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        collated.append(len(samples))
        return padded(samples)

    batch = next(iter(loader(make_data(), collate=collate, micro_batch_size=2, max_tokens=None)))
    first = next(iter(batch.micro_batches))

    assert collated == [len(first["tokens"])]
    assert len(batch.micro_batches) > 1  # pyright: ignore[reportArgumentType]
    assert batch.weight == 8, "And the weight of all of them is known."


def test_epochs_have_orders_of_their_own_that_depend_on_the_seed_alone():
    data = make_data()
    found = loader(data)
    torch.manual_seed(0)
    epochs = [seen(found), seen(found)]
    torch.manual_seed(1)
    again = loader(data)
    again.epoch = 1

    assert seen(again) == epochs[1] != epochs[0]
    assert seen(loader(data, num_workers=2)) == epochs[0]
    for batches in epochs:
        samples = sorted(tuple(row) for batch in batches for micro_batch in batch for row in micro_batch)
        whole = [tuple(sample[:-1].tolist()) for sample in data]
        assert sorted(tuple(x for x in row if x) for row in samples) == sorted(whole)


def test_a_batch_that_is_not_read_to_its_end_does_not_shift_the_next():
    data = make_data()
    whole = seen(loader(data))
    batches = iter(loader(data))
    next(iter(next(batches).micro_batches))

    assert seen([next(batches)]) == whole[1:]


def test_lengths_that_are_given_are_not_looked_for():
    class Counting:
        def __init__(self) -> None:
            self.data, self.visits = make_data(), 0

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Tensor:
            self.visits += 1
            return self.data[index]

    given, found = Counting(), Counting()

    assert seen(loader(given, length=LENGTHS)) == seen(loader(found))
    assert (given.visits, found.visits) == (11, 22)
    with pytest.raises(bb.OptionError, match="holds 3 lengths, but the data has 11 samples"):
        loader(make_data(), length=[1, 2, 3])


def test_without_lengths_micro_batches_are_those_of_a_plain_cut():
    batch = next(iter(loader(make_data(), length=None, max_tokens=None, micro_batch_size=3, shuffle=False)))

    assert batch.padding is None
    assert [len(micro_batch["tokens"]) for micro_batch in batch.micro_batches] == [3, 3, 2]


def test_a_step_knows_how_many_micro_batches_come():
    step = make_step()
    told = []
    step.on_micro_batch = lambda number, count: told.append((number, count))
    result = step(next(iter(loader(make_data(), weight="tokens"))))

    count = len(result.micro_batch_sizes)
    assert told == [(number, count) for number in range(1, count + 1)]
    assert count > 1


def test_a_batch_that_was_passed_over_is_refused():
    step = make_step()
    first, _ = loader(make_data(), weight="tokens")
    before = copy.deepcopy(step.model.state_dict())

    with pytest.raises(bb.BatchError, match="are gone"):
        step(first)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), step.model.state_dict().values(), strict=True))


def test_a_sample_above_max_tokens_is_named():
    with pytest.raises(bb.LengthError, match="has length 31"):
        list(loader(make_data(), max_tokens=30, shuffle=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_micro_batches_are_pinned():
    batch = next(iter(loader(make_data())))

    assert next(iter(batch.micro_batches))["tokens"].is_pinned()


def test_a_last_batch_that_is_not_full_may_be_left_out():
    kept, dropped = loader(make_data()), loader(make_data(), drop_last=True)

    assert (len(kept), len(dropped)) == (len(list(kept)), len(list(dropped))) == (2, 1)
    assert seen(loader(make_data(), drop_last=True)) == seen(loader(make_data()))[:1]


@pytest.mark.parametrize("name", ["collate_fn", "sampler", "batch_sampler", "generator"])
def test_options_of_a_loader_that_choose_samples_are_refused_with_what_to_give(name):
    with pytest.raises(bb.OptionError, match=rf"{name}= is not an option here.* Give .*="):
        loader(make_data(), **{name: None})
