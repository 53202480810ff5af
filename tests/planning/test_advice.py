"""What else would help where no plan fits, and when accumulation is the wrong tool."""

from __future__ import annotations

import pytest
import torch

import bigbatch as bb
from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.planning.advice import Relief, smallest_bytes, what_else, with_advice, wrong_tool
from bigbatch.planning.costs import Line, MemoryProfile
from bigbatch.planning.search import frontier, search
from bigbatch.planning.simulate import peak_bytes
from bigbatch.stepping.checks import update_is_lean
from tests.planning.profiles import random_profile
from tests.planning.test_explanation import make_profile

MUCH = 10**9


def reliefs(profile: MemoryProfile, *, batch_size: int = 8, budget_bytes: int = MUCH) -> dict[str, Relief]:
    return {
        found.name.split(" ")[0]: found
        for found in what_else(profile, batch_size=batch_size, budget_bytes=budget_bytes)
    }


@pytest.mark.parametrize("batch_size", [1, 2, 7, 8])
@pytest.mark.parametrize("smallest", [1, 2])
def test_the_smallest_peak_is_where_the_search_begins_to_have_a_plan(batch_size, smallest):
    profile = make_profile(smallest_micro_batch=smallest)
    found = smallest_bytes(profile, batch_size)

    assert search(profile, batch_size=batch_size, budget_bytes=found, margin=0)
    with pytest.raises(bb.BudgetError, match="No plan fits"):
        search(profile, batch_size=batch_size, budget_bytes=found - 1, margin=0)


@pytest.mark.parametrize("seed", range(25))
def test_the_smallest_peak_of_unequal_blocks(seed):
    profile = random_profile(seed, num_blocks=4)
    found = smallest_bytes(profile, 6)

    assert search(profile, batch_size=6, budget_bytes=found, margin=0)
    with pytest.raises(bb.BudgetError, match="No plan fits"):
        search(profile, batch_size=6, budget_bytes=found - 1, margin=0)


def test_a_quarter_of_the_optimizer_state_is_what_stays():
    found = reliefs(make_profile())["An"]

    assert found.name == "An 8-bit optimizer"
    assert found.saved_bytes == 8000 - 2000


def test_sgd_saves_the_state_and_leaves_the_copies_of_the_update_to_the_line_of_their_own():
    profile = make_profile(update_bytes=90_000)
    found = reliefs(profile)

    assert found["SGD"].saved_bytes == profile.optimizer_bytes == 8000
    assert found["A"].smallest_bytes == smallest_bytes(make_profile(update_bytes=0), 8)


def test_what_an_optimizer_does_already_is_not_advised():
    plain_sgd = reliefs(make_profile(update_bytes=90_000, optimizer_bytes=0, update_is_lean=True))
    fused = reliefs(make_profile(update_bytes=90_000, update_is_lean=True))

    assert not {"SGD", "A", "An"} & set(plain_sgd)
    assert {"SGD", "An"} <= set(fused)
    assert "A" not in fused
    # What was measured without a trace does not tell what the update needs.
    assert "A" not in reliefs(make_profile(update_bytes=90_000, fallback="a reason"))


@pytest.mark.parametrize(
    ("kind", "options", "is_lean"),
    [
        ("SGD", {}, True),
        ("SGD", {"momentum": 0.9}, False),
        ("SGD", {"weight_decay": 0.1}, False),
        ("AdamW", {}, False),
        ("AdamW", {"fused": True}, True),
        ("AdamW", {"foreach": False}, True),
        ("RMSprop", {}, False),
        ("SparseAdam", {}, True),
    ],
)
def test_a_profile_knows_whether_the_update_can_need_less(kind, options, is_lean):
    model = torch.nn.Linear(2, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)

    assert update_is_lean([optimizer]) == is_lean


def test_the_error_of_a_plain_sgd_advises_neither_sgd_nor_fused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))

    def advice(optimizer: torch.optim.Optimizer) -> str:
        with pytest.raises(bb.BudgetError, match="fits") as caught:
            bb.plan(
                model,
                lambda model, batch: model(batch).square().mean(),
                torch.randn(8, 64),
                optimizer=optimizer,
                memory_budget="40kB",
                calibrate=False,
            )
        return "\n".join(caught.value.what_else)

    assert "SGD" not in (told := advice(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert "fused" not in told
    # Control: both help an AdamW.
    assert "SGD without momentum" in (told := advice(torch.optim.AdamW(model.parameters())))
    assert "fused" in told


def test_half_the_tokens_save_half_of_what_grows_with_the_samples():
    """By hand, one sample, all recomputed: 4 x 20 of inputs, and what the peak of one block needs, all of it halved."""
    profile = make_profile(update_bytes=0)
    fixed = profile.resident_bytes + profile.gradient_bytes + 7
    now = smallest_bytes(profile, 8)

    assert reliefs(profile)["Half"].smallest_bytes == pytest.approx(fixed + (now - fixed) / 2, abs=2)


def test_bf16_pays_for_copies_of_the_weights():
    """Control: of a model whose weights are most of its memory, autocast makes the peak higher, and is not proposed."""
    profile = make_profile(update_bytes=0, storages=(Line(0, 90_000),) * 8)
    grows = 2 * (smallest_bytes(profile, 8) - reliefs(profile)["Half"].smallest_bytes)

    assert reliefs(profile)["bf16"].saved_bytes == pytest.approx(grows / 3 - 4000 / 2, abs=50)
    assert "bf16" not in reliefs(make_profile(update_bytes=0))


def test_what_does_not_lower_the_peak_is_left_out():
    """The update needs the most: fewer saved bytes are of no use there, and a fused optimizer is."""
    found = reliefs(make_profile(update_bytes=90_000, batch=Line()))

    assert "Half" not in found
    assert found["A"].name == "A fused optimizer"
    assert found["A"].saved_bytes > 80_000
    assert "A" not in reliefs(make_profile(update_bytes=0))


def test_frozen_blocks_have_no_gradients_no_state_and_save_nothing():
    """By hand: a quarter of the gradients and of the state stay, and the update needs no more than the last block."""
    profile = make_profile(update_bytes=90_000)
    found = reliefs(profile)["Training"]

    assert found.name == "Training only the last 1 of 4 blocks"
    assert found.smallest_bytes == (4000 + 8000 / 4 + 100 + 50 + 10) + 80 + 4000 / 4 + 90_000 / 4 + 7
    only_forward = make_profile(update_bytes=0, gradient_bytes=0, optimizer_bytes=0)
    assert reliefs(only_forward)["Training"].saved_bytes > 0


def test_the_most_helpful_comes_first_and_says_whether_it_is_enough():
    profile = make_profile(update_bytes=90_000)
    budget = 30_000
    found = what_else(profile, batch_size=8, budget_bytes=budget)

    assert [one.smallest_bytes for one in found] == sorted(one.smallest_bytes for one in found)
    assert any(one.fits for one in found)
    assert not all(one.fits for one in found)
    for one in found:
        assert one.fits == (one.smallest_bytes <= budget * 0.98)
        assert one.saved_bytes == smallest_bytes(profile, 8) - one.smallest_bytes > 0
    assert str(found[0]).startswith(f"{found[0].name} saves about ")
    assert ", and that is enough: " in str(found[0])
    assert ", down to " in str(found[-1])


def plan_and_advice(profile: MemoryProfile, budget_bytes: int, batch_size: int = 64) -> tuple[bb.Plan, tuple[str, ...]]:
    plan = search(profile, batch_size=batch_size, budget_bytes=budget_bytes)
    return plan, wrong_tool(profile, batch_size=batch_size, budget_bytes=budget_bytes, plan=plan)


def flat(**changes) -> MemoryProfile:
    """A sample takes as long in every micro-batch."""
    return make_profile(micro_seconds=((1, 0.1), (64, 6.4)), **changes)


def test_where_accumulation_is_right_nothing_is_said():
    """Control: for a batch that does not fit, without BatchNorm, where small micro-batches are as fast."""
    profile = flat()
    budget = (smallest_bytes(profile, 64) + peak_bytes(profile, [64])) // 2
    plan, advice = plan_and_advice(profile, budget)

    assert plan.micro_batch_size < 64
    assert advice == ()


def test_a_batch_that_fits_needs_no_plan():
    plan, (advice,) = plan_and_advice(make_profile(), MUCH)

    assert plan.micro_batch_size == 64
    assert advice.startswith("The batch of 64 fits as it is: it needs ")
    assert advice.endswith("Nothing has to be cut or recomputed.")


def test_a_cut_that_is_not_needed_is_said():
    plan = bb.Plan(4)
    (advice,) = wrong_tool(flat(), batch_size=64, budget_bytes=MUCH, plan=plan)

    assert advice.endswith("Micro-batches of 4 are not needed for memory.")


def test_a_cut_that_is_faster_is_said_with_how_much():
    plan = bb.Plan(4, step_seconds=flat().update_seconds + 3.2)
    (advice,) = wrong_tool(flat(), batch_size=64, budget_bytes=MUCH, plan=plan)

    assert advice.endswith("micro-batches of 4 are only 1.98 x as fast.")


@pytest.mark.parametrize(("micro_batch_size", "is_said"), [(2, True), (15, True), (16, False), (32, False)])
def test_batchnorm_in_small_micro_batches(micro_batch_size, is_said):
    plan = bb.Plan(micro_batch_size)
    advice = wrong_tool(flat(smallest_micro_batch=2), batch_size=64, budget_bytes=1, plan=plan)

    assert any(text.startswith("BatchNorm normalizes") for text in advice) == is_said
    assert wrong_tool(flat(), batch_size=64, budget_bytes=1, plan=plan) == ()


def test_batchnorm_of_a_batch_that_is_itself_small():
    """No micro-batch is smaller than the batch: accumulation changes nothing."""
    profile = flat(smallest_micro_batch=2)

    assert wrong_tool(profile, batch_size=8, budget_bytes=1, plan=bb.Plan(8)) == ()


@pytest.mark.parametrize(("micro_batch_size", "is_said"), [(1, True), (2, False), (4, False)])
def test_far_below_the_knee(micro_batch_size, is_said):
    """One sample takes 0.3 s alone, 0.1625 s among eight: 1.8 x; two of them take 0.4 s: 1.2 x."""
    advice = wrong_tool(make_profile(), batch_size=64, budget_bytes=1, plan=bb.Plan(micro_batch_size))

    assert len(advice) == is_said
    assert not is_said or advice[0].startswith("A sample takes 1.8 x as long in micro-batches of 1 as in those of 8.")


def test_sizes_beyond_the_batch_are_no_comparison():
    assert wrong_tool(make_profile(), batch_size=2, budget_bytes=1, plan=bb.Plan(1)) == ()


def test_the_frontier_begins_at_the_smallest_peak():
    profile = make_profile()
    leanest = frontier(profile, batch_size=8)[0]
    sizes = micro_batch_sizes(8, leanest.micro_batch_size)

    assert peak_bytes(profile, sizes, leanest.recompute) + 7 == smallest_bytes(profile, 8)


def test_an_error_comes_with_what_else_would_help():
    profile = make_profile()
    error = bb.BudgetError("No plan fits.", smallest_bytes=2_000, budget_bytes=1_000)

    found = with_advice(error, profile, batch_size=8)

    assert found.what_else == tuple(map(str, what_else(profile, batch_size=8, budget_bytes=1_000)))
    assert found.what_else
    assert str(found).splitlines() == [
        "No plan fits.",
        "What else would help, each by itself:",
        *(f"  {t}" for t in found.what_else),
    ]
    assert (found.smallest_bytes, found.budget_bytes) == (2_000, 1_000)
    assert with_advice(found, profile, batch_size=8) is found  # once
