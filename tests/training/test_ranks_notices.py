"""Who a rank is, and what ranks tell one another between steps, in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import bigbatch as bb
from bigbatch.training.group import ALONE, device_of, joined
from bigbatch.training.notices import Notices
from bigbatch.training.rank import Rank


def environment(**changes):
    found = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "HOME": "/"} | changes
    return {name: value for name, value in found.items() if value is not None}


def test_a_rank_is_what_torchrun_says():
    rank = Rank.of(environment())

    assert rank == Rank(number=5, world_size=8, local=1, local_world_size=4)
    assert str(rank) == "rank 5 of 8"


def test_without_torchrun_it_is_one_process():
    assert Rank.of({"HOME": "/", "LOCAL_RANK": "0"}) == Rank(0, 1, 0, 1)
    assert Rank.of({"RANK": "0", "WORLD_SIZE": "1"}) == Rank(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": None}, "RANK=5, WORLD_SIZE=nothing, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, which is no rank"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK=nothing"),
        ({"RANK": "eight"}, "RANK=eight"),
        ({"RANK": "8"}, "RANK=8, WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "Start the run with --nproc-per-node or torchrun"),
    ],
)
def test_half_an_environment_is_refused(changes, message):
    with pytest.raises(bb.DistributedError, match=message):
        Rank.of(environment(**changes))


@pytest.mark.parametrize(("wanted", "expected"), [(None, 0), (1, 0), (2, 2), (8, 8)])
def test_one_process_starts_as_many_ranks_as_are_wanted(wanted, expected):
    assert Rank().to_start(wanted) == expected


def test_a_rank_starts_none():
    rank = Rank.of(environment())

    assert rank.to_start(None) == rank.to_start(4) == 0
    with pytest.raises(bb.OptionError, match=r"--nproc-per-node 2, but this is rank 5 of 8, with 4 on this host"):
        rank.to_start(2)


def test_each_rank_has_the_card_of_its_number(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    assert device_of(Rank(5, 8, 1, 4), "cuda") == torch.device("cuda", 1)
    assert device_of(Rank(), "cuda") == torch.device("cuda")
    assert device_of(Rank(7, 8, 3, 4), "cpu") == torch.device("cpu")
    with pytest.raises(
        bb.DistributedError, match="Rank 7 is number 3 on its host and needs a card of its own, but torch"
    ):
        device_of(Rank(7, 8, 3, 4), "cuda")


def test_one_process_needs_no_process_group():
    with joined(Rank(), torch.device("cpu")) as group:
        assert group is ALONE
        assert not torch.distributed.is_initialized()
        assert group.gathered(3) == [3]
        assert group.from_first(lambda: 4) == 4
        group.agree(None)
        with pytest.raises(bb.CheckpointError, match="mine"):
            group.agree(bb.CheckpointError("mine"))


def test_one_process_does_at_once_what_it_is_told():
    notices = Notices()

    notices.tell("stop", 15, step=3)

    assert notices.due(step=3) == {"stop": 15}
    assert notices.due(step=4) == {}


class Course:
    """Ranks that make steps: each asks at the end of each of its steps, and none is a step ahead of another's begin."""

    def __init__(self, world_size):
        store = HashStore()
        self.notices = [Notices(store) for _ in range(world_size)]
        self.steps = [1] * world_size  # at the end of which each of them is
        self.done = [[] for _ in range(world_size)]

    def ready(self):
        """Those who can come to the end of a step: the sums in it have waited for all to begin it."""
        return [rank for rank, step in enumerate(self.steps) if step == min(self.steps)]

    def advance(self, rank, told):
        step = self.steps[rank]
        for what, value in told.items():
            self.notices[rank].tell(what, value, step=step)
        self.done[rank] += [(step, *item) for item in sorted(self.notices[rank].due(step=step).items())]
        self.steps[rank] += 1


@settings(max_examples=200, deadline=None)
@given(world_size=st.integers(2, 5), data=st.data())
def test_all_ranks_do_it_after_the_same_step_whoever_tells_and_in_whatever_order(world_size, data):
    course = Course(world_size)
    told = 0
    for _ in range(data.draw(st.integers(1, 30))):
        rank = data.draw(st.sampled_from(course.ready()))
        what = data.draw(st.sampled_from([{}, {}, {"stop": 2}, {"stop": 15}, {"save": 0}]))
        if "save" in what and rank:
            what = {}  # only rank 0 looks at the clock
        told += bool(what)
        course.advance(rank, what)
    while len(set(course.steps)) > 1 or (told and not any(course.done)):
        for rank in course.ready():
            course.advance(rank, {})

    without_values = [[(step, what) for step, what, _ in done] for done in course.done]
    assert all(done == without_values[0] for done in without_values)
    assert bool(without_values[0]) == bool(told)


def test_doing_it_at_once_would_part_the_ranks():
    """Control: of two ranks one has asked before, and one asks after, the notice about the step they are both in."""

    class AtOnce(Notices):
        def tell(self, what, value=0, *, step):
            super().tell(what, value, step=step - 1)

    course = Course(2)
    course.notices = [AtOnce(course.notices[0]._store) for _ in range(2)]
    course.advance(1, {})
    course.advance(0, {"stop": 15})

    assert course.done == [[(1, "stop", 15)], []]
