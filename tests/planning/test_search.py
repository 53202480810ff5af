from __future__ import annotations

import dataclasses
import functools
import math
import random
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

import bigbatch as bb
from bigbatch.batch.sizes import micro_batch_sizes, part_sizes
from bigbatch.planning.costs import Line, MemoryProfile
from bigbatch.planning.naming import segments_of
from bigbatch.planning.search import MARGIN, frontier, search
from bigbatch.planning.simulate import Simulation, peak_bytes, step_seconds
from tests.planning.profiles import equal_blocks, every_choice, random_profile, unet
from tests.planning.test_simulate import untimed, with_repeated_name


class Option(NamedTuple):
    needed: int
    seconds: float
    size: int
    recompute: tuple


def exhaustive(profile: MemoryProfile, batch_size: int) -> list[Option]:
    """Every number of micro-batches with every choice of what to recompute."""
    options = []
    choices = every_choice(profile)
    smallest = profile.smallest_micro_batch
    for size in [*part_sizes(batch_size, smallest), batch_size]:
        sizes = micro_batch_sizes(batch_size, size, smallest)
        simulation = Simulation(profile, sizes)
        for recompute in choices:
            segments = segments_of(simulation.chain, recompute)
            needed = simulation.peak_of(segments) + simulation.workspace_bytes
            options.append(Option(needed, simulation.step_seconds_of(segments), size, recompute))
    return options


def budgets(options: list[Option], count: int = 10) -> list[int]:
    """From just below what works to beyond what is ever needed."""
    low, high = min(o.needed for o in options), max(o.needed for o in options)
    return [round(low * (high / low) ** (step / (count - 1)) / (1 - MARGIN)) + step - 2 for step in range(count)]


def check_against(options: list[Option], profile: MemoryProfile, batch_size: int) -> None:
    for budget in budgets(options):
        fitting = [option for option in options if option.needed <= math.floor(budget * (1 - MARGIN))]
        if not fitting:
            with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
                search(profile, batch_size=batch_size, budget_bytes=budget, margin=MARGIN)
            check_smallest(caught.value.smallest_bytes, options, profile, batch_size)
            continue
        plan = search(profile, batch_size=batch_size, budget_bytes=budget, margin=MARGIN)
        check_is_what_it_says(plan, profile, batch_size, budget)
        assert plan.step_seconds == pytest.approx(min(option.seconds for option in fitting), rel=1e-9), plan


def check_smallest(smallest_bytes: int | None, options: list[Option], profile: MemoryProfile, batch_size: int) -> None:
    """That budget works, one byte less does not, and nobody finds a smaller one."""
    assert smallest_bytes is not None
    least = min(option.needed for option in options)
    assert math.floor(smallest_bytes * (1 - MARGIN)) >= least > math.floor((smallest_bytes - 1) * (1 - MARGIN))
    search(profile, batch_size=batch_size, budget_bytes=smallest_bytes, margin=MARGIN)
    with pytest.raises(bb.BudgetError, match="No plan fits"):
        search(profile, batch_size=batch_size, budget_bytes=smallest_bytes - 1, margin=MARGIN)


def check_is_what_it_says(plan: bb.Plan, profile: MemoryProfile, batch_size: int, budget: int) -> None:
    sizes = micro_batch_sizes(batch_size, plan.micro_batch_size, profile.smallest_micro_batch)
    assert plan.peak_bytes == peak_bytes(profile, sizes, plan.recompute)
    assert plan.peak_bytes + profile.workspace.at(max(sizes)) <= budget * (1 - MARGIN), "over budget"
    assert plan.step_seconds == pytest.approx(step_seconds(profile, sizes, plan.recompute), rel=1e-12)
    assert (plan.accumulation_steps, plan.budget_bytes) == (len(sizes), budget)


@pytest.mark.parametrize("seed", range(30))
def test_plan_is_the_best_of_all_there_are(seed):
    profile = random_profile(seed, num_blocks=2 + seed % 5, smallest_micro_batch=1 + seed % 2)
    batch_size = 1 + seed % 7

    check_against(exhaustive(profile, batch_size), profile, batch_size)


@pytest.mark.parametrize(
    ("name", "batch_size"), [("equal", 3), ("unequal", 2), ("skips", 3), ("heavy head", 2), ("repeated", 5)]
)
def test_plan_of_a_longer_chain_is_the_best_of_all_there_are(name, batch_size):
    profile = {
        "equal": lambda: equal_blocks(8),
        "unequal": lambda: random_profile(100, num_blocks=10),
        "skips": unet,
        "heavy head": heavy_head,
        "repeated": lambda: with_repeated_name(random_profile(7, num_blocks=7)),
    }[name]()

    check_against(exhaustive(profile, batch_size), profile, batch_size)


def heavy_head() -> MemoryProfile:
    """Logits and loss take more than all blocks: recompute of blocks that run before helps, of none it is enough."""
    profile = equal_blocks(6)
    head = dataclasses.replace(profile.slots[-1], forward=Line(0, 9000), backward=Line(0, 12000))
    return dataclasses.replace(profile, slots=(*profile.slots[:-1], head))


def test_the_micro_batch_size_and_what_is_recomputed_are_chosen_together():
    """Neither the largest micro-batch nor the one without recompute is always best: both happen."""
    profile = equal_blocks(8)
    options = exhaustive(profile, 6)
    plans = [search(profile, batch_size=6, budget_bytes=budget) for budget in budgets(options, 40)[3:]]

    largest = [max(o.size for o in options if o.needed <= (plan.budget_bytes or 0) * 0.98) for plan in plans]
    assert any(plan.micro_batch_size < size for plan, size in zip(plans, largest, strict=True))
    assert any(plan.recompute for plan in plans)
    assert any(isinstance(entry, tuple) for plan in plans for entry in plan.recompute), "groups are never chosen"


def test_saved_bytes_without_positions_break_the_budget():
    """Control: dropping enough saved bytes, wherever their blocks are, is not what keeps a peak down."""
    profile, sizes = unet(), [4, 4]
    simulation = Simulation(profile, sizes)
    choices = [choice for choice in every_choice(profile) if all(isinstance(entry, str) for entry in choice)]
    direct = simulation.peak_of(())
    peaks = {choice: simulation.peak_of(segments_of(simulation.chain, choice)) for choice in choices}
    own = {slot.name: sum(profile.storages[s].at(4) for s in slot.saved) for slot in profile.slots if slot.name}
    over = 0
    for step in range(20):
        budget = min(peaks.values()) + (direct - min(peaks.values())) * (step + 0.5) / 20
        enough = [choice for choice in choices if sum(own[name] for name in choice) >= direct - budget]
        blind = min(enough, key=lambda choice: step_seconds(profile, sizes, choice))
        over += peaks[blind] > budget
        plan = search(profile, batch_size=8, micro_batch_size=4, budget_bytes=math.ceil(budget), margin=0)
        assert (plan.peak_bytes or 0) <= math.ceil(budget)

    assert over >= 5


@functools.cache
def many_plans() -> list[tuple[MemoryProfile, bb.Plan]]:
    plans = []
    for seed in range(20):
        profile = random_profile(seed, num_blocks=12)
        plans += [(profile, plan) for plan in frontier(profile, batch_size=1 + random.Random(seed).randrange(12))]
    return plans


def test_nothing_is_recomputed_in_vain():
    """Leaving out any one entry gives a higher peak than the frontier's plan of that peak."""
    assert len(many_plans()) > 100
    for profile, plan in many_plans():
        batch_size = plan.micro_batch_size * (plan.accumulation_steps or 1)
        sizes = micro_batch_sizes(batch_size, plan.micro_batch_size, profile.smallest_micro_batch)
        full = peak_bytes(profile, sizes, plan.recompute)
        for entry in plan.recompute:
            rest = tuple(other for other in plan.recompute if other != entry)
            assert peak_bytes(profile, sizes, rest) > full, (entry, plan)


def test_the_last_block_is_not_recomputed_where_the_peak_is_in_its_backward():
    """With a light head, its backward is the peak, and a second forward only comes on top of it."""
    profile = equal_blocks(6)
    plans = frontier(profile, batch_size=1)

    assert any(plan.recompute for plan in plans)
    assert not any(entry == "blocks.5" for plan in plans[1:] for entry in plan.recompute)


def test_a_block_whose_input_is_as_large_as_what_it_saves_is_not_recomputed():
    profile = equal_blocks(5)
    slots = [
        dataclasses.replace(slot, saved=slot.inputs) if slot.name == "blocks.2" else slot for slot in profile.slots
    ]

    plans = frontier(dataclasses.replace(profile, slots=tuple(slots)), batch_size=4)

    assert not any("blocks.2" in plan.recompute for plan in plans)


@pytest.mark.parametrize("seed", range(12))
def test_frontier_is_monotone_and_every_plan_of_it_is_the_best(seed):
    profile, batch_size = dataclasses.replace(random_profile(seed, num_blocks=5), workspace=Line()), 1 + seed % 6
    options = exhaustive(profile, batch_size)
    plans = frontier(profile, batch_size=batch_size)
    peaks = [plan.peak_bytes or 0 for plan in plans]
    seconds = [plan.step_seconds or 0.0 for plan in plans]

    assert peaks == sorted(set(peaks))
    assert seconds == sorted(set(seconds), reverse=True)
    assert seconds[-1] == pytest.approx(min(option.seconds for option in options), rel=1e-9)
    assert len(plans) <= 40
    assert peaks[0] == min(option.needed for option in options)
    for plan in plans:
        as_lean = [option.seconds for option in options if option.needed <= (plan.peak_bytes or 0)]
        assert plan.step_seconds == pytest.approx(min(as_lean), rel=1e-9)


def test_frontier_of_a_small_model_has_all_that_is_worth_it():
    profile = equal_blocks(3)
    options = [option for option in exhaustive(profile, 2) if option.size == 2]
    worth = {
        round(o.seconds, 9)
        for o in options
        if not any(other.needed <= o.needed and other.seconds < o.seconds * (1 - 1e-9) for other in options)
    }

    plans = frontier(profile, batch_size=2, micro_batch_size=2, most=1000)

    assert {round(plan.step_seconds or 0, 9) for plan in plans} == worth


def uniform_policies(profile: MemoryProfile) -> list[tuple]:
    """What people do by hand: nothing, every k-th block, the first half, equal segments."""
    names = [slot.name for slot in profile.slots if slot.may_recompute]
    policies: list[tuple] = [(), tuple(names[: len(names) // 2]), tuple(names[len(names) // 2 :])]
    policies += [tuple(names[::step]) for step in (1, 2, 3, 4, 6)]
    for length in (2, 3, 4, 6, 10):
        groups = [tuple(names[start : start + length]) for start in range(0, len(names), length)]
        policies.append(tuple(group[0] if len(group) == 1 else group for group in groups))
    return policies


def test_in_a_long_chain_no_uniform_policy_is_better():
    """There are too many choices to try them all."""
    profile = equal_blocks(40)
    seconds = [slot.forward_seconds.per_sample * (1 + 0.5 * math.sin(i)) for i, slot in enumerate(profile.slots)]
    slots = [
        dataclasses.replace(slot, forward_seconds=Line(0, second), recompute_seconds=Line(0, 0.8 * second))
        for slot, second in zip(profile.slots, seconds, strict=True)
    ]
    profile, sizes = dataclasses.replace(profile, slots=tuple(slots)), [4, 4]
    better = 0
    for policy in uniform_policies(profile):
        budget = peak_bytes(profile, sizes, policy)

        plan = search(profile, batch_size=8, micro_batch_size=4, budget_bytes=budget, margin=0)

        assert (plan.peak_bytes or 0) <= budget
        assert (plan.step_seconds or 0) <= step_seconds(profile, sizes, policy) * (1 + 1e-9), policy
        better += (plan.step_seconds or 0) < step_seconds(profile, sizes, policy) * 0.99
    assert better >= 6


@pytest.mark.parametrize("name", ["many skips", "two calls of each"])
def test_the_smallest_budget_works_in_a_long_chain_too(name):
    """More states than are kept: the one choice that fits must not be lost."""
    profile = random_profile(2, num_blocks=40) if name == "many skips" else called_twice(equal_blocks(20))
    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        search(profile, batch_size=2, budget_bytes=1)
    smallest = caught.value.smallest_bytes or 0

    assert (search(profile, batch_size=2, budget_bytes=smallest).peak_bytes or 0) <= smallest * (1 - MARGIN)
    peaks = [plan.peak_bytes or 0 for plan in frontier(profile, batch_size=2)]
    assert peaks == sorted(set(peaks))
    assert len(peaks) > 5


def called_twice(profile: MemoryProfile) -> MemoryProfile:
    """The second half of the blocks are the first half again."""
    names = [slot.name for slot in profile.slots if slot.name]
    first = dict(zip(names[len(names) // 2 :], names, strict=False))
    slots = [dataclasses.replace(slot, name=first.get(slot.name or "", slot.name)) for slot in profile.slots]
    return dataclasses.replace(profile, slots=tuple(slots))


def test_of_two_plans_that_are_as_fast_the_leaner_one_is_taken():
    """All blocks cost the same; with early ones recomputed the peak is lower than with late ones."""
    profile = equal_blocks(6)
    options = [option for option in exhaustive(profile, 1) if option.size == 1]
    for budget in budgets(options, 20)[3:]:
        plan = search(profile, batch_size=1, budget_bytes=budget, margin=MARGIN)
        as_fast = [option.needed for option in options if option.seconds <= (plan.step_seconds or 0) * (1 + 1e-9)]

        assert plan.peak_bytes == min(as_fast)


def test_the_frontier_of_eighty_blocks_takes_seconds():
    """Of the processor, so that others on the machine do not count."""
    start = time.process_time()

    plans = frontier(equal_blocks(80, num_own=20), batch_size=64)

    assert time.process_time() - start < 5
    assert 20 <= len(plans) <= 40


def test_a_frontier_holds_what_is_held():
    profile = equal_blocks(6)

    assert {plan.recompute for plan in frontier(profile, batch_size=8, recompute="none")} == {()}
    assert {plan.micro_batch_size for plan in frontier(profile, batch_size=8, micro_batch_size=4)} == {4}
    assert len(frontier(profile, batch_size=8, micro_batch_size=4, recompute="all")) == 1
    assert len(frontier(profile, batch_size=8, most=3)) <= 3


def test_choices_that_are_held_stay():
    profile = equal_blocks(4)
    plenty = {"batch_size": 8, "budget_bytes": 10**9}
    group = ("blocks.0", ("blocks.2", "blocks.3"))

    assert search(profile, **plenty, micro_batch_size=3).micro_batch_size == 3
    assert search(profile, **plenty, micro_batch_size=3).accumulation_steps == 3
    assert search(profile, **plenty, recompute="all").recompute == tuple(f"blocks.{index}" for index in range(4))
    assert search(profile, **plenty, recompute="none").recompute == ()
    assert search(profile, **plenty, recompute=group).recompute == group
    tight = (search(profile, **plenty, recompute=group, micro_batch_size=2).peak_bytes or 0) * 1.03
    assert search(profile, batch_size=8, budget_bytes=int(tight), recompute=group).recompute == group


def test_where_nothing_fits_the_error_says_what_would():
    profile = equal_blocks(4)

    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        search(profile, batch_size=8, budget_bytes=10_000)
    smallest = caught.value.smallest_bytes or 0
    assert str(caught.value).startswith("No plan fits in 9.77 KiB: even micro-batches of 1 with ")
    assert "of which 1% is kept free. Raise the budget by " in str(caught.value)
    assert caught.value.budget_bytes == 10_000
    assert search(profile, batch_size=8, budget_bytes=smallest).micro_batch_size == 1

    with pytest.raises(bb.BudgetError, match="even micro-batches of 4 need") as caught:
        search(profile, batch_size=8, budget_bytes=10_000, micro_batch_size=4, recompute="none")
    needed = caught.value.smallest_bytes or 0
    assert needed > smallest
    assert search(profile, batch_size=8, budget_bytes=needed, micro_batch_size=4, recompute="none").recompute == ()


def test_the_workspace_counts_against_the_budget():
    profile = dataclasses.replace(equal_blocks(4), workspace=Line(0, 2000))
    plain = search(equal_blocks(4), batch_size=4, budget_bytes=10**6)

    assert search(profile, batch_size=4, budget_bytes=10**6).peak_bytes == plain.peak_bytes
    tight = math.ceil((plain.peak_bytes or 0) / (1 - MARGIN))
    assert search(equal_blocks(4), batch_size=4, budget_bytes=tight) == dataclasses.replace(plain, budget_bytes=tight)
    assert search(profile, batch_size=4, budget_bytes=tight) != dataclasses.replace(plain, budget_bytes=tight)


def test_batchnorm_never_gets_one_sample():
    profile = dataclasses.replace(equal_blocks(4), smallest_micro_batch=2)

    for plan in frontier(profile, batch_size=9):
        assert min(micro_batch_sizes(9, plan.micro_batch_size, 2)) >= 2


def test_without_times_the_largest_micro_batch_is_taken_and_nothing_is_recomputed_in_vain():
    profile = dataclasses.replace(equal_blocks(4), slots=untimed(equal_blocks(4).slots), micro_seconds=())

    plan = search(profile, batch_size=8, budget_bytes=10**9)

    assert (plan.micro_batch_size, plan.recompute) == (8, ())


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"budget_bytes": 0}, "budget_bytes=0"),
        ({"margin": 1}, "margin=1; it is a share"),
        ({"margin": -0.1}, "margin=-0.1; it is a share"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"recompute": "some"}, 'recompute=\'some\'; it is "all", "none"'),
        ({"recompute": ("head",)}, "no block for"),
    ],
)
def test_options_out_of_range_are_refused(option, match):
    with pytest.raises(bb.OptionError, match=match):
        search(equal_blocks(2), **{"batch_size": 4, "budget_bytes": 10**9, **option})


def test_no_torch_is_needed():
    code = "import sys, bigbatch.planning.search; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)
