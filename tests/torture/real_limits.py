"""Steps under real limits on memory: each in a fresh process, from limits that hold nothing to limits that hold all.

    python -m tests.torture.real_limits [--limits 100] [--models conv transformer] [--processes 1]

A process makes a network, one small step (threads, optimizer state), and sets ``bb.limit_memory``; then comes one step
of the whole batch. It fits; or it recovers, and its gradient is that of an undisturbed step of the micro-batch sizes
that were used; or it stops with an error that says so, and nothing has moved. Anything else is wrong, and so is a
process that ends by itself. Bit for bit is not promised here: a library that gets no room to work in may take another
way to the same number.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bigbatch as bb
from bigbatch.memory.measure import count_peak_bytes
from bigbatch.memory.out_of_memory import is_out_of_memory
from tests.torture.allocation_failures import Cut, landed_parts, landing
from tests.torture.worlds import differences, flat

BATCH_SIZE = 64
NUM_CLASSES = 10
MAX_ERROR = 1e-3
MIN_BIT_EQUAL = 0.95
SECONDS = 180
KINDS = ("fits", "recovered", "clean stop", "wrong", "crashed")


def conv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, NUM_CLASSES),
    )


class Encoder(nn.Module):
    """Two layers of a transformer with dropout over 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Flatten(), nn.Linear(65536, NUM_CLASSES)
    )


class Recurrent(nn.Module):
    """An LSTM over 64 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 128, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(128, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


MODELS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "conv": (conv, (3, 40, 40), partial(torch.optim.AdamW, fused=True)),
    "transformer": (Encoder, (64, 96), partial(torch.optim.AdamW, foreach=True)),
    "mlp": (wide, (32, 64), partial(torch.optim.SGD, momentum=0.9)),
    "lstm": (Recurrent, (64, 32), partial(torch.optim.AdamW, fused=True)),
}


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Trial:
    """One network, warm, with everything it takes to do the same step again."""

    def __init__(self, name: str):
        make, shape, make_optimizer = MODELS[name]
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = make_optimizer(self.model.parameters(), lr=1e-3)
        self.step = bb.Step(self.model, loss_fn, self.optimizer, max_grad_norm=1.0)
        self.batch = {"x": torch.randn(BATCH_SIZE, *shape), "y": torch.randint(0, NUM_CLASSES, (BATCH_SIZE,))}
        self.step({name: value[:4] for name, value in self.batch.items()})  # threads, caches, optimizer state
        self.landed_in = landed_parts(self.model, self.step)
        self.gradients = [torch.zeros_like(p) for p in self.model.parameters()]
        self.optimizer.register_step_pre_hook(lambda *_: self._note_gradients())
        self._kept = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()))

    def _note_gradients(self) -> None:
        with torch.no_grad():
            for kept, p in zip(self.gradients, self.model.parameters(), strict=True):
                if p.grad is not None:
                    kept.copy_(p.grad)

    def rewind(self) -> None:
        """Go back to before the step of the whole batch."""
        model, optimizer, rng = self._kept
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        torch.set_rng_state(rng)

    def state(self) -> dict[str, Any]:
        """Everything that the step may move."""
        leaves = flat({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        gradients = {f"gradient {name}": p.grad for name, p in self.model.named_parameters()}
        return {**dict(leaves), **gradients, "rng": torch.get_rng_state(), "num_steps": self.step.num_steps}


def needed_bytes(name: str) -> int:
    """What the step of the whole batch needs at once, beyond what is there before."""
    trial = Trial(name)
    with count_peak_bytes("cpu", track=[trial.model, trial.optimizer, trial.batch]) as before:
        pass
    with count_peak_bytes("cpu", track=[trial.model, trial.optimizer, trial.batch]) as meter:
        trial.step(trial.batch)
    return meter.peak_bytes - before.peak_bytes


def run_under_limit(name: str, limit_bytes: int) -> dict[str, Any]:
    """What came of the step."""
    trial = Trial(name)
    before, num_steps = trial.state(), trial.step.num_steps
    stopped, cut, retries = "", Cut(()), 0
    with bb.limit_memory(limit_bytes, device="cpu"):
        try:
            result = trial.step(trial.batch)
            cut, retries = Cut(result.micro_batch_sizes, trial.landed_in()), result.retries
        except Exception as error:
            stopped = f"{type(error).__name__}: {str(error)[:200]}"
            clean = is_out_of_memory(error) or isinstance(error, bb.BudgetError)
            if not clean:
                return {"kind": "wrong", "why": stopped}
    if stopped:
        moved = differences(trial.state(), before)
        return {"kind": "wrong" if moved else "clean stop", "why": f"{moved[:4]} {stopped}"}
    return _compared(trial, cut, retries, num_steps)


def _compared(trial: Trial, cut: Cut, retries: int, num_steps: int) -> dict[str, Any]:
    """Hold the step against one of the same sizes without a limit."""
    sizes = cut.sizes
    found, gradients = trial.state(), [g.clone() for g in trial.gradients]
    if sum(sizes) != BATCH_SIZE or trial.step.num_steps != num_steps + 1:
        return {"kind": "wrong", "why": f"micro-batches {sizes}, {trial.step.num_steps - num_steps} steps"}
    trial.rewind()
    trial.step.num_steps = num_steps
    # Finished micro-batches are kept, so that larger ones may come before smaller ones.
    parts = zip(*(value.split(list(sizes)) for value in trial.batch.values()), strict=True)
    with landing(trial.step, loss_fn, trial.batch, cut):
        logical = bb.LogicalBatch([dict(zip(trial.batch, part, strict=True)) for part in parts])
        again = trial.step(logical).micro_batch_sizes
    assert again == sizes, f"Asked for micro-batches of {sizes}, ran {again}."
    pairs = list(zip(gradients, trial.gradients, strict=True))
    whole = torch.cat([b.flatten() for _, b in pairs]).norm()
    error = float(torch.cat([(a - b).flatten() for a, b in pairs]).norm() / whole)
    differing = differences(found, trial.state())
    kind = "wrong" if error > MAX_ERROR else "recovered" if retries else "fits"
    return {"kind": kind, "error": error, "equal": not differing, "sizes": sizes, "why": f"{differing[:4]} {error:.1e}"}


def _child(name: str, limit_bytes: int | None, sender: Any) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.getLogger("bigbatch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", bb.BigBatchWarning)  # that the smallest limits are less than what is free
    sender.send(needed_bytes(name) if limit_bytes is None else run_under_limit(name, limit_bytes))


def in_a_process(name: str, limit_bytes: int | None) -> Any:
    """The answer of a process of its own; None when it ended without one.

    It comes from a server that has imported torch and run nothing with it: no thread and no cache is inherited.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.torture.worlds"])  # which imports torch and bigbatch
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, limit_bytes, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else None
    except EOFError:
        return None
    finally:
        process.join(5)
        process.kill()


def sweep(name: str, num_limits: int, num_processes: int) -> dict[str, Any]:
    """Counts for one model over limits from a 50th of what its tensors need to 1.6 times that, for workspaces."""
    needed = in_a_process(name, None)
    limits = [int(needed * (0.02 + 1.58 * i / max(num_limits - 1, 1))) for i in range(num_limits)]
    started = time.perf_counter()
    with ThreadPoolExecutor(num_processes) as pool:
        answers = list(pool.map(lambda limit: in_a_process(name, limit), limits))
    answers = [answer or {"kind": "crashed", "why": "the process ended, or took too long"} for answer in answers]
    done = [answer for answer in answers if "error" in answer]
    return {
        "model": name,
        "needed_bytes": needed,
        **Counter(dict.fromkeys(KINDS, 0) | Counter(answer["kind"] for answer in answers)),
        "bit_equal": sum(answer["equal"] for answer in done),
        "done": len(done),
        "largest_error": max((answer["error"] for answer in done), default=0.0),
        "seconds": time.perf_counter() - started,
        "wrong_ones": [(limits[i], a["why"]) for i, a in enumerate(answers) if a["kind"] in ("wrong", "crashed")],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limits", type=int, default=8, help="limits a model")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--processes", type=int, default=1, help="at the same time")
    parser.add_argument("--json", help="where to write the counts")
    wanted = parser.parse_args(arguments)
    print(
        f"{'model':<12}{'needs MB':>9}{''.join(f'{k:>11}' for k in KINDS)}{'bit-equal':>12}{'error':>9}{'seconds':>8}"
    )
    rows = []
    for name in wanted.models:
        rows.append(sweep(name, wanted.limits, wanted.processes))
        row = rows[-1]
        counts = "".join(f"{row[kind]:>11}" for kind in KINDS)
        equal = f"{row['bit_equal']} of {row['done']}"
        tail = f"{equal:>12}{row['largest_error']:>9.0e}{row['seconds']:>8.0f}"
        print(f"{name:<12}{row['needed_bytes'] / 1e6:>9.0f}{counts}{tail}", flush=True)
        for limit, why in row["wrong_ones"]:
            print(f"  WRONG {name}, limit {limit}: {why}")
    if wanted.json:
        Path(wanted.json).write_text(json.dumps(rows))
    bit_equal, done = sum(row["bit_equal"] for row in rows), sum(row["done"] for row in rows)
    print(f"bit-equal {bit_equal} of {done}; at least {MIN_BIT_EQUAL:.0%} are wanted")
    return 1 if any(row["wrong"] or row["crashed"] for row in rows) or bit_equal < MIN_BIT_EQUAL * done else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
