from __future__ import annotations

import copy
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import bigbatch as bb
from bigbatch.cli.main import main
from bigbatch.training import saving
from bigbatch.training.checkpoint import Checkpoints, newest, paths_in, verified
from bigbatch.training.data import LogicalBatches, train_loader
from bigbatch.training.log import JsonLog
from bigbatch.training.loop import Run
from bigbatch.training.resuming import resume
from bigbatch.training.saving import Saver
from tests.training.tiny import Points, network, tiny_task

ROOT = Path(__file__).parents[2]


class Jittered(Points):
    """Augmentation that draws from torch, Python and NumPy."""

    def __getitem__(self, index):
        noise = torch.tensor([random.gauss(0, 0.1), np.random.normal(0, 0.1)], dtype=torch.float32)
        return self.points[index] + noise + 0.1 * torch.randn(2), self.labels[index]


def average(model):
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))


def full_task(**changes):
    """Everything that a run has to remember: dropout, running statistics, momentum, schedule, average, augmentation."""
    fields = dict(
        model=lambda: network(dropout=0.3, norm=True),
        train_data=lambda: Jittered(50),
        scheduler=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total),
        ema=average,
        max_grad_norm=1.0,
    )
    return tiny_task(**{**fields, **changes})


def state_of(run):
    """Everything that a run ends with, as tensors by name."""
    model = run.parts.model.state_dict().items()
    found = {f"model.{name}": value for name, value in model if torch.is_tensor(value)}
    if run.parts.options.ema is not None:
        averaged = run.parts.options.ema.state_dict().items()
        found |= {f"ema.{name}": value for name, value in averaged if torch.is_tensor(value)}
    for i, optimizer in enumerate(run.step.optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            found |= {f"optimizer {i}.{j}.{name}": torch.as_tensor(value) for name, value in state.items()}
    rates = [group["lr"] for optimizer in run.step.optimizers for group in optimizer.param_groups]
    return copy.deepcopy(found) | {
        "learning rates": torch.tensor(rates, dtype=torch.float64),
        "random numbers": torch.get_rng_state(),
        "steps": torch.tensor(run.step.num_steps),
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def saved_at(task, step, folder, **how):
    """A run that was saved after so many steps and is gone."""
    run = Run(task, **how)
    checkpoints = Checkpoints(folder)
    saver = Saver(checkpoints, every=step)
    for record in run.steps(step):
        run.progress.add(record)
        if record.step % run._steps_per_epoch == 0:
            run.progress.epochs.append(run._end_epoch(record))
        saver.after_step(run)
    checkpoints.close()
    torch.manual_seed(999)
    random.seed(999)
    np.random.seed(999)


def gone_on(task, folder, **how):
    run = Run(task, **how)
    resume(run, newest(folder))
    return run, run.train()


@pytest.mark.parametrize(("step", "num_workers"), [(2, 0), (4, 0), (5, 0), (11, 0), (2, 2), (5, 2)])
def test_a_run_that_went_on_is_the_uninterrupted_one_bit_for_bit(tmp_path, step, num_workers):
    task = full_task(num_workers=num_workers)
    whole = Run(task, micro_batch_size=5)
    expected = whole.train()
    at_the_end = state_of(whole)

    saved_at(task, step, tmp_path, micro_batch_size=5)
    run, result = gone_on(task, tmp_path, micro_batch_size=5)

    assert_same(state_of(run), at_the_end)
    assert (result.loss, result.metrics, result.num_steps) == (expected.loss, expected.metrics, 12)
    assert [epoch.loss for epoch in result.epochs] == [epoch.loss for epoch in expected.epochs]


@pytest.mark.parametrize("forgotten", ["random", "optimizers", "schedulers", "ema", "model", "progress"])
def test_whatever_is_forgotten_shows(tmp_path, monkeypatch, forgotten):
    """Control: each thing that is restored is one without which the run would end elsewhere."""
    whole = Run(full_task(), micro_batch_size=5)
    whole.train()
    expected = state_of(whole)
    saved_at(full_task(), 5, tmp_path, micro_batch_size=5)

    run = Run(full_task(), micro_batch_size=5)
    nothing = lambda *args, **kwargs: None  # noqa: E731
    if forgotten == "random":
        monkeypatch.setattr("bigbatch.training.randomness.restore", nothing)
    elif forgotten == "optimizers":
        monkeypatch.setattr(run.step.optimizers[0], "load_state_dict", nothing)
    elif forgotten == "schedulers":
        monkeypatch.setattr(run.step.schedulers[0], "load_state_dict", nothing)
    elif forgotten == "ema":
        monkeypatch.setattr(run.parts.options.ema, "load_state_dict", nothing)
    elif forgotten == "model":
        monkeypatch.setattr(run.parts.model, "load_state_dict", nothing)
    resume(run, newest(tmp_path))
    if forgotten == "progress":
        run.progress.num_steps -= 1
    for _ in run.steps(7):
        pass

    found = state_of(run)
    assert any(not torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("before", "after"), [(5, 16), (16, 3), (3, 1)])
def test_a_run_may_go_on_with_another_micro_batch_size(tmp_path, before, after):
    """In float64, and without dropout and BatchNorm: it is the same training, up to rounding of the sum."""

    def data():
        points = Points(50)
        points.points = points.points.double()
        return points

    task = tiny_task(model=lambda: network().double(), train_data=data, eval_data=None, evaluate=None)
    whole = Run(task, micro_batch_size=before)
    whole.train()
    expected = state_of(whole)

    saved_at(task, 6, tmp_path, micro_batch_size=before)
    run, _ = gone_on(task, tmp_path, micro_batch_size=after)

    found = state_of(run)
    assert run.step.micro_batch_size == after
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_another_cut_is_bit_equal_where_sums_are_exact(tmp_path):
    """With whole numbers no sum is rounded, so nothing but the order of the samples could differ."""
    data = [torch.tensor([float(i % 5)], dtype=torch.float64) for i in range(24)]
    task = tiny_task(
        model=lambda: torch.nn.Linear(1, 1).double(),
        train_data=lambda: data,
        loss_fn=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5),
        eval_data=None,
        evaluate=None,
        batch_size=8,
    )
    whole = Run(task, micro_batch_size=4)
    whole.train()

    saved_at(task, 4, tmp_path, micro_batch_size=4)
    run, _ = gone_on(task, tmp_path, micro_batch_size=2)

    assert_same(state_of(run), state_of(whole))


def test_a_run_may_go_on_with_another_budget(tmp_path):
    wide = lambda: torch.nn.Sequential(torch.nn.Linear(2, 500), torch.nn.Linear(500, 3))  # noqa: E731
    task = tiny_task(model=wide)
    probe = Run(task)
    batch = next(iter(train_loader(task, probe.parts.train_data)))
    large = round(probe.step.measure(batch, 16) * 1.03)  # the planner keeps 2 % free
    small = (probe.step.measure(batch, 2) + large) // 2

    saved_at(task, 6, tmp_path, memory_budget=small)
    same = Run(task, memory_budget=small)
    resume(same, newest(tmp_path))
    other = Run(task, memory_budget=large)
    resume(other, newest(tmp_path))
    without = Run(task)
    resume(without, newest(tmp_path))

    assert same.step.plan is not None  # not measured again: the cut is that of before
    assert same.step.micro_batch_size == without.step.micro_batch_size < 16
    assert other.train().micro_batch_sizes == tuple(same.progress.micro_batch_sizes)
    assert other.step.micro_batch_size == 16
    assert other.peak_bytes <= large


def test_the_scale_of_fp16_goes_on(tmp_path):
    task = tiny_task(precision=torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2))
    whole = Run(task)
    whole.train()

    saved_at(task, 5, tmp_path)
    run, result = gone_on(task, tmp_path)

    assert_same(state_of(run), state_of(whole))
    scaler, expected = run.step.accumulator.precision.scaler, whole.step.accumulator.precision.scaler
    assert scaler.state_dict() == expected.state_dict()
    assert result.num_skipped > 0


def test_tied_weights_and_several_optimizers_go_on(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.second.weight = self.first.weight
            self.head = torch.nn.Linear(2, 3)

        def forward(self, x):
            return self.head(self.second(self.first(x).relu()))

        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            assert state == {"version": 3}

    def optimizers(model):
        return [torch.optim.SGD([model.first.weight], 0.1, momentum=0.9), torch.optim.Adam(model.head.parameters())]

    task = tiny_task(model=Tied, optimizer=optimizers, ema=average)
    whole = Run(task)
    whole.train()

    saved_at(task, 7, tmp_path)
    run, _ = gone_on(task, tmp_path)

    assert_same(state_of(run), state_of(whole))
    assert run.parts.model.first.weight is run.parts.model.second.weight


@pytest.mark.parametrize("first_step", range(7))
def test_the_order_goes_on_at_any_step(first_step):
    whole = list(LogicalBatches(10, batch_size=4, epochs=2, seed=3))

    rest = LogicalBatches(10, batch_size=4, epochs=2, seed=3, first_step=first_step)

    assert list(rest) == whole[first_step:]
    assert len(rest) == 6 - first_step


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_is_that_of_its_step_wherever_the_run_began(num_workers):
    """Of torch, Python and NumPy; and drawing it leaves the numbers of the model alone."""
    task = full_task(num_workers=num_workers)
    whole = [batch for batch, _ in train_loader(task, task.train_data())]
    before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]

    rest = [batch for batch, _ in train_loader(task, task.train_data(), first_step=5)]

    assert all(torch.equal(a, b) for a, b in zip(rest, whole[5:], strict=True))
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "other"}, "it is of another run: task tiny there and other here. Give what it was made with"),
        ({"seed": 5}, "seed 0 there and 5 here"),
        ({"batch_size": 8}, "batch size 16 there and 8 here"),
        ({"train_data": lambda: Points(40)}, "samples 50 there and 40 here"),
        ({"epochs": 4}, "epochs 3 there and 4 here"),
        ({"optimizer": lambda model: torch.optim.SGD(model.parameters())}, r"optimizers \['AdamW'\] there and \['SGD'"),
        ({"ema": None}, "ema AveragedModel there and None here"),
        ({"model": lambda: network(dropout=0.3)}, r"the model is another one: 1.bias float32 \(16,\) there and none"),
        ({"model": lambda: network(norm=True).double()}, "0.weight float32 .* there and float64"),
        (
            {
                "optimizer": lambda model: torch.optim.AdamW(
                    [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[4].parameters()]}]
                )
            },
            r"the optimizers are others: parameters in groups \[\[6\]\] there and \[\[2, 4\]\] here",
        ),
        ({"precision": "fp16"}, "The state has no scaler, but this Step has a scaler"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_nothing_changes(tmp_path, changes, message):
    saved_at(full_task(), 5, tmp_path)
    run = Run(full_task(**changes))
    before = state_of(run)

    with pytest.raises(bb.CheckpointError, match=message):
        resume(run, newest(tmp_path))

    assert_same(state_of(run), before)


def test_a_broken_checkpoint_changes_nothing(tmp_path):
    saved_at(full_task(), 5, tmp_path)
    file = tmp_path / "step-00000005" / "state.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    run = Run(full_task())
    before = state_of(run)

    with pytest.raises(bb.CheckpointError, match="state.pt has changed since it was written"):
        resume(run, verified(file.parent))

    assert_same(state_of(run), before)


def test_more_epochs_may_be_added_when_no_schedule_was_planned(tmp_path):
    whole = Run(tiny_task(epochs=5))
    whole.train()

    saved_at(tiny_task(epochs=3), 12, tmp_path)
    run, result = gone_on(tiny_task(epochs=5), tmp_path)

    assert_same(state_of(run), state_of(whole))
    assert [epoch.epoch for epoch in result.epochs] == [1, 2, 3, 4, 5]


class Opaque:
    """Something that a safe reader of pickles does not know."""


class NoState:
    def update(self, model):
        pass


class OpaqueState(NoState):
    def state_dict(self):
        return {"what": Opaque()}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("ema", "message"),
    [
        (NoState, "its ema, a NoState, has no state_dict and load_state_dict"),
        (OpaqueState, r"(?s)Opaque.*add_safe_globals\(\[ItsClass\]\)"),
    ],
)
def test_what_cannot_be_saved_is_told_before_the_training(tmp_path, ema, message):
    steps = []
    run = Run(tiny_task(ema=lambda model: ema(), loss_fn=lambda model, batch: steps.append(1)))

    with pytest.raises(bb.CheckpointError, match=message):
        run.train(Saver(Checkpoints(tmp_path)))

    assert steps == []


def test_a_run_is_saved_every_so_many_steps_and_at_its_end(tmp_path):
    saved = []

    class Watched(Checkpoints):
        def save(self, step, *args, **kwargs):
            saved.append(step)
            return super().save(step, *args, **kwargs)

    Run(tiny_task()).train(Saver(Watched(tmp_path), every=5))

    assert saved == [5, 10, 12]
    assert [path.name for path in paths_in(tmp_path)] == ["step-00000010", "step-00000012"]


def test_without_a_number_of_steps_it_is_saved_after_some_time(tmp_path, monkeypatch):
    clock = itertools.count(0, 100)  # 100 seconds from one look to the next
    monkeypatch.setattr(saving, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(clock))}))
    checkpoints = Checkpoints(tmp_path / "some", keep=99)

    Run(tiny_task()).train(Saver(checkpoints))
    Run(tiny_task()).train(Saver(Checkpoints(tmp_path / "none"), seconds_between=1e9))

    assert [int(path.name[5:]) for path in paths_in(checkpoints.folder)] == [6, 12]
    assert paths_in(tmp_path / "none") == []


def test_the_log_goes_on_without_a_step_twice(tmp_path):
    """The run dies three steps after it was saved; those three are made again."""
    log = tmp_path / "log.jsonl"
    run = Run(tiny_task(), listeners=[first := JsonLog(log)])
    saver = Saver(Checkpoints(tmp_path / "checkpoints"), every=6)
    for record in run.steps(9):
        run.progress.add(record)
        if record.step in (4, 8):
            run.progress.epochs.append(run._end_epoch(record))
        saver.after_step(run)
    first.close()
    with log.open("a") as file:
        file.write('{"event": "step", "st')  # killed within a line

    run = Run(tiny_task())
    resume(run, newest(tmp_path / "checkpoints"))
    run.listeners.append(JsonLog(log, first_step=run.info.first_step))
    run.train()

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 13))
    assert [line["step"] for line in lines if line["event"] == "epoch"] == [4, 8, 12]
    assert [line["event"] for line in lines][:1] == ["run"]
    assert [line["first_step"] for line in lines if line["event"] == "resume"] == [6]


TASKS = """
import time
import torch
from tests.training.tiny import Points, network, tiny_task

def slow_loss(model, batch):
    time.sleep(0.02)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def quick():
    return tiny_task(name="quick", model=lambda: network(dropout=0.2))

def slow(num_workers=0):
    return tiny_task(name="slow", model=lambda: network(dropout=0.2), loss_fn=slow_loss, epochs=60)

def slow_with_workers():
    return tiny_task(
        name="slow", model=lambda: network(dropout=0.2), loss_fn=slow_loss, epochs=60, num_workers=2
    )
"""


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs ``bigbatch train``; gives exit code, output and errors."""
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)

    def run(name, *options):
        code = main(["train", f"tasks.py:{name}", "--device", "cpu", "--threads", "1", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_command_line_goes_on_where_it_was(train, tmp_path):
    code, out, _ = train("quick", "--run-dir", "a", "--checkpoint-every", "5", "--resume", "auto")
    weights = (tmp_path / "a/model.safetensors").read_bytes()
    (tmp_path / "a/checkpoints/step-00000012/state.pt").unlink()
    (tmp_path / "a/model.safetensors").unlink()

    code_again, out_again, _ = train("quick", "--run-dir", "a", "--resume", "auto")

    assert (code, code_again) == (0, 0)
    assert "goes on" not in out
    assert "checkpoint a/checkpoints/step-00000012 cannot be used: state.pt is missing" in out_again
    assert "goes on from a/checkpoints/step-00000010, which is as it was written" in out_again
    assert "12 steps on cpu, goes on after step 10" in out_again
    assert "12 steps in" in out_again
    assert (tmp_path / "a/model.safetensors").read_bytes() == weights
    assert (tmp_path / "a/log.jsonl").read_text().count('"event": "step"') == 12


def test_the_command_line_goes_on_from_the_path_of_a_checkpoint(train, tmp_path):
    train("quick", "--run-dir", "a", "--checkpoint-every", "5")

    code, out, _ = train("quick", "--resume", "a/checkpoints/step-00000010", "--run-dir", "b")
    code_at_home, _, _ = train("quick", "--resume", "a/checkpoints/step-00000010")

    assert (code, code_at_home) == (0, 0)
    assert "goes on after step 10" in out
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert (tmp_path / "a/log.jsonl").read_text().count('"event": "step"') == 12
    assert (tmp_path / "b/log.jsonl").read_text().count('"event": "step"') == 2


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--resume", "auto", "--run-dir", "a", "--seed", "3"], 1, "it is of another run: seed 0 there and 3 here"),
        (["--resume", "a/checkpoints/step-00000099"], 1, "cannot be used: there is no such folder"),
        (
            ["--run-dir", "a"],
            1,
            "a holds the files of another run. Give another --run-dir, remove that folder, or go on",
        ),
        (["--resume", "auto"], 2, "--resume auto needs --run-dir"),
        (["--check", "20", "--checkpoint-every", "3"], 2, "--check keeps nothing; leave --resume and"),
        (["--checkpoint-every", "0"], 2, "Invalid value for '--checkpoint-every'"),
    ],
)
def test_what_cannot_go_on_is_told(train, options, code, message):
    train("quick", "--run-dir", "a", "--checkpoint-every", "5")

    found, _, err = train("quick", *options)

    assert found == code
    assert message in " ".join(err.replace("│", " ").split())


def test_a_place_that_cannot_be_written_to_is_told_before_the_training(train, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoints").write_text("in the way")

    code, out, err = train("quick", "--run-dir", "a")

    assert code == 1
    assert err.startswith("bigbatch: No checkpoint can be written to a/checkpoints: File exists")
    assert "step 1" not in out


def started(tmp_path, name, *options, **how):
    (tmp_path / "tasks.py").write_text(TASKS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "bigbatch", "train", f"tasks.py:{name}", "--run-dir", "run", "--threads", "1"]
    return subprocess.Popen(
        [*command, *options],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def wait_for_steps(tmp_path, count):
    log = tmp_path / "run" / "log.jsonl"
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_text().count('"event": "step"') < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGTERM, 143, "slow"), (signal.SIGINT, 130, "slow_with_workers")]
)
def test_a_signal_lets_the_step_end_and_saves(tmp_path, number, code, name):
    """A terminal sends Ctrl-C to the workers too, so the whole group of processes gets it."""
    process = started(tmp_path, name, "--resume", "auto", start_new_session=True)
    wait_for_steps(tmp_path, 3)

    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (code, "") or "same in distribution" in err
    assert process.returncode == code
    found = newest(tmp_path / "run" / "checkpoints")
    told = f"bigbatch: Stopped by {number.name} after step {found.step} of 240, and saved in {Path('run')}/checkpoints/"
    assert told in out
    assert out.rstrip().endswith("To go on, give --run-dir run --resume auto.")
    steps = (tmp_path / "run/log.jsonl").read_text().count('"event": "step"')
    assert steps == found.step >= 3


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_end_with_a_run_that_is_killed(tmp_path):
    process = started(tmp_path, "slow_with_workers")
    wait_for_steps(tmp_path, 1)
    workers = psutil.Process(process.pid).children()

    process.kill()
    process.communicate()

    deadline = time.monotonic() + 3  # torch's own watchdog looks after five seconds
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(workers) == 2


def test_a_second_signal_stops_at_once(tmp_path):
    """The loss takes a minute; the first signal waits for it, and the second does not."""
    code = """
import time, tasks
def loss(model, batch):
    print("in a step", flush=True)
    for _ in range(600):
        time.sleep(0.1)
task = tasks.tiny_task(loss_fn=loss)
"""
    (tmp_path / "forever.py").write_text(code)
    (tmp_path / "tasks.py").write_text(TASKS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "bigbatch", "train", "forever.py:task", "--run-dir", "other"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    while "in a step" not in process.stdout.readline():
        pass

    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)

    assert process.wait(5) == -signal.SIGTERM
    process.stdout.close()


def test_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    Run(tiny_task(epochs=1)).train(Saver(Checkpoints(tmp_path)))

    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_signal_that_was_ignored_stays_ignored(tmp_path):
    """A shell lets its jobs in the background ignore Ctrl-C, which is meant for the one in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    steps = []

    def loss(model, batch):
        steps.append(1)
        signal.raise_signal(signal.SIGINT)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    try:
        result = Run(tiny_task(epochs=1, loss_fn=loss)).train(Saver(Checkpoints(tmp_path)))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

    assert result.num_steps == len(steps) == 4


def test_the_same_signal_stops_a_run_that_hears_it(tmp_path):
    """Control, and from Python: the run raises when it is saved, and goes on to the same end."""
    whole = Run(tiny_task())
    whole.train()
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGTERM)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(bb.RunStopped, match="Stopped by SIGTERM after step 6 of 12, and saved in .*000006") as caught:
        Run(tiny_task(loss_fn=loss)).train(Saver(Checkpoints(tmp_path)))
    run, _ = gone_on(tiny_task(loss_fn=loss), tmp_path)

    assert (caught.value.signal_number, caught.value.path) == (signal.SIGTERM, tmp_path / "step-00000006")
    assert_same(state_of(run), state_of(whole))


def test_a_run_that_was_killed_goes_on_to_the_same_end(train, tmp_path):
    task = ["slow", "--epochs", "6", "--checkpoint-every", "3"]
    process = started(tmp_path, *task)
    wait_for_steps(tmp_path, 8)
    process.kill()
    process.communicate()

    _, out, _ = train(*task, "--run-dir", "run", "--resume", "auto")
    train(*task, "--run-dir", "uninterrupted")

    assert "goes on from run/checkpoints/step-" in out
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "uninterrupted")]
    assert weights[0] == weights[1]
