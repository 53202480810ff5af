"""What a BudgetError says of batch_norm="merge" where "exact" does not fit."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.stepping.fitting import merged_offer
from tests.stepping.pooled_models import Batch, images, loss_fn, resnet

NUM_SAMPLES = 32


def world() -> tuple[nn.Module, Batch, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = resnet(8, 3)
    x, y = images(NUM_SAMPLES)
    return model, (x.float(), y), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plan_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(optimizer=optimizer, batch_norm="exact", calibrate=False)


def smallest_of_exact(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> int:
    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        bb.plan(model, loss_fn, batch, memory_budget="10kB", **plan_of(optimizer))
    assert not any("merge" in text for text in caught.value.what_else), "nor does that fit"
    return caught.value.smallest_bytes or 0


def offer_of(error: bb.BudgetError) -> tuple[int, int, int, float]:
    """Samples in a micro-batch of the plan; samples taken, in which micro-batches, and the cosine."""
    found = re.match(
        r'batch_norm="merge" fits, in micro-batches of (\d+)(?: with \d+ modules? recomputed)? and a peak of .*, and '
        r"is another gradient: that of (\d+) samples in micro-batches of (\d+) has a cosine of (\d\.\d{3}) to that of "
        r"these samples at once\.$",
        error.what_else[0],
    )
    assert found, error.what_else[0]
    planned, taken, size, cosine = found.groups()
    return int(planned), int(taken), int(size), float(cosine)


def by_hand(model: nn.Module, batch: Batch, num_samples: int, size: int) -> float:
    """The cosine, by backward alone: each micro-batch sees its own statistics."""

    def gradient(size: int) -> Tensor:
        twin = copy.deepcopy(model)
        for x, y in zip(batch[0][:num_samples].split(size), batch[1][:num_samples].split(size), strict=True):
            (loss_fn(twin, (x, y)) * (len(x) / num_samples)).backward()
        return torch.cat([p.grad.flatten().double() for p in twin.parameters() if p.grad is not None])

    return float(torch.cosine_similarity(gradient(size), gradient(num_samples), dim=0))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(
        dict(
            tensors=list(model.state_dict().values()),
            optimizer=optimizer.state_dict(),
            rng=torch.get_rng_state(),
            training=[m.training for m in model.modules()],
            attributes=[set(vars(m)) for m in model.modules()],
        )
    )


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found.pop("tensors"), expected.pop("tensors"), strict=True))
    assert torch.equal(found.pop("rng"), expected.pop("rng"))
    assert found == expected


@pytest.mark.parametrize("share", [0.35, 0.5])
@pytest.mark.parametrize("how", ["step", "plan"])
def test_it_names_the_plan_and_the_measured_cosine(how, share):
    model, batch, optimizer = world()
    smallest = smallest_of_exact(model, batch, optimizer)
    budget, before = int(share * smallest), state_of(model, optimizer)

    steps: dict[str, Any] = {
        "step": lambda: bb.Step(model, loss_fn, optimizer, memory_budget=budget, batch_norm="exact")(batch),
        "plan": lambda: bb.plan(model, loss_fn, batch, memory_budget=budget, **plan_of(optimizer)),
    }
    with pytest.raises(bb.BudgetError, match='batch_norm="exact"') as caught:
        steps[how]()

    assert_same(state_of(model, optimizer), before)
    assert all(p.grad is None for p in model.parameters())
    planned, taken, size, cosine = offer_of(caught.value)
    assert 2 * size <= taken <= NUM_SAMPLES
    assert size <= planned
    assert cosine == pytest.approx(by_hand(model, batch, taken, size), abs=1.5e-3)
    assert cosine < 0.999, "the measured one, and not that of a gradient to itself"
    # It is true: such a plan fits.
    how_merged = {**plan_of(optimizer), "batch_norm": "merge"}
    taken_up = bb.plan(model, loss_fn, batch, memory_budget=budget, **how_merged)
    assert taken_up.micro_batch_size == planned
    assert taken_up.peak_bytes <= budget


def test_samples_that_are_collated():
    model, batch, optimizer = world()
    budget = smallest_of_exact(model, batch, optimizer) // 2
    samples = list(zip(*batch, strict=True))

    def collate(found: list[tuple[Tensor, Tensor]]) -> Batch:
        return torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])

    step = bb.Step(model, loss_fn, optimizer, memory_budget=budget, batch_norm="exact", collate=collate)
    with pytest.raises(bb.BudgetError) as caught:  # noqa: PT011
        step(samples)

    _, taken, size, cosine = offer_of(caught.value)
    assert cosine == pytest.approx(by_hand(model, batch, taken, size), abs=1.5e-3)


def test_where_the_model_cannot_run_nothing_is_measured():
    model, batch, optimizer = world()
    budget = smallest_of_exact(model, batch, optimizer) // 2
    on_meta = model.to("meta")
    plan = plan_of(torch.optim.SGD(on_meta.parameters(), lr=0.1, momentum=0.9))

    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        bb.plan(on_meta, loss_fn, batch, memory_budget=budget, device="cpu", **plan)

    assert re.match(
        r'batch_norm="merge" fits, in micro-batches of \d+ .*: how far it turns is not measured here',
        caught.value.what_else[0],
    )


def offered(model: nn.Module, batch: Batch, loss_fn: Any = loss_fn, **more: Any) -> bb.BudgetError:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = smallest_of_exact(model, batch, optimizer) // 2
    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        bb.plan(model, loss_fn, batch, memory_budget=budget, **{**plan_of(optimizer), **more})
    return caught.value


def test_dropout_is_no_part_of_the_cosine():
    """Its masks are the same on both sides, whatever the cut; else it would turn the gradient more than BatchNorm."""
    model, batch, _ = world()
    found = []
    for p in (0.0, 0.5):
        torch.manual_seed(0)
        found.append(offer_of(offered(nn.Sequential(nn.Dropout(p), copy.deepcopy(model)), batch))[3])

    assert found[1] == pytest.approx(found[0], abs=0.02)


def test_a_gradient_of_zero_has_no_cosine():
    model, batch, _ = world()

    error = offered(model, batch, lambda model, batch: 0 * loss_fn(model, batch))

    assert "how far it turns could not be measured (the gradient is zero or not finite)" in error.what_else[0]


def test_too_few_samples_to_measure():
    model, batch, _ = world()
    few = batch[0][:3], batch[1][:3]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = smallest_of_exact(model, batch, optimizer) // 2

    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        bb.plan(model, loss_fn, few, batch_size=NUM_SAMPLES, memory_budget=budget, **plan_of(optimizer))

    assert "could not be measured: there are too few samples, or memory for them" in caught.value.what_else[0]


@pytest.mark.parametrize("held", [dict(micro_batch_size=NUM_SAMPLES), dict(recompute="none")])
def test_what_is_held_is_not_offered_otherwise(held):
    model, batch, _ = world()

    assert not any("merge" in text for text in offered(model, batch, **held).what_else)


def test_a_step_that_asks_for_merge_is_offered_nothing():
    model, batch, optimizer = world()
    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        bb.Step(model, loss_fn, optimizer, memory_budget="10kB")(batch)

    assert not any("merge" in text for text in caught.value.what_else)


def test_a_measurement_that_fails_is_no_other_error(monkeypatch):
    """The first error is what the person needs; what is offered beside it must not hide it."""
    model, batch, optimizer = world()
    budget = smallest_of_exact(model, batch, optimizer) // 2

    def failing(*args: Any) -> Tensor:
        raise RuntimeError("not here")

    monkeypatch.setattr(merged_offer, "_gradient", failing)
    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        bb.plan(model, loss_fn, batch, memory_budget=budget, **plan_of(optimizer))

    assert "how far it turns could not be measured (RuntimeError: not here)" in caught.value.what_else[0]


def test_what_else_would_help_is_for_the_whole_batch_at_once():
    """Half the tokens halve what a batch saves that cannot be cut, and what is said to be enough is."""
    model, batch, optimizer = world()
    smallest = smallest_of_exact(model, batch, optimizer)
    with pytest.raises(bb.BudgetError, match="No plan fits") as caught:
        bb.plan(model, loss_fn, batch, memory_budget=smallest // 3, **plan_of(optimizer))

    half = next(text for text in caught.value.what_else if text.startswith("Half the tokens"))
    assert "that is enough" not in half, "a half is more than a third"
