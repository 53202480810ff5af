"""Parts of blocks: what they hold and cost, that the search uses them, and how a plan names them."""

from __future__ import annotations

import dataclasses
import time

import pytest

import bigbatch as bb
from bigbatch.planning.costs import Line, MemoryProfile, Part
from bigbatch.planning.search import frontier, search
from bigbatch.planning.simulate import peak_bytes, step_seconds
from tests.planning.profiles import equal_blocks, every_choice, random_profile, reference_peak, unet, with_parts
from tests.planning.test_search import check_against, exhaustive
from tests.planning.test_simulate import CUTS, some, with_repeated_name


@pytest.mark.parametrize("seed", range(25))
def test_peak_with_parts_is_that_of_walking_through_every_event(seed):
    """Parts hold what other slots save too, what is an argument, and what nobody else has."""
    profile = with_parts(random_profile(seed, num_blocks=2 + seed % 5), seed)
    choices = [choice for choice in every_choice(profile) if any(is_part(entry, profile) for entry in choice)]

    assert choices
    for recompute in some(choices, seed):
        for sizes in CUTS:
            assert peak_bytes(profile, sizes, recompute) == reference_peak(profile, sizes, recompute), (
                sizes,
                recompute,
            )


def is_part(entry: str | tuple[str, ...], profile: MemoryProfile) -> bool:
    return isinstance(entry, str) and entry not in [slot.name for slot in profile.slots]


def equal_parts(num_blocks: int = 3) -> MemoryProfile:
    """Of the 240 + 248 + 256 + 264 bytes that a block saves beside its input, `mlp` need not hold the last 520."""
    profile = equal_blocks(num_blocks)
    slots = [
        dataclasses.replace(
            slot,
            parts=(
                Part((f"{slot.name}.mlp",), slot.saved[:3], Line(0, 2e-4)),
                Part((f"{slot.name}.attention", f"{slot.name}.mlp"), slot.saved[:2], Line(0, 5e-4)),
            ),
        )
        if slot.name
        else dataclasses.replace(slot, forward=Line(), backward=Line(), saved=slot.saved[:1])
        for slot in profile.slots
    ]
    return dataclasses.replace(profile, slots=tuple(slots), update_bytes=0, gradient_bytes=0)


def test_a_part_holds_the_rest_and_is_all_there_in_its_own_backward():
    """By hand: the peak is in the backward of the last block, so a part of it saves nothing, and one before it does."""
    profile = equal_parts()
    plain = peak_bytes(profile, [4])

    assert plain - peak_bytes(profile, [4], ("blocks.0.mlp",)) == 4 * (256 + 264)
    assert plain - peak_bytes(profile, [4], ("blocks.1.mlp", "blocks.1.attention")) == 4 * (248 + 256 + 264)
    assert peak_bytes(profile, [4], ("blocks.2.mlp",)) == plain
    assert step_seconds(profile, [3, 1], ("blocks.1.mlp",)) - step_seconds(profile, [3, 1]) == pytest.approx(4 * 2e-4)


def test_a_part_is_not_its_whole_block():
    """Control: what is held and what it costs are both far from those of the block."""
    profile = equal_parts()
    held = peak_bytes(profile, [4], ("blocks.0.mlp",)) - peak_bytes(profile, [4], ("blocks.0",))
    more = step_seconds(profile, [4], ("blocks.0",)) - step_seconds(profile, [4], ("blocks.0.mlp",))

    assert held > 4 * 400
    assert more > 4 * 4e-4


def test_a_part_of_a_module_that_is_called_twice_is_recomputed_in_both_calls():
    profile = called_in_parts(with_repeated_name(random_profile(3, num_blocks=5)))
    for choice in every_choice(profile):
        assert peak_bytes(profile, [2, 2], choice) == reference_peak(profile, [2, 2], choice)
    both = [slot.parts[-1].recompute_seconds.at(1) for slot in profile.slots if slot.name == "blocks.0"]

    assert len(both) == 2
    assert step_seconds(profile, [1], ("blocks.0.mlp",)) - step_seconds(profile, [1]) == pytest.approx(sum(both))


def called_in_parts(profile: MemoryProfile) -> MemoryProfile:
    """All blocks with a part `mlp`; the one that only a second call has is not to be recomputed."""
    slots, seen = [], set()
    for slot in profile.slots:
        mlp = Part((f"{slot.name}.mlp",), slot.saved[1:], Line(0, 0.1 + len(slots) / 100))
        only_later = Part((f"{slot.name}.norm",), slot.saved[2:], Line(0, 1e-3))
        parts = (only_later, mlp) if slot.name in seen else (mlp,)
        seen.add(slot.name)
        slots.append(dataclasses.replace(slot, parts=parts if slot.name else ()))
    return dataclasses.replace(profile, slots=tuple(slots))


def test_a_profile_with_parts_is_the_same_after_json():
    profile = with_parts(random_profile(1, num_blocks=4), seed=1)

    assert sum(len(slot.parts) for slot in profile.slots) >= 4
    assert MemoryProfile.from_json(profile.to_json()) == profile


def test_a_module_that_is_in_two_blocks_is_no_part():
    """It would be recomputed in both of them, or in none."""
    profile = equal_parts()
    slots = [
        dataclasses.replace(slot, parts=(*slot.parts, Part(("shared",), slot.saved[:1]))) if slot.name else slot
        for slot in profile.slots
    ]

    with pytest.raises(bb.OptionError, match="'shared'.* which the profile has no block for"):
        peak_bytes(dataclasses.replace(profile, slots=tuple(slots)), [4], ("shared",))


@pytest.mark.parametrize(
    ("recompute", "match"),
    [
        (
            ("blocks.0.norm",),
            r"no block for.* Inside of \['blocks.0'\] it knows \['blocks.0.mlp', 'blocks.0.attention'\]",
        ),
        (
            ("blocks.0.attention",),
            "knows what these cost: 'blocks.0.mlp'; 'blocks.0.attention' with 'blocks.0.mlp'. Name",
        ),
        (("blocks.0.mlp", "blocks.0"), r"'blocks.0' and \['blocks.0.mlp'\] inside of it. Name the block, or only"),
        (("blocks.0.mlp", ("blocks.0", "blocks.1")), "inside of it"),
        ((("blocks.0.mlp", "blocks.1"),), "parts of blocks, which are not recomputed in groups"),
        (("blocks.0.mlp", "blocks.0.mlp"), "twice"),
    ],
)
def test_what_is_no_part_is_named(recompute, match):
    with pytest.raises(bb.OptionError, match=match):
        peak_bytes(equal_parts(), [2], recompute)


@pytest.mark.parametrize("seed", range(30))
def test_plan_with_parts_is_the_best_of_all_there_are(seed):
    profile = with_parts(random_profile(seed, num_blocks=2 + seed % 4, smallest_micro_batch=1 + seed % 2), seed)
    batch_size = 1 + seed % 5

    check_against(exhaustive(profile, batch_size), profile, batch_size)


@pytest.mark.parametrize("name", ["equal", "skips", "repeated"])
def test_plan_with_parts_of_a_longer_chain_is_the_best_of_all_there_are(name):
    profile = {
        "equal": lambda: with_parts(equal_blocks(6), seed=0, most=2),
        "skips": lambda: with_parts(unet(3), seed=1, most=2),
        "repeated": lambda: called_in_parts(with_repeated_name(random_profile(7, num_blocks=6))),
    }[name]()

    check_against(exhaustive(profile, 2), profile, 2)


def test_parts_make_plans_faster():
    """Control: with the same budgets, the search without parts has slower plans."""
    profile = equal_parts(5)
    without = dataclasses.replace(profile, slots=tuple(dataclasses.replace(slot, parts=()) for slot in profile.slots))
    direct, all_of_it = (peak_bytes(without, [64], names) for names in ((), [f"blocks.{i}" for i in range(5)]))
    pairs = []
    for step in range(1, 10):
        limit = {
            "batch_size": 64,
            "micro_batch_size": 64,
            "budget_bytes": all_of_it + (direct - all_of_it) * step // 10,
        }
        seconds = [search(found, **limit, margin=0).step_seconds or 0.0 for found in (profile, without)]
        pairs.append([found - step_seconds(profile, [64]) for found in seconds])

    assert all(with_them <= without_them for with_them, without_them in pairs)
    assert sum(with_them < 0.9 * without_them for with_them, without_them in pairs) >= 5, pairs


def test_parts_can_be_held_and_are_none_of_all_blocks():
    profile = with_parts(equal_blocks(4), seed=3)
    part = next(slot.parts[0] for slot in profile.slots if slot.parts)
    plenty = {"batch_size": 8, "budget_bytes": 10**9}

    assert search(profile, **plenty, recompute=part.names).recompute == part.names
    assert search(profile, **plenty, recompute="all").recompute == tuple(f"blocks.{index}" for index in range(4))
    assert search(profile, **plenty, recompute="none").recompute == ()


def test_the_frontier_of_eighty_blocks_with_three_parts_each_takes_seconds():
    """Of the processor, so that others on the machine do not count."""
    profile = with_parts(equal_blocks(80, num_own=20), seed=0, most=3)
    start = time.process_time()

    plans = frontier(profile, batch_size=64)

    assert time.process_time() - start < 5
    assert any(entry.count(".") > 1 for plan in plans for entry in plan.recompute if isinstance(entry, str))
