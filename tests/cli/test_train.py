from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bigbatch import __version__
from bigbatch.cli.main import main

TASKS = """
import torch
import bigbatch as bb
from tests.training.tiny import loss_fn, network, tiny_task

task = tiny_task(name="tiny", batch_size=10)

def fast():
    return tiny_task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e6))

def wide(norm="batch"):
    def model():  # each time with a layer of its own
        layer = torch.nn.BatchNorm1d(300) if norm == "batch" else torch.nn.GroupNorm(4, 300)
        return torch.nn.Sequential(torch.nn.Linear(2, 300), layer, torch.nn.Linear(300, 3))
    return tiny_task(name="wide", model=model)

def falsely_weighed():
    def over_some(model, batch):
        losses = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * batch[1]).sum() / (batch[1].sum() + 1)
    return tiny_task(loss_fn=over_some)

def extra():
    def data():
        raise bb.MissingExtraError('pip install "bigbatch[demo]"')
    return tiny_task(train_data=data)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_tasks(tmp_path, monkeypatch):
    (tmp_path / "tasks_of_mine.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def train(capsys):
    """Runs ``bigbatch train tasks_of_mine.py:NAME ...``; gives exit code, output and errors."""

    def run(name, *options):
        code = main(["train", f"tasks_of_mine.py:{name}", "--device", "cpu", "--threads", "1", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_task_of_a_file_is_trained(train, tmp_path):
    code, out, err = train("task", "--micro-batch-size", "4", "--epochs", "2", "--run-dir", "here")

    assert (code, err) == (0, "")
    assert "tiny: 50 samples, 99 parameters, batch 10, 2 epochs = 10 steps on cpu" in out
    assert "micro × accumulation × ranks: 4 × 3 × 1 = 10, the last holds 2" in out
    assert re.search(r"accuracy [\d.]+ %, loss [\d.]+", out)
    assert re.search(r"peak [\d.]+ KiB \(counted bytes of a real steady step\), no budget given", out)
    assert "files: here/model.safetensors, here/result.json, here/log.jsonl" in out
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [
        "log.jsonl",
        "model.safetensors",
        "result.json",
    ]
    steps = [json.loads(line) for line in (tmp_path / "here/log.jsonl").read_text().splitlines()]
    assert [step["event"] for step in steps].count("step") == 10


def test_what_the_command_line_says_goes_before_the_task(train, tmp_path):
    code, _, _ = train("task", "--batch-size", "25", "--epochs", "1", "--seed", "7", "--eval-batch-size", "3",
                       "--precision", "bf16", "--run-dir", "here")  # fmt: skip

    first = json.loads((tmp_path / "here/log.jsonl").read_text().splitlines()[0])
    assert code == 0
    assert (first["batch_size"], first["num_epochs"], first["seed"], first["total_steps"]) == (25, 1, 7, 2)


def test_switches_and_workers_are_shown_in_the_log(train, tmp_path):
    code, out, err = train("task", "--epochs", "2", "--workers", "1", "--channels-last", "--run-dir", "here")

    lines = [json.loads(line) for line in (tmp_path / "here/log.jsonl").read_text().splitlines()]
    assert (code, err) == (0, "")
    assert "steps on cpu, with channels-last" in out
    assert (lines[0]["switches"], lines[0]["num_workers"]) == (["channels-last"], 1)
    steps = [line for line in lines if line["event"] == "step"]
    assert all(0 <= step["data_share"] <= 1 and step["data_seconds"] > 0 for step in steps)


def test_a_budget_is_kept(train, tmp_path):
    code, out, _ = train("wide", "--batch-size", "48", "--memory-budget", "140kB", "--run-dir", "here")

    assert code == 0
    assert re.search(r"micro-batches of \d+ fit, measured peak [\d.]+ KiB", out)
    assert "inside the budget of 136.72 KiB" in out
    result = json.loads((tmp_path / "here/result.json").read_text())
    assert result["peak_bytes"] <= 140_000
    assert max(result["micro_batch_sizes"]) < 48


def test_runs_have_folders_of_their_own(train, tmp_path):
    train("task", "--epochs", "1")
    train("task", "--epochs", "1")

    assert len(list((tmp_path / "runs").glob("tiny-*"))) == 2


def test_a_preflight_says_go_and_keeps_nothing(train, tmp_path):
    code, out, _ = train("task", "--check", "20", "--memory-budget", "1MiB")

    assert code == 0
    assert out.rstrip().endswith("go")
    assert "memory, budget" in out
    assert not (tmp_path / "runs").exists()


def test_a_preflight_finds_a_learning_rate_that_is_too_high(train):
    code, out, _ = train("fast", "--check", "20")

    assert code == 1
    assert "no go: loss" in out
    assert "Lower the learning rate" in out


def test_a_preflight_finds_a_budget_that_is_too_small(train):
    code, out, _ = train("task", "--check", "20", "--memory-budget", "2kB")

    assert code == 1
    assert "no go: memory, budget" in out


def test_an_exact_run_is_compared_step_by_step(train):
    code, out, _ = train("task", "--micro-batch-size", "4", "--compare")

    assert code == 0
    assert re.search(r"tiny, float64, 10 optimizer steps in micro-batches of 4: .* allowed 1e-10: ok", out)
    assert "the direct big batch would need" in out


def test_a_run_with_batch_norm_is_compared_as_approximate(train):
    code, out, _ = train("wide", "--micro-batch-size", "8", "--compare")

    assert re.search(r"wide with GroupNorm, float64, 10 optimizer steps in micro-batches of 8: .*1e-10: ok", out)
    assert "this run is approximate: its first gradient differs by" in out
    assert re.search(r"accuracy: [\d.]+ % here, [\d.]+ % directly, [\d.]+ points apart \(approximate\)", out)
    assert code == int("OUTSIDE" in out)


@pytest.mark.parametrize(("name", "shown"), [("task", "tiny"), ("wide", "wide with GroupNorm")])
def test_a_run_that_cuts_nothing_is_compared_in_another_cut(train, name, shown):
    code, out, _ = train(name, "--batch-size", "16", "--micro-batch-size", "16", "--compare")

    assert code == 0
    assert re.search(rf"  {shown}, float64, 10 optimizer steps in micro-batches of 5 \(the run took 16 at.*: ok", out)


def test_a_task_that_cannot_be_built_leaves_no_folder(train, tmp_path):
    train("extra")

    assert not (tmp_path / "runs").exists()


def test_a_variant_can_be_chosen(train):
    code, out, _ = train("wide", "--micro-batch-size", "8", "--norm", "group")

    assert code == 0
    assert "equal to the big batch: exactly" in out


def test_a_comparison_that_fails_is_an_error(train):
    """Control: the loss is a mean over something else than the samples that it is weighed by."""
    code, out, _ = train("falsely_weighed", "--micro-batch-size", "4", "--compare")

    assert code == 1
    assert "allowed 1e-10: OUTSIDE" in out


def test_curves_for_tensorboard_are_written_when_asked(train, tmp_path):
    pytest.importorskip("tensorboard")

    code, _, _ = train("task", "--epochs", "1", "--tensorboard", "--run-dir", "here")

    assert code == 0
    assert list((tmp_path / "here/tensorboard").iterdir())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("none", [], "tasks_of_mine.py has no 'none'; the tasks in it are task"),
        ("task", ["--memory-budget", "64 MMB"], "'64 MMB' is no amount of memory"),
        ("task", ["--memory-budget", "2kB"], "No plan fits in 1.95 KiB"),
        ("task", ["--norm", "group"], "has no variant norm='group'"),
        ("task", ["--check", "3"], "A pre-flight of 3 steps tells nothing"),
        ("fast", [], "Not finite: "),
        ("extra", [], 'pip install "bigbatch[demo]"'),
    ],
)
def test_errors_of_ours_are_a_message_without_a_traceback(train, name, options, message):
    code, _, err = train(name, *options)

    assert code == 1
    assert err.startswith("bigbatch: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["--norm", "instance"], "'instance' is not one of 'batch', 'group', 'layer'"),
        (["--check", "20", "--compare"], "--check makes no run that --compare could compare"),
        (["--micro", "3"], "No such option"),
    ],
)
def test_a_wrong_command_line_is_told_with_code_2(train, options, message):
    code, _, err = train("task", *options)

    assert code == 2
    assert message in " ".join(err.split())


def test_errors_of_others_are_left_alone(train, tmp_path):
    (tmp_path / "tasks_of_mine_too.py").write_text(
        TASKS + "\ndef broken():\n    return tiny_task(loss_fn=lambda model, batch: model(batch))\n"
    )

    with pytest.raises(TypeError, match="linear"):
        main(["train", "tasks_of_mine_too.py:broken"])


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_it_is_a_module_too():
    command = [sys.executable, "-m", "bigbatch", "train", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])

    assert done.returncode == 1
    assert done.stderr.startswith("bigbatch: There is no task 'nothing'.")
