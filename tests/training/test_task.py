from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import bigbatch as bb
from tests.training.tiny import Points, loss_fn, network, tiny_task

REQUIRED = dict(
    model=network,
    train_data=lambda: Points(8),
    loss_fn=loss_fn,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)


def test_every_option_of_a_step_is_a_field():
    options = {spec.name for spec in dataclasses.fields(bb.StepOptions)}

    assert options <= {spec.name for spec in dataclasses.fields(bb.Task)}


def test_options_reach_the_step():
    task = tiny_task(max_grad_norm=0.5, weight="samples", batch_dims={"0": 0})

    options = task.step_options(scheduler=None, ema=None)

    assert type(options) is bb.StepOptions
    assert (options.max_grad_norm, options.weight, options.batch_dims) == (0.5, "samples", {"0": 0})


def test_a_task_can_be_changed_and_copied():
    task = dataclasses.replace(tiny_task(), batch_size=8)

    assert task.batch_size == 8
    assert copy.copy(task) == task


@pytest.mark.parametrize("name", list(REQUIRED))
def test_what_is_missing_is_named_with_the_line_to_write(name):
    fields = {key: value for key, value in REQUIRED.items() if key != name}

    with pytest.raises(bb.TaskError, match=rf"The task has no {name}. Write {name}=lambda"):
        bb.Task(**fields)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", network(), r"model is a Sequential that is already there.*model=lambda: MyModel\(\)"),
        ("model", None, "model is None.*model=lambda"),
        ("train_data", Points(8), "train_data is a Points that is already there.*train_data=lambda: my_dataset"),
        ("train_data", [1, 2], r"train_data is \[1, 2\]"),
        ("optimizer", torch.optim.SGD(network().parameters()), "optimizer is a SGD that.*optimizer=lambda model:"),
        ("optimizer", "adamw", "optimizer is 'adamw'.*AdamW"),
        ("scheduler", torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(network().parameters())), "scheduler is a C"),
        ("ema", torch.optim.swa_utils.AveragedModel(network()), "ema is a AveragedModel.*ema=lambda model"),
        ("eval_data", Points(8), "eval_data is a Points"),
        ("evaluate", 3, r"evaluate is 3.*evaluate=lambda model, batch"),
    ],
)
def test_what_is_not_a_function_is_refused(field, value, message):
    with pytest.raises(bb.TaskError, match=message):
        tiny_task(**{field: value})


def test_a_criterion_is_no_loss_fn():
    with pytest.raises(bb.ArgumentError, match=r"loss_fn is nn.CrossEntropyLoss\(\).*model\(batch\[0\]\), batch\[1\]"):
        tiny_task(loss_fn=nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "batch_size=0"),
        ("epochs", 1.5, "epochs=1.5"),
        ("eval_batch_size", -1, "eval_batch_size=-1"),
        ("evaluate_every", 0, "evaluate_every=0"),
        ("seed", -1, "seed=-1"),
        ("num_workers", True, "num_workers=True"),
        ("name", "", "name=''"),
        ("max_grad_norm", -1, "max_grad_norm=-1"),
        ("batch_norm", "sync", "batch_norm='sync'"),
    ],
)
def test_numbers_and_options_that_cannot_be_are_refused(field, value, message):
    with pytest.raises(bb.OptionError, match=message):
        tiny_task(**{field: value})


def test_the_words_of_others_are_known():
    with pytest.raises(
        bb.TaskError, match=r"'gradient_accumulation_steps'. Give micro_batch_size=.*batch_size, epochs"
    ):
        tiny_task(gradient_accumulation_steps=4)


def test_evaluation_data_without_evaluate_is_refused():
    with pytest.raises(bb.TaskError, match=r'eval_data is given, but evaluate is not.*"accuracy": \(\('):
        tiny_task(evaluate=None)
