"""Samples of many lengths on several ranks: dealt so that all have about as much to do, with the training of one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset

import bigbatch as bb
from bigbatch.batch.dealing import Deal
from bigbatch.batch.looking import ALONE as ONE_PROCESS
from bigbatch.batch.looking import Sharing
from bigbatch.training.data import LogicalBatches, Shares, lengths_to_deal_by, train_loader
from bigbatch.training.group import ALONE
from bigbatch.training.loop import Run
from tests.reference import big_batch_gradients, gradient_error
from tests.training.processes import on_ranks
from tests.training.test_ranks_run import differences, gone_on, saved_in_the_middle, trained

NUM_SAMPLES, BATCH_SIZE, MAX_TOKENS, NUM_TOKENS = 45, 16, 64, 20


class Texts:
    """Most are short. Counts how often a sample is made."""

    def __init__(self, num_samples: int = NUM_SAMPLES):
        draw = torch.Generator().manual_seed(0)
        lengths = (2 + 38 * torch.rand(num_samples, generator=draw) ** 3).long().tolist()
        self.texts = [torch.randint(1, NUM_TOKENS, (n,), generator=draw) for n in lengths]
        self.visits: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        self.visits[index] += 1
        torch.rand(())  # as augmentation draws
        return self.texts[index]


class Known(Texts):
    """Knows the lengths."""

    @property
    def lengths(self) -> list[int]:
        return [len(sample) for sample in self.texts]


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    labels = [(3 * sample + 1) % NUM_TOKENS for sample in samples]
    return {
        "tokens": pad_sequence(samples, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(NUM_TOKENS, 8), nn.Linear(8, NUM_TOKENS)).double()


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


OPTIONS: dict[str, Any] = {"collate": padded, "length": len, "max_tokens": MAX_TOKENS, "weight": "tokens"}


def text_task(data: type[Texts] = Texts, **changes: Any) -> bb.Task:
    fields: dict[str, Any] = dict(
        model=network,
        train_data=data,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        scheduler=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total),
        batch_size=BATCH_SIZE,
        epochs=3,
        name="texts",
        **OPTIONS,
    )
    return bb.Task(**{**fields, **changes})


def text_run(group: Any, data: type[Texts] = Texts) -> dict[str, Any]:
    run = Run(text_task(data), group=group)
    tokens: list[int] = []
    step = run.step.attempt

    def counting(batch: Any, *args: Any) -> Any:
        tokens.append(sum(map(len, batch)))
        return step(batch, *args)

    run.step.attempt = counting
    return {**trained(run), "tokens": tokens, "visits": run.parts.train_data.visits.total()}


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    batch_size=st.integers(1, 70),
    epochs=st.integers(1, 2),
    world_size=st.integers(1, 9),
    data=st.data(),
)
def test_dealt_by_length_every_epoch_still_sees_every_sample_once(lengths, batch_size, epochs, world_size, data):
    """And the global batches are those of one process, from whichever step on."""
    whole = LogicalBatches(len(lengths), batch_size=batch_size, epochs=epochs, seed=3)
    first_step = data.draw(st.integers(0, len(whole)))
    rest = LogicalBatches(len(lengths), batch_size=batch_size, epochs=epochs, seed=3, first_step=first_step)

    ranks = [list(Shares(rest, rank, world_size, Deal(lengths, max_tokens=90))) for rank in range(world_size)]

    found = []
    for shares in zip(*ranks, strict=True):
        of_place = {place: index for share in shares for place, index in zip(share.places, share.indices, strict=True)}
        assert len(of_place) == sum(len(share.indices) for share in shares)
        found.append((shares[0].step, [of_place[place] for place in range(len(of_place))]))
    assert found == list(whole)[first_step:]
    seen = Counter(index for _, indices in whole for index in indices)
    assert seen == Counter(dict.fromkeys(range(len(lengths)), epochs))


class Drawn(Known):
    """Each sample ends in a number that was drawn for it."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([self.texts[index].double(), torch.rand(1, dtype=torch.float64)])


@pytest.mark.parametrize("world_size", [2, 5])
def test_augmentation_does_not_depend_on_who_loads_a_sample(world_size):
    data = Drawn()
    task = text_task(Drawn, batch_size=9)
    of_rank = [
        list(train_loader(task, data, rank=r, world_size=world_size, lengths=data.lengths)) for r in range(world_size)
    ]
    for alone, *shares in zip(train_loader(task, data), *of_rank, strict=True):
        assert sorted(s.tolist() for s in alone) == sorted(s.tolist() for share in shares for s in share)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return text_run(ALONE)


def test_three_ranks_that_deal_by_length_make_the_run_of_one(alone):
    ranks = on_ranks(3, text_run)

    assert all(differences(found, alone) < 1e-10 for found in ranks)
    for found, whole in zip(ranks[0]["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(whole), rtol=1e-8, atol=1e-10)
    steps = list(zip(*(rank["tokens"] for rank in ranks), strict=True))
    assert [sum(step) for step in steps] == alone["tokens"]
    # Each sample is looked at once for its length, by one of the ranks, and then made once in each of 3 epochs.
    assert sum(rank["visits"] for rank in ranks) == NUM_SAMPLES * (1 + 3)
    assert alone["visits"] == NUM_SAMPLES * 3


def test_data_that_knows_its_lengths_is_not_looked_at(alone):
    ranks = on_ranks(2, text_run, Known)

    assert all(differences(found, alone) < 1e-10 for found in ranks)
    assert sum(rank["visits"] for rank in ranks) == NUM_SAMPLES * 3


def saved(group: Any, folder: Any) -> None:
    saved_in_the_middle(group, folder, 4, text_task())


def resumed(group: Any, folder: Any) -> dict[str, Any]:
    return gone_on(group, folder, None, text_task())


def test_what_two_ranks_saved_goes_on_on_one_and_on_three(tmp_path, alone):
    on_ranks(2, saved, tmp_path)

    for found in (resumed(ALONE, tmp_path), *on_ranks(3, resumed, tmp_path)):
        assert differences(found, alone, first=4) < 1e-10


def test_lengths_of_a_subset_are_those_of_the_data_in_it():
    two = Sharing(0, 2)
    chosen = Subset(Known(), [4, 1, 7])  # pyright: ignore[reportArgumentType]

    assert lengths_to_deal_by(text_task(), chosen, two) == [len(Known().texts[i]) for i in (4, 1, 7)]
    assert lengths_to_deal_by(text_task(), chosen, ONE_PROCESS) is None
    assert lengths_to_deal_by(text_task(length=None, max_tokens=None), chosen, two) is None


def test_lengths_that_do_not_go_with_the_data_are_refused():
    class Wrong(Texts):
        lengths = (1, 2)

    with pytest.raises(bb.TaskError, match="a Wrong with 2 lengths and 45 samples"):
        lengths_to_deal_by(text_task(Wrong), Wrong(), Sharing(0, 2))


def loaded(group: Any, world: Any = None, **changes: Any) -> dict[str, Any]:
    """Steps of what the loader yields, against the whole batch; the default process group, or none."""
    data = Texts(19)
    loader = bb.LogicalBatchLoader(data, batch_size=16, seed=2, group=world, **{**OPTIONS, **changes})
    model: Any = network()
    model = model if group is ALONE else DistributedDataParallel(model)
    errors, sizes, tokens = [], [], []
    order = torch.randperm(19, generator=torch.Generator().manual_seed(2)).tolist()
    for batch, indices in zip(loader, (order[:16], order[16:]), strict=True):
        model.zero_grad()
        result = bb.accumulate(model, loss_fn, batch, weight="tokens")
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        expected = big_batch_gradients(network(), loss_fn, padded([data.texts[i] for i in indices]))
        errors.append(gradient_error({name: p.grad for name, p in plain.named_parameters()}, expected))
        sizes.append(sum(result.micro_batch_sizes))
        tokens.append(batch.weight)
    return {"error": max(errors), "sizes": sizes, "tokens": tokens, "visits": data.visits.total()}


def test_a_loader_gives_each_rank_its_share():
    """The last batch has three samples for four ranks."""
    alone = loaded(ALONE)

    ranks = on_ranks(4, loaded)

    assert max(rank["error"] for rank in (alone, *ranks)) < 1e-12
    assert [sum(sizes) for sizes in zip(*(rank["sizes"] for rank in ranks), strict=True)] == alone["sizes"] == [16, 3]
    assert [sum(each) for each in zip(*(rank["tokens"] for rank in ranks), strict=True)] == alone["tokens"]
    assert min(rank["sizes"][1] for rank in ranks) == 0
    assert sum(rank["visits"] for rank in ranks) == alone["visits"] == 2 * 19


def loaded_in_groups_of_one(group: Any) -> dict[str, Any]:
    groups = [dist.new_group([rank]) for rank in range(group.world_size)]
    loader = bb.LogicalBatchLoader(Texts(19), batch_size=16, group=groups[group.rank], **OPTIONS)
    return {"samples": [sum(len(m["tokens"]) for m in batch.micro_batches) for batch in loader]}


def test_the_ranks_of_a_loader_are_those_of_its_group():
    """As under tensor parallelism, where several ranks see the same samples."""
    assert [rank["samples"] for rank in on_ranks(2, loaded_in_groups_of_one)] == [[16, 3], [16, 3]]
