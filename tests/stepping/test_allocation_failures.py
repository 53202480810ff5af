"""A sample of the points of ``tests/torture/allocation_failures.py``, which lets each allocation of a step fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torture.allocation_failures import start

# With running statistics and dropout; the other, where the last allocations are those of a moving average.
NETS = ["--nets", "batchnorm", "mlp", "--optimizers", "adamw fused", "adamw foreach"]


def attacked(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The counts by optimizer; skips where there is no C compiler."""
    path = folder / "rows.json"
    done = start([*arguments, "--json", str(path)], capture=True)
    if done is None:
        pytest.skip("needs Linux and a C compiler")
    assert path.exists(), done.stdout + done.stderr
    return json.loads(path.read_text())


def test_a_step_with_an_allocation_that_fails_is_the_step_it_would_have_been(tmp_path):
    for row in attacked(tmp_path, *NETS, "--every", "15"):
        assert row["wrong"] == 0, row["examples"]
        assert row["not reached"] == 0
        assert row["same size"] + row["smaller"] >= 8


def test_so_is_one_of_a_loss_of_the_whole_batch_in_both_passes_and_between_them(tmp_path):
    for row in attacked(tmp_path, "--nets", "contrastive", "--optimizers", "adamw fused", "--every", "40"):
        assert row["wrong"] == 0, row["examples"]
        assert row["not reached"] == 0
        assert row["same size"] + row["smaller"] >= 20


def test_a_second_failure_while_the_first_is_undone_changes_nothing(tmp_path):
    for row in attacked(tmp_path, *NETS, "--double", "12"):
        assert row["wrong"] == 0, row["examples"]
        assert row["same size"] + row["smaller"] >= 6


def test_accumulate_stops_and_leaves_gradients_as_they_were(tmp_path):
    (row,) = attacked(tmp_path, "--nets", "mlp", "--optimizers", "sgd", "--accumulate", "--every", "3")

    assert row["wrong"] == 0, row["examples"]
    assert row["clean stop"] >= 30


def test_zero_halve_and_run_again_is_another_step(tmp_path):
    """Control: what others do leaves statistics of BatchNorm, random numbers and half an optimizer step behind."""
    (row,) = attacked(tmp_path, "--nets", "batchnorm", "--optimizers", "adamw foreach", "--peer", "--every", "20")

    assert row["wrong"] > row["same size"] + row["smaller"]
