"""What is whole at each moment of a step with FSDP2, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest

from bigbatch.errors import OptionError
from bigbatch.planning.costs import Line, MemoryProfile, Slot
from bigbatch.planning.sharding_costs import Shards, Unit, sharded, with_buckets
from bigbatch.planning.simulate import peak_bytes

SAVED, NUM_BLOCKS = 1000, 3


def unit(name: str, size: int) -> Unit:
    """Of parameters of so many bytes, spread over 2 ranks, all in one dtype."""
    return Unit(name, size, size, size, size, size // 2)


def profile() -> MemoryProfile:
    """Three blocks that save 1000 bytes and need nothing else, and gradients that come into being one after the other.

    Block ``i`` has 100, 200 and 300 bytes of parameters, the root 50, whose gradient is the last.
    """
    sizes = [100 * (number + 1) for number in range(NUM_BLOCKS)]
    slots = [Slot(None)]
    for number in range(NUM_BLOCKS):
        after = sum(sizes[number + 1 :])
        born = {"backward_first": Line(after + sizes[number]), "pending_first": Line(after)}
        slots += [Slot(f"{number}", saved=(number,), may_recompute=True, follows=number > 0, **born), Slot(None)]
    slots[0] = Slot(None, backward_first=Line(650.0))
    return MemoryProfile(
        parameter_bytes=650,
        gradient_bytes=650,
        optimizer_bytes=1300,
        storages=(Line(SAVED),) * NUM_BLOCKS,
        slots=tuple(slots),
    )


def shards() -> Shards:
    blocks = [unit(f"{number}", 100 * (number + 1)) for number in range(NUM_BLOCKS)]
    return Shards(2, (unit("", 50), *blocks), 325, 650, 0)


RESIDENT = 325 + 650


@pytest.mark.parametrize(
    ("reduce", "sizes", "expected"),
    [
        # In the backward of block 2: the root and it are whole, and its gradient. Of what was received for it and what
        # is on its way for block 1 the larger counts: they are there one after the other.
        ("each", [1], RESIDENT + 3 * SAVED + 50 + 300 + 300 + 300),
        # The same beside the shards of all gradients.
        ("each", [1, 1], RESIDENT + 3 * SAVED + 325 + 50 + 300 + 300 + 300),
        # The gradients of all modules are there, so there is no new one; the last micro-batch sends them one by one.
        ("after", [1, 1], RESIDENT + 3 * SAVED + 650 + 50 + 300 + 300),
    ],
)
def test_the_peak_is_that_of_a_count_by_hand(reduce, sizes, expected):
    assert peak_bytes(sharded(profile(), shards(), reduce), sizes) == expected


def test_one_rank_receives_nothing():
    alone = dataclasses.replace(shards(), world_size=1)

    assert peak_bytes(sharded(profile(), alone, "each"), [1]) == RESIDENT + 3 * SAVED + 50 + 300 + 300


def test_blocks_are_not_grouped():
    assert not any(slot.follows for slot in sharded(profile(), shards(), "each").slots)


def test_a_unit_that_is_no_block_is_named():
    other = dataclasses.replace(shards(), units=(*shards().units, unit("inside.another", 10)))

    with pytest.raises(OptionError, match=r"\['inside.another'\] are sharded by themselves"):
        sharded(profile(), other, "each")


def test_buckets_are_a_second_copy_of_the_gradients_once():
    found = with_buckets(profile())

    assert (found.bucket_bytes, found.update_bytes) == (650, 650)
    assert found.resident_bytes == profile().resident_bytes + 650
    assert with_buckets(found) == found


def test_it_is_read_back_from_json():
    found = sharded(profile(), shards(), "after")

    assert MemoryProfile.from_json(found.to_json()) == found
