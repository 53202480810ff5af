"""``bigbatch train --nproc-per-node``: real ranks, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from bigbatch.cli.launching import _threads_for, _told
from bigbatch.cli.main import main
from bigbatch.training.loop import Run
from tests.training.tiny import tiny_task

ROOT = Path(__file__).parents[2]
TASKS = """
import os, sys
import torch
from tests.training.tiny import Points, network, tiny_task

task = tiny_task(name="tiny", batch_size=10, epochs=2)
long = tiny_task(name="long", train_data=lambda: Points(500), epochs=10_000)

def broken():
    class Broken(Points):
        def __getitem__(self, index):
            if os.environ.get("RANK") == "1":
                raise KeyError("this sample is not there")
            return super().__getitem__(index)
    return tiny_task(train_data=lambda: Broken(50))
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_tasks(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")


def losses(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def losses_of_one():
    seen = []
    run = Run(tiny_task(name="tiny", batch_size=10, epochs=2))
    return [seen.append(float(record.result.loss)) or seen[-1] for record in run.steps()]


def test_two_ranks_train_and_print_once(tmp_path, capfd):
    code = main(["train", "mine.py:task", "--device", "cpu", "--run-dir", "here", "--micro-batch-size", "3",
                 "--nproc-per-node", "2"])  # fmt: skip

    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert out.count("tiny: 50 samples, 99 parameters, batch 10, 2 epochs = 10 steps on cpu, 2 ranks") == 1
    assert out.count("micro × accumulation × ranks: 3 × 2 × 2 = 10, the last holds 2") == 1
    assert out.count("step 10/10") == out.count("accuracy") == out.count("files: here/model.safetensors") == 1
    assert losses(tmp_path / "here") == pytest.approx(losses_of_one(), rel=1e-5)
    assert json.loads((tmp_path / "here/result.json").read_text())["num_ranks"] == 2


def failures(**exit_codes):
    return {
        int(rank[1:]): SimpleNamespace(exitcode=code, pid=100 + int(rank[1:]), timestamp=1000)
        for rank, code in exit_codes.items()
    }


@pytest.mark.parametrize(
    ("exit_codes", "code", "words"),
    [
        ({"r1": -9}, 1, "rank 1 of 4 (process 101) was ended by SIGKILL, and the others were ended with it."),
        ({"r0": 1, "r2": -9, "r1": -15}, 1, "rank 2 of 4 (process 102) was ended by SIGKILL"),
        ({"r3": -11, "r1": 1}, 1, "rank 3 of 4 (process 103) was ended by SIGSEGV"),
        ({"r2": 1, "r0": -15}, 1, "rank 2 of 4 (process 102) ended with exit code 1"),
        ({"r1": 143, "r0": -15}, 143, None),
        ({"r0": 130}, 130, None),
        ({"r0": 1, "r1": -15}, 1, None),
    ],
)
def test_the_rank_that_ended_the_others_is_named(exit_codes, code, words, capsys):
    assert _told(failures(**exit_codes), 4) == code
    err = capsys.readouterr().err
    assert (words in err) if words else err == ""


def test_the_cores_are_shared_by_the_ranks(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS")
    with _threads_for(5):
        assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in os.environ


def test_what_the_user_said_of_threads_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with _threads_for(5):
        assert os.environ["OMP_NUM_THREADS"] == "7"


def test_a_rank_of_another_number_of_ranks_is_refused(monkeypatch, capsys):
    place = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))

    assert main(["train", "digits", "--nproc-per-node", "2"]) == 1
    assert "bigbatch, rank 1 of 4: --nproc-per-node 2, but this is rank 1 of 4" in capsys.readouterr().err


class Started:
    """The command in a process of its own, with its ranks."""

    def __init__(self, *command):
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ranks(self):
        """By rank, once all of them have made a step."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if any(Path(".").glob("here/log.jsonl")) and '"step"' in Path("here/log.jsonl").read_text():
                break
            time.sleep(0.1)
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda child: int(child.environ()["RANK"]))

    def ended(self):
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


LONG = ["bigbatch", "train", "mine.py:long", "--device", "cpu", "--run-dir", "here"]


@pytest.mark.slow
def test_plain_torchrun_starts_the_same_run(tmp_path):
    started = Started("torch.distributed.run", "--nproc-per-node", "3", "-m", "bigbatch", "train", "mine.py:task",
                      "--device", "cpu", "--run-dir", "here")  # fmt: skip
    code, out, err = started.ended()

    assert code == 0, err
    assert out.count("10 steps on cpu, 3 ranks") == 1
    assert losses(tmp_path / "here") == pytest.approx(losses_of_one(), rel=1e-5)


@pytest.mark.slow
def test_what_fsdp2_saved_in_parts_goes_on_in_one_process(tmp_path):
    command = ["train", "mine.py:task", "--device", "cpu", "--run-dir", "here", "--checkpoint-every", "4"]
    code, _, err = Started("bigbatch", *command, "--parallel", "fsdp2", "--nproc-per-node", "2").ended()
    assert code == 0, err
    weights = load_file(tmp_path / "here/model.safetensors")
    saved = tmp_path / "here/checkpoints"
    assert {path.name for path in (saved / "step-00000008").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    shutil.rmtree(saved / "step-00000010")

    assert main([*command, "--resume", "auto"]) == 0

    assert losses(tmp_path / "here") == pytest.approx(losses_of_one(), rel=1e-5)
    for name, tensor in load_file(tmp_path / "here/model.safetensors").items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_others_and_is_named(killed):
    started = Started(*LONG, "--nproc-per-node", "2")
    ranks = started.ranks()
    begin = time.monotonic()
    ranks[killed].kill()
    code, _, err = started.ended()

    assert time.monotonic() - begin < 30
    assert code == 1
    assert re.search(rf"bigbatch: rank {killed} of 2 \(process {ranks[killed].pid}\) was ended by SIGKILL", err)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("told", ["launcher", "all", "rank 1"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_once_and_the_run_goes_on(told, number, code, tmp_path):
    """Sent to the launcher, to one rank, or to all processes at once, as job managers do."""
    started = Started(*LONG, "--nproc-per-node", "2")
    ranks = started.ranks()
    pids = {"launcher": [started.process.pid], "rank 1": [ranks[1].pid]}
    pids["all"] = [*pids["launcher"], *(rank.pid for rank in ranks)]
    for pid in pids[told]:
        os.kill(pid, number)
    found, out, err = started.ended()

    assert found == code, err
    assert out.count(f"Stopped by {number.name} after step") == 1
    assert "To go on, give --run-dir here --resume auto." in out
    (saved,) = (tmp_path / "here/checkpoints").glob("step-*")
    assert torch.load(saved / "state.pt", weights_only=True)["random"].__len__() == 2


@pytest.mark.slow
def test_the_rank_of_an_error_of_the_users_is_named():
    code, _, err = Started("bigbatch", "train", "mine.py:broken", "--device", "cpu", "--nproc-per-node", "2").ended()

    assert code == 1
    assert "bigbatch, rank 1 of 2: KeyError, which is told below" in err
    assert "this sample is not there" in err
    assert "bigbatch, rank 0 of 2: Rank 1 failed: KeyError: 'this sample is not there'" in err


@pytest.mark.slow
def test_an_error_of_all_ranks_is_told_once(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/log.jsonl").write_text("")
    code, _, err = Started(*LONG, "--nproc-per-node", "2").ended()

    assert code == 1
    assert err.count("here holds the files of another run") == 1
