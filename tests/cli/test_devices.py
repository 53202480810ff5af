"""A device that is not there is told in a line, by every command."""

from __future__ import annotations

import pytest
import torch

import bigbatch as bb
from bigbatch.cli.devices import device_named
from bigbatch.cli.main import main
from bigbatch.errors import DeviceError


def told(capsys, *arguments):
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def _only_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.fixture
def _two_cards(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.usefixtures("_only_a_cpu")
@pytest.mark.parametrize("name", ["mps", "cuda", "cuda:1", "meta", "gpu"])
@pytest.mark.parametrize("command", ["train", "verify", "bench"])
def test_a_device_that_is_not_there_is_told_in_a_line_with_code_2(capsys, command, name):
    code, out, err = told(capsys, command, "digits", "--device", name)

    assert (code, out) == (2, "")
    assert err == (
        f"bigbatch: --device {name}: torch {torch.__version__} finds no such device here, but cpu. Give one of these.\n"
    )


@pytest.mark.usefixtures("_only_a_cpu")
def test_it_is_told_once_before_ranks_are_started(capsys):
    code, _, err = told(capsys, "train", "digits", "--device", "mps", "--nproc-per-node", "2")

    assert code == 2
    assert err.count("--device mps: ") == len(err.splitlines()) == 1


@pytest.mark.usefixtures("_only_a_cpu")
@pytest.mark.parametrize("shape", [["gpt2", "--batch-size", "8"], ["digits"]])
def test_a_plan_tells_where_a_model_cannot_be_built(capsys, shape):
    code, out, err = told(capsys, "plan", *shape, "--memory-budget", "8GiB", "--model-device", "cuda")

    assert (code, out) == (2, "")
    assert err.startswith("bigbatch: --model-device cuda: torch ")


def test_a_plan_is_for_the_devices_that_can_be_planned_for(capsys):
    code, out, err = told(capsys, "plan", "gpt2", "--memory-budget", "8GiB", "--device", "mps")

    assert (code, out) == (2, "")
    assert err == "bigbatch: --device mps: a plan is for cpu or cuda. Give one of these.\n"


@pytest.mark.usefixtures("_two_cards")
@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_a_device_that_is_there_is_found(name):
    assert device_named(name) == torch.device(name)


@pytest.mark.usefixtures("_two_cards")
def test_the_error_has_what_there_is():
    with pytest.raises(DeviceError, match="finds no such device here, but cpu, cuda:0, cuda:1") as caught:
        device_named("cuda:2")

    assert caught.value.available == ("cpu", "cuda:0", "cuda:1")
    assert isinstance(caught.value, bb.OptionError)
