"""The public verbs: ``bb.profile`` and ``bb.plan``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import bigbatch as bb
from tests.stepping.plannable import Transformer, World, cross_entropy, features, mlp, sgd, tokens

OPTIONS: dict[str, Any] = dict(on_out_of_memory="raise")


def model_of_four_blocks() -> Transformer:
    return Transformer(num_blocks=4)


WORLD = World(model_of_four_blocks, options=OPTIONS)


def arguments(num_samples: int = 10) -> tuple[tuple[Any, ...], dict[str, Any]]:
    step, batch = WORLD.make(num_samples)
    return (step.model, WORLD.loss_fn, batch), dict(optimizer=step.optimizers, calibrate=False, **OPTIONS)


def test_a_profile_says_what_there_is():
    args, keywords = arguments()
    model, batch = args[0], args[2]
    costs = bb.profile(*args, **keywords)

    assert costs.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert costs.optimizer_bytes == 2 * costs.parameter_bytes + 4 * len(list(model.parameters()))
    assert costs.batch.at(10) == sum(tensor.nbytes for tensor in batch)
    assert (costs.model, costs.optimizer, costs.device) == ("Transformer", "AdamW", "cpu")
    assert (costs.timing, costs.fallback, costs.smallest_micro_batch) == ("estimated", None, 1)
    assert [slot.name for slot in costs.slots if slot.name and slot.name.startswith("blocks.")]


def test_a_profile_is_timed_where_the_model_can_run():
    args, keywords = arguments(4)
    costs = bb.profile(*args, **{**keywords, "calibrate": True})

    assert costs.timing == "measured"
    assert min(size for size, _ in costs.micro_seconds) == 1
    assert all(seconds > 0 for _, seconds in costs.micro_seconds)


def test_a_plan_from_a_profile_that_went_through_json_is_the_same():
    args, keywords = arguments()
    costs = bb.profile(*args, **keywords)
    again = bb.MemoryProfile.from_json(costs.to_json())

    assert again == costs
    for budget in ("350kB", "600kB", None):
        plans = [bb.plan(one, batch_size=64, memory_budget=budget) for one in (costs, again)]
        assert plans[0] == plans[1]
    # Control: the budget does change the plan.
    assert bb.plan(costs, batch_size=64, memory_budget="350kB") != bb.plan(costs, batch_size=64, memory_budget=None)


@pytest.mark.parametrize("size", [1, 4, 10])
@pytest.mark.parametrize("recompute", ["none", "all", ("blocks.1",), (("blocks.0", "blocks.1"),)])
def test_what_is_held_is_kept_and_its_peak_is_predicted(size, recompute):
    args, keywords = arguments()
    plan = bb.plan(*args, **keywords, micro_batch_size=size, recompute=recompute)

    assert plan.micro_batch_size == size
    if recompute == "none":
        assert plan.recompute == ()
    elif recompute == "all":
        assert set(plan.recompute) >= {"blocks.0", "blocks.1"}
    else:
        assert plan.recompute == recompute
    step, batch = WORLD.make()
    with bb.apply(plan, step.model):
        assert step.measure(batch, size) == plan.peak_bytes


def test_a_plan_for_a_larger_batch_than_the_example():
    args, keywords = arguments(3)
    plan = bb.plan(*args, **keywords, batch_size=32, memory_budget="400kB")

    assert plan.micro_batch_size * plan.accumulation_steps >= 32
    step, batch = WORLD.make(32)
    with bb.apply(plan, step.model):
        measured = step.measure(batch, plan.micro_batch_size)
    assert measured == plan.peak_bytes <= 400_000
    # Control: at once it would need more.
    assert step.measure(batch, None) > 400_000


def test_a_budget_that_binds_makes_the_step_slower_and_smaller():
    args, keywords = arguments()
    free = bb.plan(*args, **keywords)
    bound = bb.plan(*args, **keywords, memory_budget=round(free.peak_bytes * 0.7))

    assert free.recompute == ()
    assert (free.micro_batch_size, free.budget_bytes) == (10, None)
    assert bound.peak_bytes <= 0.7 * free.peak_bytes
    assert bound.step_seconds > free.step_seconds
    assert bound.recompute or bound.micro_batch_size < 10


def test_a_model_on_meta_is_planned_as_the_same_one_with_numbers():
    args, keywords = arguments()
    batch = tuple(tensor.to("meta") for tensor in tokens(10))
    with torch.device("meta"):
        model = model_of_four_blocks()
    model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters())

    plans = [
        bb.plan(*args, **keywords, memory_budget="400kB"),
        bb.plan(model, cross_entropy, batch, **{**keywords, "optimizer": optimizer}, memory_budget="400kB"),
    ]

    assert plans[0] == plans[1]


def test_on_cuda_each_tensor_takes_whole_blocks():
    args, keywords = arguments()
    here = bb.plan(*args, **keywords)
    there = bb.plan(*args, **keywords, device="cuda", card="rtx4090")

    assert there.peak_bytes > here.peak_bytes
    assert there.peak_bytes % 512 == 0 or there.peak_bytes > here.peak_bytes + 512 * 10


def test_without_an_optimizer_none_is_counted():
    (model, loss_fn, batch), keywords = arguments()
    del keywords["optimizer"]

    assert bb.profile(model, loss_fn, batch, **keywords).optimizer_bytes == 0


def test_several_optimizers_are_all_counted():
    model = mlp()
    halves = [list(model[:2].parameters()), list(model[2:].parameters())]
    optimizers = [torch.optim.SGD(halves[0], lr=0.1, momentum=0.9), torch.optim.AdamW(halves[1])]
    costs = bb.profile(model, cross_entropy, features(4), optimizer=optimizers, calibrate=False)

    scalars = 4 * len(halves[1])
    sizes = [sum(p.nbytes for p in half) for half in halves]
    assert costs.optimizer_bytes == sizes[0] + 2 * sizes[1] + scalars
    assert costs.optimizer == "SGD + AdamW"


def test_arguments_that_do_not_go_together_are_errors():
    args, keywords = arguments()
    costs = bb.profile(*args, **keywords)

    with pytest.raises(bb.ArgumentError, match="A plan from a profile"):
        bb.plan(costs, memory_budget="1GiB")
    with pytest.raises(bb.ArgumentError, match="needs its loss and an example"):
        bb.plan(args[0], memory_budget="1GiB")
    with pytest.raises(bb.OptionError, match='"cpu", "cuda"'):
        bb.plan(*args, **keywords, device="tpu")
    with pytest.raises(bb.OptionError, match="no option 'batchsize'"):
        bb.plan(*args, **keywords, batchsize=3)


def test_a_module_that_is_not_there_is_named():
    args, keywords = arguments()

    with pytest.raises(bb.BigBatchError, match="blocks.7"):
        bb.plan(*args, **keywords, recompute=("blocks.7",))


def test_a_plan_runs():
    (model, loss_fn, batch), keywords = arguments()
    plan = bb.plan(model, loss_fn, batch, **keywords, memory_budget="400kB")
    step = bb.Step(model, loss_fn, sgd(model), plan=plan)

    assert step(batch).micro_batch_sizes[0] == plan.micro_batch_size


def test_ranks_share_the_batch_that_is_planned_for():
    """Micro × accumulation × ranks is at least the batch, and the largest share is what is planned for."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = torch.randn(8, 64), torch.randint(10, (8,))
    costs = bb.profile(model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batch, calibrate=False)

    found = bb.plan(costs, batch_size=1000, world_size=3, memory_budget="2MiB")

    with_buckets = dataclasses.replace(costs, bucket_bytes=costs.gradient_bytes, update_bytes=costs.gradient_bytes)
    assert found == bb.plan(with_buckets, batch_size=334, memory_budget="2MiB")
    assert found.micro_batch_size * found.accumulation_steps * 3 >= 1000
    assert found != bb.plan(costs, batch_size=1000, memory_budget="2MiB")
    with pytest.raises(bb.OptionError, match="world_size=0; it is a whole number"):
        bb.plan(costs, batch_size=1000, world_size=0)
