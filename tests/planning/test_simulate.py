from __future__ import annotations

import dataclasses
import random

import pytest

import bigbatch as bb
from bigbatch.planning.costs import Line, MemoryProfile, Slot
from bigbatch.planning.seconds import micro_seconds, seconds_without_recompute
from bigbatch.planning.simulate import peak_bytes, step_seconds
from tests.planning.profiles import equal_blocks, every_choice, random_profile, reference_peak, unet

CUTS = [[6], [3, 3], [4, 2], [2, 2, 1], [1, 1, 1, 1]]


def some(choices: list[tuple], seed: int, count: int = 25) -> list[tuple]:
    return random.Random(seed).sample(choices, min(count, len(choices)))


@pytest.mark.parametrize("seed", range(25))
def test_peak_is_that_of_walking_through_every_event(seed):
    profile = random_profile(seed, num_blocks=2 + seed % 6)

    for recompute in some(every_choice(profile), seed):
        for sizes in CUTS:
            assert peak_bytes(profile, sizes, recompute) == reference_peak(profile, sizes, recompute), (
                sizes,
                recompute,
            )


def test_peak_of_skip_connections_is_that_of_walking_through_every_event():
    profile = unet()

    for recompute in every_choice(profile):
        assert peak_bytes(profile, [3, 2], recompute) == reference_peak(profile, [3, 2], recompute), recompute


def test_adding_up_saved_bytes_is_not_the_peak():
    """Control: shared storages counted for each slot, as a plain sum does, are far outside."""
    profile = unet()
    twice = sum(profile.storages[storage].at(4) for slot in profile.slots for storage in slot.saved)

    assert profile.resident_bytes + twice > 1.1 * peak_bytes(profile, [4])


def test_a_module_that_is_called_twice_is_recomputed_in_both_calls():
    profile = with_repeated_name(random_profile(3, num_blocks=5))

    for recompute in every_choice(profile):
        assert peak_bytes(profile, [2, 2], recompute) == reference_peak(profile, [2, 2], recompute)
    assert step_seconds(profile, [1], ("blocks.0",)) - step_seconds(profile, [1]) == pytest.approx(
        sum(slot.recompute_seconds.at(1) for slot in profile.slots if slot.name == "blocks.0"), rel=1e-9
    )


def with_repeated_name(profile: MemoryProfile) -> MemoryProfile:
    slots = [
        dataclasses.replace(
            slot,
            name={"blocks.2": "blocks.0", "blocks.4": "blocks.1"}.get(slot.name or "", slot.name),
            may_recompute=slot.name is not None,
        )
        for slot in profile.slots
    ]
    return dataclasses.replace(profile, slots=tuple(slots))


def test_only_the_last_of_a_group_stops_at_its_last_save():
    profile = equal_blocks(4)
    plain = step_seconds(profile, [2, 1])

    added = step_seconds(profile, [2, 1], (("blocks.1", "blocks.2", "blocks.3"),)) - plain

    assert added == pytest.approx(2 * (2e-5 + 3e-3) + 2e-5 + 3 * 8e-4, rel=1e-9)


def test_a_plan_of_one_micro_batch_has_no_gradients_beside_it():
    """They come into being in its backward; a second micro-batch is beside all of them."""
    profile = dataclasses.replace(equal_blocks(2), gradient_bytes=10**6, update_bytes=0)

    assert peak_bytes(profile, [1, 1]) - peak_bytes(profile, [1]) > 1000
    assert peak_bytes(profile, [1]) == profile.resident_bytes + 50 + 10**6  # the update


def test_time_is_a_line_between_timed_sizes():
    profile = MemoryProfile(0, 0, micro_seconds=((8, 9.0), (2, 3.0), (4, 5.0)), update_seconds=0.5)

    assert [micro_seconds(profile, size) for size in (2, 3, 4, 6, 8, 12)] == [3.0, 4.0, 5.0, 7.0, 9.0, 13.0]
    assert micro_seconds(profile, 1) == 2.0
    assert seconds_without_recompute(profile, [3, 3, 2]) == 0.5 + 4.0 + 4.0 + 3.0


def test_time_beyond_timed_sizes_is_never_absurd():
    """Noise in two timings must not make a large micro-batch free, or a small one negative."""
    noisy = MemoryProfile(0, 0, micro_seconds=((1, 1.0), (2, 5.0), (3, 4.5)))
    steep = MemoryProfile(0, 0, micro_seconds=((4, 1.0), (5, 3.0)))

    assert micro_seconds(noisy, 10) == 4.5
    assert micro_seconds(steep, 1) == 0.25


@pytest.mark.parametrize("timed", [(), ((4, 2.0),)])
def test_without_timed_sizes_fewer_micro_batches_are_faster(timed):
    profile = dataclasses.replace(equal_blocks(3), micro_seconds=timed, slots=untimed(equal_blocks(3).slots))

    assert seconds_without_recompute(profile, [4]) < seconds_without_recompute(profile, [2, 2])


def untimed(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    return tuple(dataclasses.replace(slot, forward_seconds=Line(), recompute_seconds=Line()) for slot in slots)


def test_recompute_always_costs_something():
    profile = dataclasses.replace(equal_blocks(3), slots=untimed(equal_blocks(3).slots), micro_seconds=())

    assert step_seconds(profile, [4], ("blocks.1",)) > step_seconds(profile, [4])


@pytest.mark.parametrize(
    ("recompute", "match"),
    [
        (("blocks.7",), r"\['blocks.7'\], which the profile has no block for. Its blocks are \['blocks.0', "),
        (("blocks.0", ("blocks.0", "blocks.1")), r"\['blocks.0'\] twice"),
        ((("blocks.0", "blocks.2"),), "no neighbours"),
        ((("blocks.1", "blocks.0"),), "no neighbours"),
        (((),), "empty group"),
    ],
)
def test_what_cannot_be_recomputed_is_named(recompute, match):
    with pytest.raises(bb.OptionError, match=match):
        peak_bytes(equal_blocks(4), [2], recompute)
