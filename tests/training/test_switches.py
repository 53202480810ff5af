"""Switches of a run: they do what they say, and the log shows them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.reporting.text import opening
from bigbatch.stepping.compiled import is_compiled
from bigbatch.training.loop import Run
from bigbatch.training.switches import Switches
from tests.training.tiny import tiny_task


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, matmul.fp32_precision, cudnn.conv.fp32_precision  # pyright: ignore
    yield
    cudnn.benchmark, matmul.fp32_precision, cudnn.conv.fp32_precision = before  # pyright: ignore


def test_each_switch_does_what_it_says():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    names = list(model.state_dict())

    Switches(compile=True, channels_last=True).apply(model, torch.device("cpu"))

    assert is_compiled(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert list(model.state_dict()) == names

    Switches(cudnn_benchmark=True, tf32=True).apply(copy.deepcopy(nn.Linear(1, 1)), torch.device("cuda"))

    assert torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_is_switched_on_by_itself():
    """Control."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    Switches().apply(model, torch.device("cuda"))

    assert not is_compiled(model)
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    assert not model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_what_has_no_effect_is_warned_about():
    with pytest.warns(bb.BigBatchWarning, match="On cpu there is no effect of --cudnn-benchmark and --tf32"):
        Switches(cudnn_benchmark=True, tf32=True).apply(nn.Linear(1, 1), torch.device("cpu"))


def test_weights_that_are_spread_over_ranks_cannot_lie_channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))

    with pytest.raises(bb.OptionError, match="--channels-last with --parallel fsdp2"):
        Switches(channels_last=True).apply(model, torch.device("cpu"), is_sharded=True)
    assert not model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_an_average_of_a_compiled_model_is_one_of_its_weights():
    """It is copied from a model that is compiled already."""
    ema = lambda model: torch.optim.swa_utils.AveragedModel(model)  # noqa: E731
    plain, compiled = Run(tiny_task(ema=ema)), Run(tiny_task(ema=ema), switches=Switches(compile=True))

    assert list(compiled.parts.evaluated.state_dict()) == list(plain.parts.evaluated.state_dict())
    assert is_compiled(compiled.parts.model)
    assert not is_compiled(compiled.parts.evaluated)


def test_the_log_shows_them():
    run = Run(tiny_task(), switches=Switches(channels_last=True))

    assert run.info.switches == ("channels-last",)
    assert opening(run.info).endswith("steps on cpu, with channels-last")
    assert Run(tiny_task()).info.switches == ()


def test_a_channels_last_run_is_the_same_run():
    plain, turned = Run(tiny_task()).train(), Run(tiny_task(), switches=Switches(channels_last=True)).train()

    assert turned.metrics == plain.metrics
