"""A run under FSDP2 on two ranks: what a rank holds on its host while it saves and reads, and kill -9 while it saves.

``python -m tests.torture.sharded_checkpoints --kills 100 --megabytes 200`` prints two tables; the exit code is 1 when
something is wrong. The control is the state in one piece on each rank, as ``full_tensor`` gives it.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import bigbatch as bb
from bigbatch.training import resuming, sharded_files
from bigbatch.training.checkpoint import Checkpoints, newest
from bigbatch.training.group import Group, joined
from bigbatch.training.log import save_result
from bigbatch.training.loop import Run
from bigbatch.training.rank import Rank
from bigbatch.training.saving import Saver
from bigbatch.training.sharding import flat, take_part
from tests.training.processes import free_port, on_ranks
from tests.training.tiny import Points, loss_fn

_WIDTH = 512


def task(megabytes: float) -> bb.Task:
    """A chain of layers; with the moments of AdamW its state is of so many MB."""
    depth = max(1, round(megabytes * 1e6 / 3 / (4 * _WIDTH * _WIDTH)))
    layers = [nn.Linear(2, _WIDTH), *(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth)), nn.Linear(_WIDTH, 3)]
    return bb.Task(
        model=lambda: nn.Sequential(*layers),
        train_data=lambda: Points(4),
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        batch_size=4,
        name="marked",
    )


def sharded(group: Group) -> Group:
    return Group(Rank(group.rank, group.world_size), group.store, parallel="fsdp2")


def _held_bytes() -> int:
    """Memory of this process that is in no file, on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def _more_held(found: dict[str, float], name: str) -> Iterator[None]:
    """Note the most MB that this process held more than before, looking every millisecond."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken again, and not show
    before, most, ended = _held_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], _held_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        most[0] = max(most[0], _held_bytes())
        ended.set()
        thread.join()
        found[name] = (most[0] - before) / 1e6


def held(group: Group, folder: Path, megabytes: float) -> dict[str, float]:
    """MB that this rank holds more than before, while a run is saved, read back, and its weights are written."""
    found: dict[str, float] = {}
    group = sharded(group)
    run = Run(task(megabytes), group=group)
    result = run.train()
    saver = Saver(Checkpoints(folder / "sharded") if group.is_first else None)
    with _more_held(found, "saving"):
        saver._save(run)
    with _more_held(found, "writing the weights"):
        if group.is_first:
            save_result(folder, result, run.parts.model, None)
        else:
            take_part(run.parts.model)
    with _more_held(found, "control: the state in one piece"):
        tensors = flat(resuming._tensors_of(run)).values()
        pieces = [tensor.full_tensor() for tensor in tensors if isinstance(tensor, DTensor)]
    del pieces
    for name in ("sharded", "one piece"):
        again = Run(task(megabytes), group=group)
        with _more_held(found, f"reading, {name}"):
            resuming.resume(again, newest(folder / name))
    return found


def print_held(folder: Path, megabytes: float) -> bool:
    """Print what two ranks hold; whether it is far less than all of it."""
    saver = Saver(Checkpoints(folder / "one piece"), every=1)
    run = Run(task(megabytes))
    run.train(saver)
    ranks = on_ranks(2, held, folder, megabytes)
    print(f"MB that a rank holds more, of a state of {megabytes:.0f} MB, of which it has the half")
    for name in ranks[0]:
        print(f"{name:<34}" + "".join(f"{rank[name]:>9.1f}" for rank in ranks))
    most = max(rank["saving"] for rank in ranks), max(rank["reading, sharded"] for rank in ranks)
    least = min(rank["control: the state in one piece"] for rank in ranks)
    return most[0] < megabytes / 10 and most[1] < 0.6 * megabytes and least > 0.9 * megabytes


def mark(run: Run, step: int) -> None:
    """Put the number of the step into every tensor that is spread over the ranks, and into the progress."""
    with torch.no_grad():
        for tensor in resuming.spread_of(run).values():
            tensor.to_local().fill_(step)
    run.progress.num_steps = run.step.num_steps = step


def _save_again_and_again(rank: int, port: int, folder: Path, first: int, megabytes: float, tells: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=f"{port}")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    with joined(Rank(rank, 2), torch.device("cpu"), parallel="fsdp2") as group:
        run = Run(task(megabytes), group=group)
        run.train()
        saver = Saver(Checkpoints(folder) if group.is_first else None)
        for step in range(first, first + 10_000):
            mark(run, step)
            saver._save(run)
            tells.send(step)


def kill(folder: Path, first: int, megabytes: float, draw: random.Random) -> int:
    """Kill one of two ranks, or both, at a random moment of some saves; the last step that was told to be saved."""
    context = multiprocessing.get_context("forkserver")
    hears, tells = context.Pipe(duplex=False)
    port = free_port()
    ranks = [
        context.Process(target=_save_again_and_again, args=(rank, port, folder, first, megabytes, tells), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    assert hears.poll(60), "Nothing was saved."
    time.sleep(draw.uniform(0, 0.3))
    killed = draw.choice([ranks[:1], ranks[1:], ranks])
    for rank in killed:
        os.kill(rank.pid or 0, signal.SIGKILL)
    time.sleep(draw.uniform(0, 0.2))  # the other one may go on with what is left to do
    for rank in ranks:
        rank.kill()
        rank.join()
    done = first - 1
    while hears.poll():
        done = max(done, hears.recv())
    return done


def marks_in(path: Path) -> set[int]:
    """All numbers in the files of the ranks, and the step that ``state.pt`` is of."""
    state = torch.load(path / "state.pt", weights_only=True)
    tensors = flat({"model": state["model"], "optimizers": state["optimizers"]})
    rooms = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items() if t.is_meta}
    sharded_files.read(rooms, path)
    numbers = {int(number) for room in rooms.values() for number in (room.min(), room.max())}
    return numbers | {state["progress"]["num_steps"]}


def outcome(folder: Path, done: int) -> tuple[str, int]:
    """What is there after a kill, and its step."""
    try:
        found = newest(folder)
        marks = marks_in(found.path) if found else set()
    except Exception as error:
        return f"unreadable: {error}", done
    if found is None or found.refused or marks != {found.step}:
        return "wrong: refused or mixed", done
    return {done: "the last one", done + 1: "the one being written"}.get(found.step, "further back"), found.step


def kills(folder: Path, count: int, megabytes: float, draw: random.Random) -> Counter[str]:
    """What was found after so many kills, one after the other in one folder."""
    outcomes: Counter[str] = Counter()
    step = 0
    for _ in range(count):
        done = kill(folder, step + 1, megabytes, draw)
        outcomes["within a save"] += any(folder.glob(".unfinished-*"))
        what, step = outcome(folder, done)
        outcomes[what] += 1
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--megabytes", type=float, default=200.0, help="of the state whose memory is looked at")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        is_lean = print_held(Path(folder), wanted.megabytes)
        found = kills(Path(folder) / "kills", wanted.kills, 8.0, random.Random(wanted.seed))
    print(f"\nfound after kill -9 of one rank or both, of {wanted.kills}")
    for name, number in found.items():
        print(f"{name:<34}{number:>9}")
    good = found["the last one"] + found["the one being written"]
    return 0 if is_lean and good == wanted.kills and found["within a save"] else 1


if __name__ == "__main__":
    sys.exit(main())
