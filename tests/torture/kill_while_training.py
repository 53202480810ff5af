"""kill -9 at random moments of training, and ``--resume auto`` each time, until the run has reached its end.

``python -m tests.torture.kill_while_training --kills 100`` prints a table; the exit code is 1 when weights, averages or
the steps in the log differ from those of the run that nobody disturbed. Half of the runs load their data in two
processes of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bigbatch.cli.main import main as bigbatch
from bigbatch.training.events import RunInfo
from bigbatch.training.log import JsonLog
from tests.torture.saved_runs import Child

TASKS = """
import torch
from tests.training.test_resume import full_task

def without_workers():
    return full_task(name="killed", epochs=10, batch_size=10)

def with_workers():
    return full_task(name="killed", epochs=10, batch_size=10, num_workers=2)
"""


def arguments_of(tasks: Path, name: str, run_dir: Path) -> list[str]:
    task = ["train", f"{tasks}:{name}", "--device", "cpu", "--threads", "1", "--micro-batch-size", "4"]
    return [*task, "--run-dir", str(run_dir), "--resume", "auto", "--checkpoint-every", "3"]


def started(tasks: Path, name: str, run_dir: Path) -> Child:
    """A run in a process of its own, which tells when the training begins, and after which step."""

    def work(tell: Callable[[int], None]) -> int:
        began = JsonLog.began

        def heard(self: JsonLog, info: RunInfo) -> None:
            began(self, info)
            tell(info.first_step)

        JsonLog.began = heard
        return bigbatch(arguments_of(tasks, name, run_dir))

    return Child(work)


def what_is_left(run_dir: Path) -> tuple[bytes, bytes, list[tuple[str, int, float]]]:
    """Weights, averages, and the losses in the log."""
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    losses = [(line["event"], line["step"], line["loss"]) for line in lines if line["event"] in ("step", "epoch")]
    files = [(run_dir / name).read_bytes() for name in ("model.safetensors", "ema.safetensors")]
    return files[0], files[1], losses


@dataclass
class Row:
    """Counts of one task; ``went_on``: the steps after which a killed run went on."""

    kills: int = 0
    ends: int = 0
    equal: int = 0
    went_on: list[int] = field(default_factory=list)


def attack(row: Row, tasks: Path, name: str, kills: int, generator: random.Random) -> None:
    """Kill a run again and again until it has reached its end, then the next one, until there were so many kills."""
    undisturbed = tasks.parent / f"{name}-undisturbed"
    child = started(tasks, name, undisturbed)
    child.wait_until_it_tells()
    began = time.monotonic()
    code, _ = child.kill_after(600)
    seconds = time.monotonic() - began
    assert code == 0
    expected = what_is_left(undisturbed)
    while row.kills < kills:
        run_dir = tasks.parent / f"{name}-{row.ends}"
        code = None
        while code is None:
            # Once there are enough kills the run may reach its end.
            patience = 600 if row.kills >= kills else generator.uniform(0, 0.6 * seconds)
            child = started(tasks, name, run_dir)
            child.wait_until_it_tells()
            began = time.monotonic()
            code, told = child.kill_after(patience)
            row.kills += code is None
            if code is not None and told == [0]:  # all of it, and perhaps faster than the first one
                seconds = min(seconds, time.monotonic() - began)
            row.went_on += [step for step in told if step]
        row.ends += 1
        row.equal += code == 0 and what_is_left(run_dir) == expected


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(arguments)
    torch.set_num_threads(1)
    generator = random.Random(wanted.seed)
    rows = {name: Row() for name in ("without_workers", "with_workers")}
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks_to_kill.py"
        tasks.write_text(TASKS)
        for name, row in rows.items():
            attack(row, tasks, name, wanted.kills // 2, generator)
    print(f"{'task':<16} {'kills -9':>9} {'went on after steps':>40} {'runs that ended':>16} {'bit-equal':>10}")
    for name, row in rows.items():
        after = f"{len(row.went_on)} times, {len(set(row.went_on))} steps, {min(row.went_on)} to {max(row.went_on)}"
        print(f"{name:<16} {row.kills:>9} {after:>40} {row.ends:>16} {row.equal:>10}")
    # Kills that hit nothing would show nothing.
    hit = all(len(row.went_on) >= row.kills / 2 for row in rows.values())
    return 0 if hit and all(row.equal == row.ends > 0 for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
