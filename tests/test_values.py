"""The values that pass through: JSON in and out, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
import torch

import bigbatch as bb
from bigbatch.values import check_batch_dims, check_positive

PLANS = [
    bb.Plan(micro_batch_size=1),
    bb.Plan(
        micro_batch_size=8,
        accumulation_steps=64,
        recompute=("blocks.0", ("blocks.1", "blocks.2"), ""),
        accumulation_dtype="float32",
        peak_bytes=2**40 + 1,
        step_seconds=0.1 + 0.2,
        budget_bytes=64 * 2**20,
    ),
]
RESULTS = [
    bb.StepResult(loss=0.5),
    bb.StepResult(
        loss=1 / 3,
        terms={"policy": 0.1, "value.head": -2.0},
        weight=17.5,
        grad_norm=1e-300,
        skipped=True,
        micro_batch_sizes=(4, 4, 2),
        retries=2,
        exactness="approximate",
    ),
]


@pytest.mark.parametrize("value", [*PLANS, *RESULTS])
def test_json_gives_back_the_same_value(value):
    again = type(value).from_json(value.to_json())

    assert again == value
    assert again.to_json() == value.to_json()


def test_groups_of_modules_come_back_as_tuples():
    """Control: JSON has lists only, and a list is not equal to a tuple."""
    plan = PLANS[1]

    assert json.loads(plan.to_json())["recompute"] == ["blocks.0", ["blocks.1", "blocks.2"], ""]
    assert bb.Plan.from_json(plan.to_json()).recompute == ("blocks.0", ("blocks.1", "blocks.2"), "")


def test_every_field_is_in_the_json():
    for value in (PLANS[1], RESULTS[1]):
        assert list(json.loads(value.to_json())) == [spec.name for spec in dataclasses.fields(value)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_tensors_become_numbers(dtype):
    result = bb.StepResult(
        loss=torch.tensor(3, dtype=dtype),
        terms={"a": torch.tensor(5, dtype=dtype), "b": 7.0},
        weight=torch.tensor(11, dtype=dtype),
        grad_norm=torch.tensor(13, dtype=dtype),
    )
    found = json.loads(result.to_json())

    assert (found["loss"], found["terms"], found["weight"], found["grad_norm"]) == (3, {"a": 5, "b": 7}, 11, 13)
    assert bb.StepResult.from_json(result.to_json()).loss == 3


def test_a_float64_loss_keeps_every_bit():
    loss = torch.tensor(2.0, dtype=torch.float64).sqrt()

    assert bb.StepResult.from_json(bb.StepResult(loss=loss).to_json()).loss == loss.item()


def test_a_loss_that_is_not_finite_comes_back():
    again = bb.StepResult.from_json(bb.StepResult(loss=torch.tensor(math.nan), grad_norm=math.inf).to_json())

    assert math.isnan(float(again.loss))
    assert again.grad_norm == math.inf


def test_writing_json_leaves_the_value_alone():
    loss = torch.tensor(1.0)
    result = bb.StepResult(loss=loss, terms={"a": loss})
    result.to_json()

    assert result.loss is loss
    assert result.terms["a"] is loss


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (bb.Plan, '{"micro_batch_size": 8, "batch": 3}', r"is no Plan: its fields are \['accumulation_dtype', 'acc"),
        (bb.Plan, "{}", r"'\{\}' is no Plan: .*missing.*'micro_batch_size'"),
        (bb.Plan, "[8]", r"'\[8\]' is no Plan: its fields are"),
        (bb.Plan, "8", "'8' is no Plan: its fields are"),
        (bb.Plan, '{"micro_batch_size": 0}', "micro_batch_size=0; it is a whole number of at least 1"),
        (bb.Plan, '{"micro_batch_size": "8"}', "micro_batch_size='8'; it is a whole number"),
        (bb.StepResult, '{"skipped": true}', "is no StepResult: .*missing.*'loss'"),
        (bb.StepResult, bb.Plan(1).to_json(), "is no StepResult: its fields are .*'exactness', 'grad_norm', 'loss'"),
    ],
)
def test_json_of_something_else_is_refused(kind, text, message):
    with pytest.raises(bb.OptionError, match=message):
        kind.from_json(text)


@pytest.mark.parametrize("value", [PLANS[1], RESULTS[1], bb.StepOptions()])
def test_values_are_frozen(value):
    name = dataclasses.fields(value)[0].name

    with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
        setattr(value, name, 2)


def test_equal_plans_have_one_hash():
    assert len({*PLANS, bb.Plan.from_json(PLANS[1].to_json())}) == len(PLANS)


@pytest.mark.parametrize("size", [0, -1, 8.0, "8", None, True, [8]], ids=repr)
def test_a_plan_needs_a_micro_batch_size_of_at_least_one(size):
    with pytest.raises(bb.OptionError, match=r"^micro_batch_size=.*; it is a whole number of at least 1\.$") as caught:
        bb.Plan(size)

    assert repr(size) in str(caught.value)


@pytest.mark.parametrize("steps", [0, -3, 2.5, "4", False], ids=repr)
def test_accumulation_steps_are_none_or_at_least_one(steps):
    with pytest.raises(bb.OptionError, match="^accumulation_steps=.*; it is a whole number of at least 1"):
        bb.Plan(8, accumulation_steps=steps)


def identity(batch: Any) -> Any:
    return batch


class Averaged:
    def update_parameters(self, model: Any) -> None: ...


class Updated:
    def update(self) -> None: ...


GOOD_OPTIONS = [
    {},
    {"max_grad_norm": 1},
    {"max_grad_norm": math.inf},
    {"batch_norm": "frozen", "on_non_finite": "skip", "max_skipped": 1},
    {"collate": identity},
    {"split": identity},
    {"ema": Averaged()},
    {"ema": Updated()},
    {"batch_dims": {}},
    {"batch_dims": {"x": 1, "inputs.mask": None, "y.0": -1}},
]
BAD_OPTIONS = [
    ({"batch_norm": "sync"}, "batch_norm='sync'; it is one of 'merge', 'exact', 'frozen', 'native'"),
    ({"batch_norm": None}, "batch_norm=None; it is one of"),
    ({"batch_norm": ["merge"]}, r"batch_norm=\['merge'\]; it is one of"),
    ({"on_non_finite": "ignore"}, "on_non_finite='ignore'; it is one of 'raise', 'skip'"),
    ({"on_non_finite": True}, "on_non_finite=True; it is one of"),
    ({"max_skipped": 0}, "max_skipped=0; it is a whole number of at least 1"),
    ({"max_skipped": 1.5}, "max_skipped=1.5; it is a whole number"),
    ({"max_grad_norm": 0}, "max_grad_norm=0; it is a number > 0, or None"),
    ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0; it is a number > 0"),
    ({"max_grad_norm": math.nan}, "max_grad_norm=nan; it is a number > 0"),
    ({"max_grad_norm": True}, "max_grad_norm=True; it is a number > 0"),
    ({"max_grad_norm": "1"}, "max_grad_norm='1'; it is a number > 0"),
    ({"collate": 3}, "collate=3 cannot be called; collate is a function"),
    ({"split": "dim0"}, "split='dim0' cannot be called; split is a function"),
    ({"collate": identity, "split": identity}, "collate= and split= were both given; .*take one"),
    ({"batch_dims": 1}, "batch_dims=1; it maps dotted paths to a dimension, or to None"),
    ({"batch_dims": ["x"]}, r"batch_dims=\['x'\]; it maps dotted paths"),
    ({"batch_dims": {"x": "1"}}, r"batch_dims\['x'\] is '1'; it is a whole number, or None"),
    ({"batch_dims": {"x": True}}, r"batch_dims\['x'\] is True; it is a whole number, or None"),
    ({"batch_dims": {0: 1}}, r"batch_dims\[0\] is 1; it is a whole number"),
]


@pytest.mark.parametrize("options", GOOD_OPTIONS, ids=" ".join)
def test_options_that_can_be(options):
    found = bb.StepOptions.of(options)

    assert found == bb.StepOptions(**options)
    assert {name: getattr(found, name) for name in options} == options


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[" ".join(options) for options, _ in BAD_OPTIONS])
def test_options_that_cannot_be_are_refused_by_name_and_value(options, message):
    with pytest.raises(bb.OptionError, match=message):
        bb.StepOptions.of(options)


def test_options_are_given_by_keyword():
    """Control: an order that nobody remembers would let max_grad_norm be taken for weight."""
    with pytest.raises(TypeError, match="positional argument"):
        bb.StepOptions("samples")


PEERS_WORDS = {
    "gradient_accumulation_steps": "Give micro_batch_size=, the samples in one forward-backward",
    "accumulate_grad_batches": "Give micro_batch_size=",
    "accumulation_steps": "Give micro_batch_size=",
    "per_device_train_batch_size": "Give batch_size=, over all devices, and micro_batch_size=",
    "train_batch_size": "It is called batch_size here, and it is the global one",
    "device_train_microbatch_size": "It is called micro_batch_size here",
    "clip_grad_norm": "It is called max_grad_norm here",
    "gradient_clip_val": "It is called max_grad_norm here",
    "mixed_precision": 'It is called precision here: "bf16" or "fp16"',
    "scaler": "Give the GradScaler as precision=",
    "lr_scheduler": "It is called scheduler here",
    "collate_fn": "It is called collate here",
    "gradient_checkpointing": r"Recomputed modules are part of a plan: plan=bb\.Plan\(\.\.\., recompute=\(names\)\)",
}


@pytest.mark.parametrize(("name", "hint"), PEERS_WORDS.items())
def test_the_word_of_another_library_is_answered_with_ours(name, hint):
    with pytest.raises(bb.OptionError, match=f"There is no option '{name}'. {hint}"):
        bb.StepOptions.of({name: 4})


def test_an_unknown_option_is_answered_with_all_of_them():
    with pytest.raises(
        bb.OptionError, match=r"There is no option 'max_norm'\. The options are weight, max_grad_norm, "
    ):
        bb.StepOptions.of({"weight": "samples", "max_norm": 1.0})


def test_the_hints_name_what_exists():
    """A hint that sends people to a name that was renamed is worse than none."""
    known = {spec.name for spec in dataclasses.fields(bb.StepOptions)} | {"plan", "batch_size", "micro_batch_size"}
    named = set()
    for name in PEERS_WORDS:
        with pytest.raises(bb.OptionError, match="There is no option") as caught:
            bb.StepOptions.of({name: 4})
        named |= set(re.findall(r"called (\w+) here|(?:Give|as|:) (\w+)=", str(caught.value)))

    assert {first or second for first, second in named} <= known
    assert len(named) >= 6


def test_checks_let_good_values_pass():
    check_positive("size", 1)
    check_batch_dims(None)
    check_batch_dims({"x": 0, "mask": None})


def test_json_of_a_loss_that_is_not_finite_is_strict_json() -> None:
    text = bb.StepResult(loss=float("nan"), grad_norm=float("inf")).to_json()

    def refuse(word: str) -> None:
        raise AssertionError(f"bare {word} in {text}")

    json.loads(text, parse_constant=refuse)


def test_plan_made_with_lists_equals_the_one_from_its_json() -> None:
    plan = bb.Plan(micro_batch_size=4, recompute=["a", ["b", "c"]])  # pyright: ignore[reportArgumentType]

    assert plan == bb.Plan.from_json(plan.to_json())
    assert hash(plan) == hash(bb.Plan.from_json(plan.to_json()))


def test_plan_refuses_one_name_that_is_not_in_a_tuple() -> None:
    with pytest.raises(bb.OptionError, match="names of modules"):
        bb.Plan(micro_batch_size=4, recompute="blocks.0")  # pyright: ignore[reportArgumentType]


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(bb.OptionError, match="no JSON"):
        bb.Plan.from_json("{")
