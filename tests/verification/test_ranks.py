"""In a process group each rank compares its own share by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stepping.workers import Workers, workers
from tests.verification import rank_cases as cases


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    with workers(2) as found:
        yield found


@pytest.mark.parametrize("wrap", ["ddp", "compiled", "inside"])
def test_each_rank_compares_its_own_share(ranks, wrap):
    for found in ranks.run(2, cases.verified, wrap, "tokens"):
        assert found["equal"]
        assert found["worst"] <= 1e-12
        assert found["findings"] == ()
        assert found["untouched"]
        assert found["names"] == [name for name, _ in cases.words().named_parameters()] or wrap == "inside"
        assert any("its own share" in note for note in found["notes"])


def test_what_does_not_add_up_is_found_on_each(ranks):
    """Control."""
    for found in ranks.run(2, cases.verified, "ddp", "samples"):
        assert not found["equal"]
        assert 'give weight="tokens"' in found["findings"][0]


def test_one_rank_may_do_it_without_the_others(ranks):
    assert ranks.run(2, cases.verified_on_one) == [None, True]


def test_layers_that_join_ranks_do_not_wait_for_others(ranks):
    """Shares of other lengths make other numbers of forwards."""
    for found in ranks.run(2, cases.verified_with_sync_batch_norm):
        assert not found["merge"]
        assert "SyncBatchNorm joins ranks" in found["finding"]
        assert found["exact"]


def test_a_loss_of_the_whole_batch_is_compared_too(ranks):
    assert ranks.run(2, cases.verified_loss_of_whole_batch) == [True, True]


def test_a_model_in_shards_is_refused(ranks):
    for said in ranks.run(2, cases.sharded):
        assert said.startswith("DistributedError: bb.verify runs a private copy of the model on each rank by itself")
