"""A plan explained: the figures add up to the peak, and to what the plan saves."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import bigbatch as bb
from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.planning.costs import Line, MemoryProfile, Part, Slot
from bigbatch.planning.explanation import Explanation, explain
from bigbatch.planning.search import frontier, search
from bigbatch.planning.simulate import peak_bytes, step_seconds
from tests.planning.profiles import every_choice, random_profile, reference_peak, with_parts
from tests.planning.test_search import exhaustive

BLOCKS = 4
RESIDENT = 4000 + 8000 + 100 + 50 + 10


def make_profile(**changes) -> MemoryProfile:
    """Four equal blocks: each saves 100 bytes a sample and its input of 20, has gradients of 1000."""
    blocks = [
        Slot(
            f"blocks.{i}",
            kind="Block",
            saved=(2 * i, 2 * i + 1),
            inputs=(2 * i,),
            forward=Line(0, 130),
            recompute=Line(0, 110),
            backward=Line(0, 60),
            backward_first=Line(1000 * (BLOCKS - i), 60),
            pending=Line(0, 20),
            pending_first=Line(1000 * (BLOCKS - 1 - i), 20),
            forward_seconds=Line(0.001, 0.01),
            recompute_seconds=Line(0.001, 0.008),
            may_recompute=True,
            follows=i > 0,
        )
        for i in range(BLOCKS)
    ]
    profile = MemoryProfile(
        parameter_bytes=4000,
        gradient_bytes=4000,
        optimizer_bytes=8000,
        buffer_bytes=100,
        average_bytes=50,
        other_bytes=10,
        update_bytes=500,
        batch=Line(0, 10),
        storages=tuple(Line(0, size) for _ in range(BLOCKS) for size in (20, 100)),
        slots=(Slot(None), *blocks, Slot(None, forward=Line(0, 5), backward=Line(0, 5), backward_first=Line(0, 5))),
        workspace=Line(7, 0),
        micro_seconds=((1, 0.3), (2, 0.4), (4, 0.7), (8, 1.3)),
        update_seconds=0.05,
    )
    return dataclasses.replace(profile, **changes)


def explained(plan: bb.Plan, *, profile: MemoryProfile | None = None, batch_size: int = 8) -> Explanation:
    return explain(profile or make_profile(), plan, batch_size=batch_size, budget_bytes=20_000, others=())


RECOMPUTE = [
    (),
    ("blocks.0",),
    ("blocks.1", "blocks.3"),
    (("blocks.0", "blocks.1"),),
    (("blocks.0", "blocks.1", "blocks.2"), "blocks.3"),
    ("blocks.0", "blocks.1", "blocks.2", "blocks.3"),
]
PROFILES = [make_profile(), make_profile(update_bytes=9000), make_profile(gradient_bytes=4000, batch_is_whole=False)]


@pytest.mark.parametrize("profile", PROFILES, ids=["forward", "update", "moved"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5, 8, 99])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_figures_add_up(profile, micro_batch_size, recompute):
    found = explained(bb.Plan(micro_batch_size, recompute=recompute), profile=profile)
    sizes = micro_batch_sizes(8, micro_batch_size)

    assert found.peak_bytes == peak_bytes(profile, sizes, recompute)
    assert sum(found.kinds.values()) == found.peak_bytes
    assert min(found.kinds.values()) >= 0
    assert sum(lever.saved_bytes for lever in found.levers) == found.direct_bytes - found.peak_bytes
    assert found.direct_bytes == peak_bytes(profile, [8])
    assert found.step_seconds == pytest.approx(step_seconds(profile, sizes, recompute))
    assert sum(lever.added_seconds for lever in found.levers) == pytest.approx(
        found.step_seconds - found.direct_seconds
    )
    recomputing = [lever.added_seconds for lever in found.levers if lever.name == "recompute"]
    assert sum(block.recompute_seconds for block in found.blocks) == pytest.approx(sum(recomputing))


@pytest.mark.parametrize("seed", range(25))
def test_figures_add_up_to_an_independent_count(seed):
    """Skips, shared storages, glue: against a walk event by event that knows no moves and no moments."""
    profile = random_profile(seed, num_blocks=5)
    choices = every_choice(profile)
    for recompute in choices[:: max(1, len(choices) // 7)]:
        sizes = micro_batch_sizes(7, 3, profile.smallest_micro_batch)
        found = explained(bb.Plan(3, recompute=recompute), profile=profile, batch_size=7)

        assert sum(found.kinds.values()) == found.peak_bytes == reference_peak(profile, sizes, recompute)
        assert min(found.kinds.values()) >= 0
        assert sum(lever.saved_bytes for lever in found.levers) == found.direct_bytes - found.peak_bytes


@pytest.mark.parametrize("seed", range(12))
def test_figures_with_parts_add_up_to_an_independent_count(seed):
    profile = with_parts(random_profile(seed, num_blocks=4), seed)
    choices = every_choice(profile)
    for recompute in choices[:: max(1, len(choices) // 9)]:
        sizes = micro_batch_sizes(7, 3, profile.smallest_micro_batch)
        found = explained(bb.Plan(3, recompute=recompute), profile=profile, batch_size=7)
        added = step_seconds(profile, sizes, recompute) - step_seconds(profile, sizes)

        assert sum(found.kinds.values()) == found.peak_bytes == reference_peak(profile, sizes, recompute)
        assert min(found.kinds.values()) >= 0
        assert sum(block.recompute_seconds for block in found.blocks) == pytest.approx(added)
        assert {name for block in found.blocks for name in block.parts} <= set(recompute)


def test_the_peak_by_hand():
    """Micro-batches of 2: in the backward of the last block all four hold 120 a sample, and gradients are there."""
    found = explained(bb.Plan(2))

    assert found.kinds == {
        "parameters": 4000,
        "gradients": 4000,
        "optimizer": 8000,
        "buffers": 100,
        "averages": 50,
        "other": 10,
        "inputs": 80,
        "saved": 4 * 120 * 2,
        "work": 60 * 2,
    }
    assert found.peak_bytes == RESIDENT + 80 + 4000 + 960 + 120
    assert found.workspace_bytes == 7
    assert found.headroom_bytes == 20_000 - 7 - found.peak_bytes


def test_the_direct_batch_by_hand():
    """The batch of 8: in the backward of the first block gradients of all four are there, and 120 a sample is held."""
    found = explained(bb.Plan(8))

    assert found.direct_bytes == found.peak_bytes == RESIDENT + 80 + 120 * 8 + 4000 + 60 * 8
    assert (found.kinds["gradients"], found.kinds["saved"], found.kinds["work"]) == (4000, 960, 480)
    assert found.direct_of_budget == pytest.approx(17_680 / 20_000)
    assert found.levers == ()


def test_forgetting_gradients_between_micro_batches_is_not_the_peak():
    """Control: without the gradients that lie there while the next micro-batch runs, 1000s of bytes are missing."""
    kept = next(lever for lever in explained(bb.Plan(2)).levers if lever.name == "gradients kept between them")

    assert kept.saved_bytes < -400


def test_blocks_hold_what_they_save_and_recomputed_ones_their_inputs():
    found = explained(bb.Plan(2, recompute=("blocks.0", ("blocks.1", "blocks.2"))))
    held = {block.name: (block.saved_bytes, block.held_bytes, block.recomputed) for block in found.blocks}

    assert held == {
        "blocks.0": (240, 40, True),
        "blocks.1": (240, 40, True),
        "blocks.2": (240, 0, True),
        "blocks.3": (240, 240, False),
        "": (0, 0, False),
    }
    assert [block.kind for block in found.blocks] == ["Block"] * 4 + [""]


def test_a_block_of_which_a_part_is_recomputed_holds_the_rest():
    """By hand: each block saves 20 and 100 a sample, and 16 of the 100 are all that is held beside the input."""
    profile = make_profile()
    storages = (*profile.storages, Line(0, 16))
    slots = list(profile.slots)
    slots[2] = dataclasses.replace(slots[2], parts=(Part(("blocks.1.mlp",), (2, 8), Line(0, 0.002)),))
    profile = dataclasses.replace(profile, storages=storages, slots=tuple(slots))
    found = explained(bb.Plan(2, recompute=("blocks.1.mlp",)), profile=profile)
    block = next(block for block in found.blocks if block.name == "blocks.1")

    assert (block.saved_bytes, block.held_bytes) == (240, 72)
    assert (block.recomputed, block.parts) == (True, ("blocks.1.mlp",))
    assert block.recompute_seconds == pytest.approx(8 * 0.002)
    assert [other.name for other in found.blocks if other.recomputed] == ["blocks.1"]
    assert found.levers[-1].saved_bytes == 240 - 72


@pytest.mark.parametrize(
    ("changes", "limit", "text"),
    [
        ({}, "resident", "neither smaller micro-batches nor recompute"),
        ({"update_bytes": 90_000}, "update", "The optimizer's update needs 87.89 KiB of 103.75 KiB"),
        ({"batch": Line(0, 9000)}, "inputs", "The batch itself is 70.31 KiB"),
        ({"storages": (Line(0, 9000),) * 8}, "saved", "What the forward keeps for backward is .* at 'blocks.3'"),
    ],
)
def test_what_limits_is_named(changes, limit, text):
    found = explained(bb.Plan(2), profile=make_profile(**changes))

    assert found.limit == limit
    assert re.search(text, found.limit_text)


def test_work_after_the_last_block_is_named_by_its_place():
    profile = make_profile()
    head = Slot(None, forward=Line(0, 40_000), backward=Line(0, 50_000), backward_first=Line(0, 50_000))
    found = explained(bb.Plan(2), profile=dataclasses.replace(profile, slots=(*profile.slots[:-1], head)))

    assert found.limit == "work"
    assert "One part of the model alone needs 97.66 KiB" in found.limit_text
    assert "what comes after 'blocks.3'" in found.limit_text


def test_neighbours_are_those_of_the_frontier():
    profile = make_profile()
    plans = frontier(profile, batch_size=8)
    middle = len(plans) // 2
    found = explain(profile, plans[middle], batch_size=8, budget_bytes=20_000, others=plans)

    assert len(plans) >= 3
    assert (found.leaner, found.faster) == (plans[middle - 1], plans[middle + 1])
    assert explain(profile, plans[0], batch_size=8, budget_bytes=20_000, others=plans).leaner is None
    assert explain(profile, plans[-1], batch_size=8, budget_bytes=20_000, others=plans).faster is None


@pytest.mark.parametrize("workspace", [Line(7, 0), Line(0, 300)])
def test_neighbours_are_searched_for_about_a_hundredth_of_the_memory_away(workspace):
    """Against all plans there are. The workspace counts: those of two cuts need two of them."""
    profile = make_profile(workspace=workspace)
    options = exhaustive(profile, 8)
    worth = [o for o in options if not any(p.needed <= o.needed and p.seconds < o.seconds - 1e-9 for p in options)]
    assert len({round(option.seconds, 9) for option in worth}) >= 6
    for option in worth:
        found = explain(profile, bb.Plan(option.size, recompute=option.recompute), batch_size=8, budget_bytes=20_000)
        below = [o for o in worth if o.needed <= 0.99 * option.needed] or [o for o in worth if o.needed < option.needed]
        above = [o.needed for o in worth if o.seconds < option.seconds - 1e-9]
        leaner, faster = found.leaner, found.faster

        assert (leaner is None, faster is None) == (not below, not above)
        if leaner is not None:
            assert leaner.step_seconds == pytest.approx(min(o.seconds for o in below))
            assert (leaner.peak_bytes or 0) + workspace.at(leaner.micro_batch_size) < option.needed
        if faster is not None:
            assert (faster.step_seconds or 0) < option.seconds
            assert (faster.peak_bytes or 0) + workspace.at(faster.micro_batch_size) <= 1.01 * min(above) + 1


def test_a_plan_that_was_found_has_headroom():
    profile = make_profile()
    plan = search(profile, batch_size=8, budget_bytes=17_500)

    assert 0 < explain(profile, plan, batch_size=8, budget_bytes=17_500, others=()).headroom_bytes < 17_500 - RESIDENT


def test_it_is_json():
    found = explain(make_profile(), bb.Plan(2, recompute=("blocks.0",)), batch_size=8, budget_bytes=20_000)
    again = json.loads(json.dumps(dataclasses.asdict(found)))

    assert again["peak_bytes"] == found.peak_bytes
    assert list(again) == [spec.name for spec in dataclasses.fields(Explanation)]


def test_a_block_that_is_not_there_is_an_error():
    with pytest.raises(bb.OptionError, match="which the profile has no block for"):
        explained(bb.Plan(2, recompute=("layers.0",)))
