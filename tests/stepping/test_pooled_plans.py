"""Plans for batch_norm="exact": the whole batch first, then lock-step, and the peak is that of the step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.memory.offloading import MeteredHost, pretend_host
from bigbatch.stepping.fitting import shadow
from bigbatch.stepping.fitting.planner import Planner
from tests.stepping.pooled_models import Batch, images, loss_fn, resnet


def world() -> tuple[nn.Module, Batch, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = resnet(8, 3)
    for layer in (m for m in model.modules() if isinstance(m, nn.ReLU)):
        layer.inplace = False  # a plan may recompute one alone, and its input must stay as it was
    x, y = images(24)
    return model, (x.float(), y), torch.optim.SGD(model.parameters(), lr=0.1)


def plan(budget: int | str | None, device: str = "cpu", **how) -> bb.Plan:
    model, batch, optimizer = world()
    return bb.plan(
        model,
        loss_fn,
        batch,
        optimizer=optimizer,
        memory_budget=budget,
        batch_norm="exact",
        device=device,
        calibrate=False,
        **how,
    )


def test_all_at_once_comes_first_then_recompute():
    direct = plan(None)
    assert (direct.micro_batch_size, direct.recompute) == (24, ())
    assert direct.peak_bytes

    tight = plan(int(0.7 * direct.peak_bytes))
    assert tight.micro_batch_size == 24
    assert tight.recompute


def test_on_a_cpu_what_does_not_fit_is_an_error_that_says_why():
    with pytest.raises(
        bb.BudgetError, match=r'With batch_norm="exact" all samples of the batch are there at once'
    ) as e:
        plan("1MiB")

    assert e.value.smallest_bytes
    assert plan(e.value.smallest_bytes).micro_batch_size == 24


@pytest.mark.slow
def test_on_a_card_lockstep_comes_last():
    direct = plan(None, "cuda")
    assert direct.peak_bytes

    found = plan(int(0.25 * direct.peak_bytes), "cuda")

    assert found.micro_batch_size < 24
    assert found.recompute == ()
    assert 0 < (found.peak_bytes or 0) <= 0.25 * direct.peak_bytes
    assert plan("1MiB", "cuda", micro_batch_size=4).micro_batch_size == 4
    with pytest.raises(bb.BudgetError, match="whose forwards take turns"):
        plan("64KiB", "cuda")


@pytest.mark.parametrize("recompute", [(), ("3", "5")])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("micro_batch_size", [7])
def test_the_peak_in_lockstep_is_that_of_the_step(monkeypatch, on_host, micro_batch_size, recompute):
    monkeypatch.setitem(shadow._BLOCK_BYTES, "cuda", 1)
    model, batch, optimizer = world()
    step = bb.Step(model, loss_fn, optimizer, batch_norm="exact")
    chosen = bb.Plan(micro_batch_size=micro_batch_size, recompute=recompute)

    expected, _ = Planner(step, batch, device="cuda" if on_host else "cpu").peaks(chosen, 24)

    with bb.apply(chosen, model), pretend_host(MeteredHost() if on_host else None):  # pyright: ignore
        # A step keeps the shares of its micro-batches as numbers on the device: one more where the last is smaller.
        assert step.measure(batch, micro_batch_size) == pytest.approx(expected, abs=8)


def test_a_step_with_a_budget_plans_and_stays_within_it():
    model, batch, optimizer = world()
    peak = plan(None).peak_bytes
    assert peak
    before = copy.deepcopy(model.state_dict())
    step = bb.Step(model, loss_fn, optimizer, memory_budget=int(0.75 * peak), batch_norm="exact")

    found = step.fit(batch)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert found.micro_batch_size == 24
    assert step.measure(batch, found.micro_batch_size) <= 0.75 * peak
    assert step(batch).exactness == "exact"


def test_a_profile_plans_for_the_whole_batch():
    model, batch, optimizer = world()
    costs = bb.profile(model, loss_fn, batch, optimizer=optimizer, batch_norm="exact", calibrate=False)
    merged = bb.profile(model, loss_fn, batch, optimizer=optimizer, calibrate=False)

    direct = bb.plan(costs, batch_size=24)
    assert direct.peak_bytes
    assert bb.plan(merged, batch_size=24, memory_budget=direct.peak_bytes // 2).micro_batch_size < 24
    assert bb.plan(costs, batch_size=24, memory_budget=int(0.75 * direct.peak_bytes)).micro_batch_size == 24
    with pytest.raises(bb.OptionError, match="Plan from the model"):
        bb.plan(costs, batch_size=24, micro_batch_size=4)


def test_what_cannot_be_planned_is_said():
    with pytest.raises(bb.OptionError, match="in lock-step what is recomputed"):
        plan(None, micro_batch_size=4, recompute="all")
    model, batch, optimizer = world()
    planner = Planner(bb.Step(model, loss_fn, optimizer, batch_norm="exact"), batch)
    with pytest.raises(bb.OptionError, match="run side by side"):
        planner.timeline(bb.Plan(micro_batch_size=4), 24)


def test_verify_finds_nothing_with_exact_and_says_so_with_merge():
    model, batch, _ = world()

    assert bb.verify(model, loss_fn, batch, micro_batch_size=5, batch_norm="exact").findings == ()
    assert 'batch_norm="exact"' in bb.verify(model, loss_fn, batch, micro_batch_size=5).findings[0]
