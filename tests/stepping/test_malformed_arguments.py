"""Malformed arguments and options: each is a typed error with values and a remedy, and nothing moved, bit for bit."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import default_collate

import bigbatch as bb
from tests.stepping.world import World, cut, make_batch, refused


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


class Metric:
    """A scheduler of somebody who steps it by a metric."""

    def step(self, metric: float) -> None:
        raise AssertionError


class OwnLoss(nn.Module):
    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError


WHOLE = "it is a whole number of at least 1"
A_LOSS_FN = "loss_fn=lambda model, batch: "
SIZES = (0, -1, True, 2.5, "8")
BUDGETS = ("lots", "8", "8 gigs", 0, -1, "0GiB", 1.5, True, [8])


def planned(*recompute: Any) -> dict[str, Any]:
    return dict(micro_batch_size=None, plan=bb.Plan(2, recompute=recompute))


# What Step gets, by the error that it is refused with, at once or at the first batch.
OF_STEP: dict[type[bb.BigBatchError], list[tuple[dict[str, Any], str]]] = {
    bb.ArgumentError: [
        (dict(loss_fn=nn.CrossEntropyLoss()), r"nn.CrossEntropyLoss\(\), which takes predictions.*Write: " + A_LOSS_FN),
        (dict(loss_fn=nn.CrossEntropyLoss), "class CrossEntropyLoss"),
        (dict(loss_fn=OwnLoss()), "loss_fn is (a |an )?OwnLoss"),
        (
            dict(loss_fn=F.cross_entropy),
            r"loss_fn is F.cross_entropy.*F.cross_entropy\(model\(batch\[0\]\), batch\[1\]\)",
        ),
        (dict(loss_fn=functools.partial(F.cross_entropy, label_smoothing=0.1)), "cross_entropy"),
        (dict(loss_fn=lambda batch: batch), r"loss_fn\(batch\) cannot be called with the model and a micro-batch"),
        (dict(loss_fn=lambda model, x, y: x), "missing a required argument: 'y'.*" + A_LOSS_FN),
        (dict(loss_fn=None), "loss_fn is a NoneType; it is a function.*" + A_LOSS_FN),
        (dict(loss_fn=torch.ones(())), "loss_fn is a Tensor"),
        (dict(model=None), "model is a NoneType; it is one torch.nn.Module"),
        (dict(model=[nn.Linear(1, 1)]), "model is a list;.*nn.ModuleDict"),
        (dict(model=nn.Linear), "model is the class Linear"),
        (dict(optimizer=None), "optimizer is a NoneType; it is a torch.optim.Optimizer"),
        (dict(optimizer=torch.optim.AdamW), r"optimizer is the class AdamW.*Call it: AdamW\(model.parameters\(\)\)"),
        (dict(optimizer=[]), "optimizer is an empty list; give at least one: torch.optim.AdamW"),
        (dict(optimizer=[nn.Parameter(torch.ones(1))]), "optimizer is a Parameter"),
        (dict(optimizer={"a": other_optimizer()}), "optimizer is a dict"),
    ],
    bb.OptionError: [
        *((dict(micro_batch_size=size), f"micro_batch_size={size!r}; {WHOLE}") for size in SIZES),
        *(
            (dict(micro_batch_size=None, memory_budget=budget), rf"{re.escape(repr(budget))} is no amount of.*\"8GiB\"")
            for budget in BUDGETS
        ),
        (dict(batch_size=0), f"batch_size=0; {WHOLE}"),
        (dict(batch_size="64"), "batch_size='64'"),
        (dict(optimizer=torch.optim.LBFGS([nn.Parameter(torch.ones(1))])), "LBFGS evaluates the loss several times"),
        (dict(optimizer=[other_optimizer()] * 2), r"shape \(1,\) is in two optimizers; give it to one"),
        (dict(scheduler=Metric()), "Metric.*metric"),
        (dict(scheduler=StepLR(other_optimizer(), 1)), "StepLR moves .* not one of this step's; make it from"),
        (dict(scheduler=StepLR), "scheduler is the class StepLR"),
        (dict(scheduler="cosine"), "scheduler is a str; it is a torch.optim.lr_scheduler"),
        (dict(ema=nn.Linear(1, 1)), r"ema is a Linear, which has no update_parameters\(model\)"),
        (dict(ema=AveragedModel), "AveragedModel"),
        (dict(ema={}), "ema is a dict, which has no"),
        (dict(micro_batch_size=None, plan={}), r"plan is a dict; it is a bb.Plan, for example bb.Plan\("),
        (dict(micro_batch_size=None, plan=bb.Plan(2), memory_budget="1GiB"), "both given.*Leave memory_budget out"),
        (dict(plan=bb.Plan(2)), "plan and micro_batch_size were both given.*Leave micro_batch_size out"),
        (dict(gradient_accumulation_steps=4), "no option 'gradient_accumulation_steps'. Give micro_batch_size="),
        (dict(gradient_clip_val=1.0), "It is called max_grad_norm here"),
        (dict(learning_rate=1.0), "no option 'learning_rate'. The options are weight, max_grad_norm"),
        (dict(max_grad_norm=0), "max_grad_norm=0; it is a number > 0, or None"),
        (dict(max_grad_norm=math.nan), "max_grad_norm=nan"),
        (dict(max_grad_norm="1"), "max_grad_norm='1'"),
        (dict(precision="bf16-mixed"), 'precision=\'bf16-mixed\'; it is "fp32".*Did you mean "bf16"'),
        (dict(precision=torch.float64), "precision=torch.float64;.*cast the model yourself"),
        (dict(precision=None), "precision=None; it is"),
        (dict(precision=["fp32"]), r"precision=\['fp32'\]; it is"),
        (dict(accumulation_dtype="int8"), "accumulation_dtype='int8'; it is a floating"),
        (dict(accumulation_dtype=float), "accumulation_dtype=<class 'float'>"),
        (dict(batch_norm="mean"), "batch_norm='mean'; it is one of 'merge', 'exact', 'frozen', 'native'"),
        (dict(on_non_finite="ignore"), "on_non_finite='ignore'; it is one of 'raise', 'skip'"),
        (dict(max_skipped=0), "max_skipped=0"),
        (dict(weight="token"), "weight is 'token'; it is \"samples\""),
        (dict(weight={}), "names no term; give a weight for each"),
        (dict(collate=default_collate, split=cut), "collate= and split= were both given.*take one"),
        (dict(collate="pad"), "collate='pad' cannot be called; collate is a function"),
        (dict(split=2), "split=2 cannot be called"),
        (dict(batch_dims=1), "batch_dims=1; it maps dotted paths"),
        (dict(batch_dims={"x": "1"}), r"batch_dims\['x'\] is '1'; it is a whole number, or None"),
        (dict(grad_norm="no"), "grad_norm='no'"),
        (dict(zero_missing_gradients="no"), "zero_missing_gradients='no'"),
    ],
    bb.BatchError: [
        (dict(batch_size=4), "has 6 samples, but batch_size=4. Hand over smaller"),
        (dict(split=cut, micro_batch_size=None), "give micro_batch_size="),
    ],
    bb.BudgetError: [
        (
            dict(micro_batch_size=None, memory_budget="100B"),
            r"fits in 100 B: even micro-batches of \d+ .*KiB.*Raise the budget",
        ),
    ],
    bb.GradientError: [
        (
            dict(optimizer=other_optimizer(), scheduler=None),
            "No parameter of the optimizer got a gradient. Make it from the parameters of the model",
        ),
    ],
    bb.RecomputeError: [
        (planned("3.7"), "no module named '3.7'. Close to it: '3.*"),
        (planned(""), "'' is the whole model.*Name modules in it"),
        (planned("3", "3.0"), "'3.0' is inside '3'.*Name one of the two"),
        (planned("3", "3"), "names one module twice.*Name it once"),
        (planned(("0", "2")), "neighbours, in order.*Name them one by one"),
    ],
}

ONLY_STEP = r"is done after the gradient, by Step; accumulate only adds to \.grad"
# The same of accumulate.
OF_ACCUMULATE: dict[type[bb.BigBatchError], list[tuple[dict[str, Any], str]]] = {
    bb.ArgumentError: [
        (dict(loss_fn=nn.CrossEntropyLoss()), "Write: " + A_LOSS_FN),
        (dict(model=nn.Linear), "model is the class Linear"),
        (dict(parameters=nn.Linear(1, 1)), r"parameters is a Linear; write parameters=discriminator.parameters\(\)"),
        (dict(parameters=nn.Parameter(torch.ones(1))), "parameters is a Parameter; write"),
        (dict(parameters=5), "parameters is a int; write"),
        (
            dict(parameters=[nn.Parameter(torch.ones(1)) * 2]),
            r"parameters\[0\] is a tensor that was computed; .*leaves",
        ),
        (dict(parameters=list(nn.Linear(1, 1).named_parameters())), r"parameters\[0\] is a tuple"),
        (dict(parameters=nn.Linear(1, 1).state_dict()), r"parameters\[0\] is a str"),
        (dict(parameters=[]), "holds nothing that needs a gradient"),
        (dict(parameters=[nn.Parameter(torch.ones(1), requires_grad=False)]), r"call requires_grad_\(\)"),
    ],
    bb.OptionError: [
        (dict(micro_batch_size=0), f"micro_batch_size=0; {WHOLE}"),
        (dict(max_grad_norm=1.0), f"max_grad_norm {ONLY_STEP}"),
        (dict(grad_norm=True), f"grad_norm {ONLY_STEP}"),
        (dict(zero_missing_gradients=True), f"zero_missing_gradients {ONLY_STEP}"),
        (dict(on_non_finite="skip"), f"on_non_finite {ONLY_STEP}"),
        (dict(scheduler=StepLR(other_optimizer(), 1)), f"scheduler {ONLY_STEP}"),
        (dict(ema=AveragedModel(nn.Linear(1, 1))), f"ema {ONLY_STEP}"),
        (dict(precision="fp16"), "Give the scaler that you step with: precision=scaler"),
        (dict(plan=bb.Plan(2)), "no option 'plan'"),
        (dict(memory_budget="1GiB"), "no option 'memory_budget'"),
    ],
    bb.LossError: [
        (dict(parameters=[nn.Parameter(torch.ones(1))]), "does not depend on any|parameter"),
    ],
}


def leave_a_gradient(world: World, **frozen: bool) -> bb.Step:
    world.model[4].bias.grad = torch.ones(2)
    world.model[4].bias.requires_grad_(not frozen)
    return world.step()


def loaded(**wrong: Any) -> Callable[[World], Any]:
    """Load a good state of which something is wrong."""

    def make(world: World) -> Any:
        step = world.step(precision=world.scaler)
        return lambda: step.load_state_dict({**step.state_dict(), **wrong})

    return make


def fitted(batch: Any, **options: Any) -> Callable[[World], Any]:
    return lambda world: lambda: world.step(micro_batch_size=None, memory_budget="1GiB", **options)(batch)


def scaled(**wrong: Any) -> Callable[[World], Any]:
    usual = dict(from_batch_size=1, to_batch_size=2)
    return lambda world: lambda: bb.scale_learning_rate(**dict(optimizer=world.optimizer) | usual | wrong)


NO_STATE = "This is no state of a Step: found .*need"
# The rest: what is called, on a run in the middle.
CALLS: dict[str, tuple[Callable[[World], Callable[[], Any]], type[bb.BigBatchError], str]] = {
    "two optimizers of one parameter": (
        lambda world: lambda: world.step(optimizer=[world.optimizer, torch.optim.SGD([world.model[0].weight])]),
        bb.OptionError,
        r"shape \(4, 3\) is in two optimizers; give it to one",
    ),
    "ReduceLROnPlateau": (
        lambda world: lambda: world.step(scheduler=ReduceLROnPlateau(world.optimizer)),
        bb.OptionError,
        r"needs a metric.*scheduler.step\(metric\) yourself",
    ),
    "a gradient that was left": (
        lambda world: functools.partial(leave_a_gradient(world), make_batch()),
        bb.GradientError,
        r"\.grad of \['4.bias'\] is set before the step.*zero_grad\(\) first.*bb.accumulate",
    ),
    "a gradient that was left before a trial": (
        lambda world: functools.partial(leave_a_gradient(world).measure, make_batch(), 2),
        bb.GradientError,
        r"\.grad of \['4.bias'\] is set before",
    ),
    "a gradient that was left and frozen": (
        lambda world: functools.partial(leave_a_gradient(world, frozen=True), make_batch()),
        bb.GradientError,
        "is set before the step",
    ),
    **{
        f"measure {size!r}": (
            lambda world, size=size: functools.partial(world.step().measure, make_batch(), size),
            bb.OptionError,
            f"micro_batch_size={size!r}",
        )
        for size in SIZES
    },
    "fit without a budget": (
        lambda world: functools.partial(world.step().fit, make_batch()),
        bb.OptionError,
        'no memory budget; make it with memory_budget="8GiB"',
    ),
    "fit what is cut": (
        fitted(bb.LogicalBatch(cut(make_batch()))),
        bb.OptionError,
        "cut already.*Leave memory_budget out",
    ),
    "fit no samples": (fitted([], collate=default_collate), bb.EmptyBatchError, "empty"),
    "fit no list": (fitted(5, collate=default_collate), bb.BatchError, "list of samples, but this is a int"),
    "fit what is ragged": (fitted((torch.ones(3), torch.ones(2))), bb.BatchError, r"\['0'\] has 3, \['1'\] has 2"),
    "Plan(0)": (lambda world: lambda: bb.Plan(0), bb.OptionError, f"micro_batch_size=0; {WHOLE}"),
    "Plan('8')": (lambda world: lambda: bb.Plan("8"), bb.OptionError, "micro_batch_size='8'"),
    "Plan(8, accumulation_steps=1.5)": (
        lambda world: lambda: bb.Plan(8, 1.5),
        bb.OptionError,
        "accumulation_steps=1.5",
    ),
    "Plan(8, recompute='3')": (lambda world: lambda: bb.Plan(8, recompute="3"), bb.OptionError, "recompute='3'; it"),
    "Plan(8, recompute=5)": (lambda world: lambda: bb.Plan(8, recompute=5), bb.OptionError, "recompute=5; it"),
    "a plan of no JSON": (lambda world: lambda: bb.Plan.from_json("garbage"), bb.OptionError, "'garbage' is no"),
    "a plan of other JSON": (lambda world: lambda: bb.Plan.from_json('{"size": 8}'), bb.OptionError, "its fields are"),
    "apply no plan": (lambda world: lambda: bb.apply({}, world.model), bb.ArgumentError, "found dict.*Write bb.apply"),
    "recompute no function": (
        lambda world: lambda: bb.recompute(3),
        bb.ArgumentError,
        r"found int. Write bb.recompute\(",
    ),
    "load nothing": (lambda world: functools.partial(world.step().load_state_dict, {}), bb.OptionError, NO_STATE),
    "load None": (lambda world: functools.partial(world.step().load_state_dict, None), bb.OptionError, NO_STATE),
    "load a model": (
        lambda world: functools.partial(world.step().load_state_dict, world.model.state_dict()),
        bb.OptionError,
        NO_STATE,
    ),
    "load another version": (loaded(version=99), bb.OptionError, "version.*99|99.*version"),
    "load no scaler": (loaded(scaler=None), bb.OptionError, "has no scaler, but this Step has a scaler; make it with"),
    "load no average": (loaded(ema=None), bb.OptionError, "has no ema, but this Step has a ema; make it with the same"),
    "load a broken plan": (loaded(plan="garbage", scaler={"scale": 1.0}), bb.OptionError, "plan|JSON|Plan"),
    "load a plan of another kind": (loaded(plan=3), bb.OptionError, "plan|JSON|Plan"),
    "load a size of text": (loaded(micro_batch_size="8"), bb.OptionError, "micro_batch_size='8'"),
    "load steps of text": (loaded(num_steps="x"), bb.OptionError, "num_steps='x'"),
    "load fewer than no steps": (loaded(num_steps=-1), bb.OptionError, "num_steps=-1"),
    "load a broken average": (loaded(ema={"module.0.weight": torch.zeros(4, 3)}), bb.OptionError, "ema"),
    "load a broken scaler": (loaded(scaler={"scale": 4.0}), bb.OptionError, "scaler"),
    "rule='cubic'": (scaled(rule="cubic"), bb.OptionError, "rule='cubic'; it is \"linear\""),
    "from 0": (scaled(from_batch_size=0), bb.OptionError, f"from_batch_size=0; {WHOLE}"),
    "to 2.5": (scaled(to_batch_size=2.5), bb.OptionError, "to_batch_size=2.5"),
    "warmup_steps=-1": (scaled(warmup_steps=-1), bb.OptionError, "warmup_steps=-1"),
    "warmup_steps='10'": (scaled(warmup_steps="10"), bb.OptionError, "warmup_steps='10'"),
    "the learning rate of nothing": (scaled(optimizer=None), bb.ArgumentError, "optimizer is a NoneType"),
    "the learning rate of two": (
        scaled(optimizer=[other_optimizer(), other_optimizer()]),
        bb.ArgumentError,
        "optimizer",
    ),
    "total_steps('10', 2)": (
        lambda world: lambda: bb.total_steps("10", 2),
        bb.OptionError,
        f"num_samples='10'; {WHOLE}",
    ),
    "total_steps(10, 0)": (lambda world: lambda: bb.total_steps(10, 0), bb.OptionError, "batch_size=0"),
    "total_steps(10, 2.0)": (lambda world: lambda: bb.total_steps(10, 2.0), bb.OptionError, "batch_size=2.0"),
    "total_steps(0, 2)": (lambda world: lambda: bb.total_steps(0, 2), bb.OptionError, "num_samples=0"),
    "no epochs": (lambda world: lambda: bb.total_steps(10, 2, epochs=0), bb.OptionError, "epochs=0"),
    "no full batch": (
        lambda world: lambda: bb.total_steps(10, 20, drop_last=True),
        bb.OptionError,
        "10 samples are fewer",
    ),
}


def shown(options: dict[str, Any]) -> str:
    """Options as an id: what is no plain value by its type, because workers must collect the same."""
    return ", ".join(
        f"{name}={value!r}" if isinstance(value, int | float | str) else f"{name}={type(value).__name__}"
        for name, value in options.items()
    )


def steps_in(options: dict[str, Any]) -> Callable[[World], Callable[[], Any]]:
    return lambda world: lambda: world.step(**options)(make_batch())


def accumulates(options: dict[str, Any]) -> Callable[[World], Callable[[], Any]]:
    return lambda world: lambda: world.accumulate(**options)


ALL = [
    *(
        pytest.param(steps_in(options), error, message, id=f"Step: {shown(options)}")
        for error, rows in OF_STEP.items()
        for options, message in rows
    ),
    *(
        pytest.param(accumulates(options), error, message, id=f"accumulate: {shown(options)}")
        for error, rows in OF_ACCUMULATE.items()
        for options, message in rows
    ),
    *(pytest.param(*call, id=name) for name, call in CALLS.items()),
]


@pytest.mark.parametrize(("make", "error", "message"), ALL)
def test_a_malformed_argument_is_refused_and_nothing_moved(make, error, message):
    world = World()
    run = make(world)
    before = world.state()
    made = len(world.made)

    refused(run, error, message)

    del world.made[made:]  # a step that was made on the way to its error
    assert world.state() == before


def test_the_smallest_peak_is_told_with_the_error():
    with pytest.raises(bb.BudgetError, match="fits in 100 B") as found:
        World().step(micro_batch_size=None, memory_budget=100)(make_batch())

    assert found.value.smallest_bytes > found.value.budget_bytes == 100
