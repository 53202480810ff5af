from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import bigbatch as bb
from bigbatch.training.log import JsonLog, TensorBoardLog, make_run_dir, save_result
from bigbatch.training.loop import Run
from tests.training.tiny import network, tiny_task


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(2, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.first(x) + self.second(x)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_there_is_a_line_for_every_step_and_epoch(tmp_path):
    path = tmp_path / "log.jsonl"

    Run(tiny_task(epochs=2, grad_norm=True), micro_batch_size=5, listeners=[JsonLog(path)]).train()

    lines = lines_of(path)
    assert [line["event"] for line in lines] == ["run", *["step"] * 4, "epoch", *["step"] * 4, "epoch"]
    assert lines[0]["task"] == "tiny"
    assert lines[0]["total_steps"] == 8
    step = lines[2]
    assert (step["step"], step["epoch"], step["num_samples"]) == (2, 1, 16)
    assert (step["micro_batch_size"], step["accumulation_steps"]) == (5, 4)
    assert (step["weight"], step["skipped"], step["retries"]) == (16, False, 0)
    assert step["learning_rate"] == 1e-2
    assert step["loss"] > 0
    assert step["grad_norm"] > 0
    assert step["terms"] == {"loss": step["loss"]}
    assert set(lines[5]["metrics"]) == {"accuracy", "loss"}


def test_the_noise_scale_is_in_the_log_and_the_result(tmp_path):
    path = tmp_path / "log.jsonl"

    result = Run(tiny_task(epochs=2, noise_scale=True), micro_batch_size=5, listeners=[JsonLog(path)]).train()

    logged = [line["noise_scale"] for line in lines_of(path) if line["event"] == "step"]
    assert len(logged) == 8
    assert all(value == "Infinity" or value >= 0 for value in logged)  # JSON has no number for it
    assert float(logged[-1]) == result.noise_scale


def test_the_log_holds_the_losses_of_the_steps(tmp_path):
    path = tmp_path / "log.jsonl"
    run = Run(tiny_task(epochs=1), listeners=[log := JsonLog(path)])

    losses = [float(record.result.loss) for record in run.steps()]
    log.close()

    assert [line["loss"] for line in lines_of(path)[1:]] == losses


def test_a_run_that_fails_leaves_its_last_steps(tmp_path):
    path = tmp_path / "log.jsonl"
    calls = []

    def broken_later(model, batch):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("broken")
        return model(batch[0]).square().mean()

    with pytest.raises(RuntimeError, match="broken"):
        Run(tiny_task(loss_fn=broken_later), listeners=[JsonLog(path)]).train()

    assert [line["event"] for line in lines_of(path)] == ["run", "step", "step"]


def test_nothing_is_read_until_a_block_is_written(tmp_path):
    """Reading a loss waits for the device, so a step that was just made is left alone."""
    path = tmp_path / "log.jsonl"
    log = JsonLog(path)
    reads = []

    class Loss:
        def __float__(self):
            reads.append(1)
            return 1.0

    run = Run(tiny_task(epochs=1))
    for record in run.steps():
        object.__setattr__(record.result, "loss", Loss())
        log.stepped(record)

    assert reads == []
    log.close()
    assert len(reads) == 4


def test_tied_weights_are_saved_once_and_load(tmp_path):
    run = Run(tiny_task(model=Tied))
    result = run.train()

    files = save_result(tmp_path, result, run.parts.model, None)

    assert [path.name for path in files] == ["model.safetensors", "result.json"]
    assert len(load_file(tmp_path / "model.safetensors")) == 3
    loaded = Tied()
    load_model(loaded, str(tmp_path / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), run.parts.model.parameters(), strict=True))
    assert not list(tmp_path.glob("*.unfinished"))


def test_the_average_is_saved_beside_the_model(tmp_path):
    run = Run(tiny_task(ema=torch.optim.swa_utils.AveragedModel))
    result = run.train()

    save_result(tmp_path, result, run.parts.model, run.parts.options.ema)

    loaded = network()
    load_model(loaded, str(tmp_path / "ema.safetensors"))
    assert torch.equal(loaded[0].weight, run.parts.options.ema.module[0].weight)
    assert not torch.equal(loaded[0].weight, run.parts.model[0].weight)


def test_the_result_can_be_read(tmp_path):
    run = Run(tiny_task(), micro_batch_size=4)
    result = run.train()

    save_result(tmp_path, result, run.parts.model, None)

    found = json.loads((tmp_path / "result.json").read_text())
    assert found["metrics"] == result.metrics
    assert found["micro_batch_sizes"] == [4, 4, 4, 4]
    assert len(found["epochs"]) == 3


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    run = Run(tiny_task(epochs=1))
    result = run.train()
    save_result(tmp_path, result, run.parts.model, None)
    before = (tmp_path / "result.json").read_bytes()
    monkeypatch.setattr("bigbatch.training.log.os.replace", failing)

    with pytest.raises(OSError, match="disk"):
        save_result(tmp_path, result, run.parts.model, None)

    assert (tmp_path / "result.json").read_bytes() == before


def failing(*paths):
    raise OSError("disk")


def test_folders_of_runs_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    folders = {make_run_dir(None, "digits") for _ in range(3)}

    assert len(folders) == 3
    assert all(folder.is_dir() and folder.name.startswith("digits-") for folder in folders)


def test_a_folder_with_another_run_is_refused(tmp_path):
    (tmp_path / "log.jsonl").touch()

    with pytest.raises(bb.TaskError, match="holds the files of another run"):
        make_run_dir(tmp_path, "digits")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(bb.TaskError, match="file of the run cannot be made: File exists"):
        make_run_dir(tmp_path / "file", "digits")


def test_tensorboard_gets_the_curves(tmp_path):
    event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    Run(tiny_task(epochs=2, grad_norm=True), listeners=[TensorBoardLog(tmp_path)]).train()

    (file,) = tmp_path.iterdir()
    events = event_file_loader.EventFileLoader(str(file)).Load()
    tags = [value.tag for event in events for value in event.summary.value]

    assert tags.count("train/loss") == 8
    assert tags.count("train/grad_norm") == 8
    assert tags.count("eval/accuracy") == 2


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(bb.MissingExtraError, match=r'pip install "bigbatch\[log\]"'):
        TensorBoardLog(tmp_path)
