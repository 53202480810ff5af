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
from pathlib import Path

import torch

from bigbatch.cli.main import main as bigbatch
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
    return Child(lambda tell: bigbatch(arguments_of(tasks, name, run_dir)))


def what_is_left(run_dir: Path) -> tuple[bytes, bytes, list[tuple[str, int, float]]]:
    """Weights, averages, and the losses in the log."""
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    losses = [(line["event"], line["step"], line["loss"]) for line in lines if line["event"] in ("step", "epoch")]
    files = [(run_dir / name).read_bytes() for name in ("model.safetensors", "ema.safetensors")]
    return files[0], files[1], losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(arguments)
    torch.set_num_threads(1)
    generator = random.Random(wanted.seed)
    rows = {name: dict(kills=0, ends=0, equal=0, refused=0) for name in ("without_workers", "with_workers")}
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks_to_kill.py"
        tasks.write_text(TASKS)
        for name, row in rows.items():
            undisturbed = Path(folder) / f"{name}-undisturbed"
            began = time.monotonic()
            code, _ = started(tasks, name, undisturbed).kill_after(600)
            seconds = time.monotonic() - began
            assert code == 0
            expected = what_is_left(undisturbed)
            while row["kills"] < wanted.kills // 2:
                run_dir = Path(folder) / f"{name}-{row['ends']}"
                while True:
                    # Once there are enough kills the run may reach its end.
                    enough = row["kills"] >= wanted.kills // 2
                    code, _ = started(tasks, name, run_dir).kill_after(
                        600 if enough else generator.uniform(0, 0.7 * seconds)
                    )
                    if code is not None:
                        break
                    row["kills"] += 1
                row["ends"] += 1
                row["refused"] += code != 0
                row["equal"] += code == 0 and what_is_left(run_dir) == expected
    print(f"{'task':<16} {'kills -9':>9} {'runs that ended':>16} {'bit-equal':>10} {'failed':>7}")
    for name, row in rows.items():
        print(f"{name:<16} {row['kills']:>9} {row['ends']:>16} {row['equal']:>10} {row['refused']:>7}")
    return 0 if all(row["equal"] == row["ends"] > 0 for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
