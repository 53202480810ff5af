"""kill -9 at random moments while checkpoints are written, one after the other.

``python -m tests.torture.kill_while_saving --kills 1000`` prints a table; the exit code is 1 when something is wrong.
The control is the same with ``torch.save`` to one path.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import bigbatch as bb
from bigbatch.training import resuming
from bigbatch.training.checkpoint import Checkpoints, newest
from bigbatch.training.loop import Run
from tests.torture.saved_runs import Child, mark, marked_run, marks_in

_OUTCOMES = ("the last one", "the one being written", "further back", "mixed", "unreadable")


def save(run: Run, folder: Path, step: int) -> None:
    mark(run, step)
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, resuming.parts_of(run), about=resuming.about(run))
    checkpoints.close()


def outcome(folder: Path, done: int) -> str:
    """What is there after a kill, when the child had told that step ``done`` is saved."""
    try:
        found = newest(folder)
        marks = marks_in(found.path) if found else set()
    except (bb.CheckpointError, RuntimeError, OSError):
        return "unreadable"
    if found is None or found.refused:
        return "unreadable"
    return _judged(marks, found.step, done)


def _judged(marks: set[int], step: int, done: int) -> str:
    if marks != {step}:
        return "mixed"
    return {done: "the last one", done + 1: "the one being written"}.get(step, "further back")


def kills(run: Run, folder: Path, count: int, generator: random.Random) -> Counter[str]:
    """Kill so many writers in a row, in one folder, as a run that is started again and again would do."""
    began = time.monotonic()
    for step in (1, 2, 3):
        save(run, folder, step)
    seconds = (time.monotonic() - began) / 3
    outcomes: Counter[str] = Counter()
    step = 3
    for _ in range(count):

        def work(tell, first=step + 1):
            checkpoints = Checkpoints(folder)
            for number in range(first, first + 1000):
                mark(run, number)
                checkpoints.save(number, resuming.parts_of(run), about=resuming.about(run))
                tell(number)

        code, told = Child(work).kill_after(generator.uniform(0, 3 * seconds))
        assert code is None, "The child ended before it was killed."
        done = max([step, *told])
        outcomes[outcome(folder, done)] += 1
        outcomes["within a save"] += any(folder.glob(".unfinished-*"))
        found = newest(folder)
        step = found.step if found else done
    return outcomes


def plain_kills(run: Run, path: Path, count: int, generator: random.Random) -> Counter[str]:
    """The same with ``torch.save`` to one path."""

    def write(step: int) -> None:
        mark(run, step)
        torch.save(
            {"step": step, "model": run.parts.model.state_dict(), "adam": run.step.optimizers[0].state_dict()}, path
        )

    began = time.monotonic()
    write(1)
    seconds = time.monotonic() - began
    outcomes: Counter[str] = Counter()
    step = 1
    for _ in range(count):

        def work(tell, first=step + 1):
            for number in range(first, first + 1000):
                write(number)
                tell(number)

        code, told = Child(work).kill_after(generator.uniform(0, 3 * seconds))
        assert code is None, "The child ended before it was killed."
        done = max([step, *told])
        try:
            state = torch.load(path, weights_only=True)
            step = state["step"]
            tensors = [*state["model"].values(), *(t for one in state["adam"]["state"].values() for t in one.values())]
            marks = {int(tensor.min()) for tensor in tensors} | {int(tensor.max()) for tensor in tensors}
            outcomes[_judged(marks, step, done)] += 1
        except Exception:
            outcomes["unreadable"] += 1
            write(step := done)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--control-kills", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(arguments)
    torch.set_num_threads(1)
    run = marked_run(wanted.megabytes)
    generator = random.Random(wanted.seed)
    with tempfile.TemporaryDirectory() as folder:
        ours = kills(run, Path(folder) / "checkpoints", wanted.kills, generator)
        plain = plain_kills(run, Path(folder) / "plain.pt", wanted.control_kills, generator)
    print(f"found after kill -9      {'checkpoints':>12}  torch.save to one path")
    for name in _OUTCOMES:
        print(f"{name:<24} {ours[name]:>12}  {plain[name]:>22}")
    print(f"{'kills within a save':<24} {ours['within a save']:>12}")
    print(f"{'kills':<24} {wanted.kills:>12}  {wanted.control_kills:>22}")
    good = ours["the last one"] + ours["the one being written"]
    # Kills that hit nothing would show nothing.
    return 0 if good == wanted.kills and ours["within a save"] > wanted.kills / 4 else 1


if __name__ == "__main__":
    sys.exit(main())
