"""Slots read from a record that was written by hand, so that each number can be followed."""

from __future__ import annotations

import dataclasses

import pytest

from bigbatch.memory.events import Event, Storage
from bigbatch.planning.costs import Line, MemoryProfile
from bigbatch.planning.simulate import peak_bytes
from bigbatch.planning.slots import (
    MicroBatch,
    ShapesDependOnSizeError,
    Traced,
    micro_batches,
    read_slots,
    seconds_of_slots,
)

BASE = 1000.0
GRADIENTS = 500.0


def record(size: int, *, is_later: bool, follows: bool = True, others: object = None) -> MicroBatch:
    """Two blocks: "a" gets 2 bytes a sample and saves 10 and 20, "b" gets what was saved last and saves 30."""
    base = BASE + (GRADIENTS if is_later else 0.0)
    x, one, two, three = (Storage(i, n * size) for i, n in enumerate((2, 10, 20, 30)))

    def at(held: float, more: float = 0.0) -> dict[str, float]:
        return dict(live_bytes=base + held * size, peak_bytes=base + (held + more) * size)

    forward = (
        Event("enter", "a", (x,), **at(0), seconds=1.0),
        Event("save", 0, (one,), **at(10, 3), seconds=2.0),
        Event("save", 1, (two,), **at(30), seconds=3.0),
        Event("exit", "a", **at(30, 5), seconds=4.0),
        Event("enter", "b", (two,), **at(30), follows=follows, others=others),
        Event("save", 2, (three,), **at(60, 7), seconds=5.0),
        Event("exit", "b", **at(60)),
        Event("mark", "backward", **at(60)),
    )
    backward = (
        Event("load", 2, **at(60, 4)),
        Event("load", 1, **at(40, 50)),
        Event("load", 0, **at(30, 2)),
        Event("mark", "update", **at(0, 40)),
    )
    return MicroBatch(size, base, forward, backward)


def traced(**how: object) -> Traced:
    first = tuple(record(size, is_later=False, **how) for size in (2, 8))  # type: ignore[arg-type]
    later = tuple(record(size, is_later=True, **how) for size in (2, 8))  # type: ignore[arg-type]
    return Traced(first=first, later=later)  # type: ignore[arg-type]


BLOCKS = {"a": "Block", "b": "Block"}


def test_each_block_and_what_runs_between_is_a_slot():
    storages, slots = read_slots(traced(), BLOCKS, {"a"}, set())

    assert [slot.name for slot in slots] == [None, "a", None, "b", None]
    assert storages == (Line(0, 2), Line(0, 10), Line(0, 20), Line(0, 30))
    assert [slot.saved for slot in slots] == [(), (1, 2), (), (3,), ()]
    assert [slot.inputs for slot in slots] == [(), (0,), (), (2,), ()]
    assert [slot.may_recompute for slot in slots] == [False, True, False, False, False]
    assert [slot.kind for slot in slots] == ["", "Block", "", "Block", ""]


def test_bytes_are_beyond_what_is_held_by_the_slots_before():
    _, slots = read_slots(traced(), BLOCKS, {"a"}, set())
    a, b = slots[1], slots[3]

    assert a.forward == Line(0, 35)
    assert a.recompute == Line(0, 30)  # up to the last save, which the 5 at the end come after
    assert b.forward == Line(0, 37)  # 67 alive, of which 30 are held by a
    # What is alive at the first load of b, beyond the 60 held: nothing. Its own backward goes on to the load of a.
    assert b.pending == Line(0, 0)
    assert b.backward == Line(0, 30)  # 90 alive when the 60 of a and b are held
    assert a.pending == Line(0, 10)
    assert a.backward == Line(0, 10)


def test_a_simulation_of_what_was_read_has_the_peak_of_the_record():
    storages, slots = read_slots(traced(), BLOCKS, {"a"}, set())
    profile = MemoryProfile(
        parameter_bytes=int(BASE), gradient_bytes=int(GRADIENTS), storages=storages, slots=slots, batch=Line(0, 0)
    )

    for size in (1, 2, 8, 5):
        most = max(e.peak_bytes for e in (*record(size, is_later=True).forward, *record(size, is_later=True).backward))
        assert peak_bytes(profile, [size, size]) == most
    # Control: without what is alive for a moment it would be less.
    bare = dataclasses.replace(profile, slots=tuple(dataclasses.replace(s, backward=Line()) for s in slots))
    assert peak_bytes(bare, [8, 8]) < peak_bytes(profile, [8, 8])


def test_blocks_are_a_group_when_one_gets_what_the_other_returned():
    neighbours = {("a", "b")}

    assert read_slots(traced(), BLOCKS, {"a", "b"}, neighbours)[1][3].follows
    assert not read_slots(traced(), BLOCKS, {"a", "b"}, set())[1][3].follows
    assert not read_slots(traced(follows=False), BLOCKS, {"a", "b"}, neighbours)[1][3].follows
    assert not read_slots(traced(others=("mask",)), BLOCKS, {"a", "b"}, neighbours)[1][3].follows


def test_micro_batches_that_save_other_things_have_no_line():
    small, large = traced().later
    other = dataclasses.replace(
        large, forward=(*large.forward[:-1], Event("save", 3, (Storage(4, 1),)), large.forward[-1])
    )
    both = traced()._replace(later=(small, other))

    with pytest.raises(ShapesDependOnSizeError, match="two sizes"):
        read_slots(both, BLOCKS, {"a"}, set())


def test_seconds_are_those_of_the_events_in_a_slot():
    found = seconds_of_slots(record(2, is_later=True), BLOCKS)

    assert [slot.forward for slot in found] == [1.0, 9.0, 0.0, 5.0, 0.0]
    assert [slot.recompute for slot in found][1] == 5.0  # up to the last save


def test_a_step_is_parted_at_its_marks():
    one, two = record(2, is_later=False), record(8, is_later=True)
    events = [Event("mark", "micro-batch", live_bytes=BASE), *one.forward, *one.backward[:-1]]
    events += [Event("mark", "micro-batch", live_bytes=BASE + GRADIENTS), *two.forward, *two.backward]
    events += [Event("mark", "end", seconds=9.0)]

    found = micro_batches(events, (2, 8))

    assert [m.num_samples for m in found] == [2, 8]
    assert [m.live_bytes for m in found] == [BASE, BASE + GRADIENTS]
    assert found[1].forward == two.forward
    assert found[1].backward == two.backward
    assert found[0].backward[:-1] == one.backward[:-1]  # then comes the mark of the second
    assert found[1].seconds == sum(event.seconds for event in (*two.forward, *two.backward))
