"""Let each allocation of a step fail in turn, and see whether the step is then what it would have been.

    python -m tests.torture.allocation_failures [--double] [--first] [--rest] [--accumulate] [--peer] [--quick]

A shim in C (``fail_allocation.c``) makes chosen calls of the allocator fail. For each point there is a run of three
steps on copies of the same network: one undisturbed, one under attack, one undisturbed. What is there after the second
and the third (weights, gradients, buffers, optimizer, scheduler, average, loss scale, loss, step number, random
numbers) must be, bit for bit, what an undisturbed run of the micro-batch sizes that were used leaves; or the step
stopped with an error that says "out of memory", all is as before, and the next step is as if it had not been tried.

The runs happen in a process of its own, because the shim must be there when it starts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch

import bigbatch as bb
from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.planning import costs
from tests.torture.worlds import BATCH_SIZE, MICRO_BATCH_SIZE, NETS, OPTIMIZERS, Case, World, differences

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("fail_allocation.c")
KINDS = ("same size", "smaller", "clean stop", "wrong", "not reached")
Kind = Literal["same size", "smaller", "clean stop", "wrong", "not reached"]


class Failure(NamedTuple):
    """Which allocations of the step fail, counted from 1; 0 is none.

    Attributes:
        first, second: These do.
        all_from: All from this one on do, as long as the step lasts.
    """

    first: int = 0
    second: int = 0
    all_from: int = 0


class Shim:
    """The loaded library."""

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        self._library.failures_arm.argtypes = [ctypes.c_long] * 4
        for name in ("failures_count", "failures_failed"):
            getattr(self._library, name).restype = ctypes.c_long

    def arm(self, failure: Failure) -> None:
        self._library.failures_arm(failure.first, failure.second, failure.all_from, 0)

    def disarm(self) -> None:
        self._library.failures_disarm()

    @property
    def count(self) -> int:
        return self._library.failures_count()

    @property
    def failed(self) -> int:
        return self._library.failures_failed()


Landed = tuple[int, int, frozenset[str]]


class Cut(NamedTuple):
    """How a step was run.

    Attributes:
        sizes: Samples in each micro-batch, in order.
        landed: First sample, last but one, and parameters that have the gradient of these samples from one backward,
            although ``sizes`` cuts them: memory ran out when it was already in ``.grad``.
    """

    sizes: tuple[int, ...]
    landed: tuple[Landed, ...] = ()


# A step as a function of batch and cut (None: as it is), which returns how it was run.
StepOf = Callable[[Any, Cut | None], Cut]


def our_step(world: World, micro_batch_size: int) -> StepOf:
    """That of ``bb.Step``."""
    step = bb.Step(
        world.model,
        world.case.net.loss_fn,
        world.optimizer,
        micro_batch_size=micro_batch_size,
        max_grad_norm=1.0,
        scheduler=world.scheduler,
        ema=world.ema,
        precision=world.scaler or "fp32",
        **world.case.net.options,
    )

    landed_in = landed_parts(world.model, step)

    def run(batch: Any, cut: Cut | None) -> Cut:
        is_even = cut is None or cut == Cut(tuple(micro_batch_sizes(BATCH_SIZE, max(cut.sizes))))
        if cut is not None:
            step.micro_batch_size = max(cut.sizes)
        try:
            if cut is None or is_even:
                result = step(batch)
            else:
                parts = zip(*(value.split(cut.sizes) for value in batch.values()), strict=True)
                with landing(step, world.case.net.loss_fn, batch, cut):
                    result = step(bb.LogicalBatch([dict(zip(batch, part, strict=True)) for part in parts]))
            world.result = float(result.loss)
            return Cut(result.micro_batch_sizes, cut.landed if cut else landed_in())
        finally:
            world.num_steps = step.num_steps

    return run


def landed_parts(model: torch.nn.Module, step: bb.Step) -> Callable[[], tuple[Landed, ...]]:
    """A function that tells what the last attempt of a step was left by those before it."""
    run, seen = step.accumulator.run, [step.accumulator.keeping]

    def run_and_note(*args: Any, **keywords: Any) -> Any:
        seen[0] = step.accumulator.keeping
        return run(*args, **keywords)

    step.accumulator.run = run_and_note
    names = {id(p): name for name, p in model.named_parameters()}

    def landed() -> tuple[Landed, ...]:
        parts = seen[0].landed if seen[0] else []
        return tuple((part.start, part.stop, frozenset(names[id(p)] for p in part.parameters or ())) for part in parts)

    return landed


@contextmanager
def landing(step: bb.Step, loss_fn: Callable[[Any, Any], Any], batch: Any, cut: Cut) -> Iterator[None]:
    """While this step runs, some parameters get the gradient of some samples from one backward, by hand.

    So each parameter gets that of each sample once, whatever the step under attack has claimed.
    """
    starts = [sum(cut.sizes[:k]) for k in range(len(cut.sizes))]
    backward, lacking = torch.autograd.backward, []
    model, scaler = step.model, step.accumulator.precision.scaler
    named = dict(model.named_parameters())

    def before(k: int, _: int | None) -> None:
        for start, stop, names in cut.landed:
            if start == starts[k - 1]:
                with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                    part = {name: value[start:stop] for name, value in batch.items()}
                    loss = loss_fn(model, part)
                share = torch.full((), (stop - start) / sum(cut.sizes))
                scaled = share if scaler is None else scaler.scale(share)
                backward([loss], [scaled], inputs=[named[name] for name in names])
        have = {n for start, stop, names in cut.landed if start <= starts[k - 1] < stop for n in names}
        lacking[:] = [p for name, p in named.items() if p.requires_grad and name not in have]

    def only_lacking(values: Any, start: Any, **_: Any) -> None:
        backward(values, start, inputs=lacking)

    step.on_micro_batch = before
    with mock.patch("torch.autograd.backward", only_lacking):
        yield
    step.on_micro_batch = None


def accumulation(world: World, micro_batch_size: int) -> StepOf:
    """``bb.accumulate`` alone: gradients are added to what is there, and a failure leaves that as it was."""

    def run(batch: Any, cut: Cut | None) -> Cut:
        result = bb.accumulate(
            world.model,
            world.case.net.loss_fn,
            batch,
            micro_batch_size=max(cut.sizes) if cut else micro_batch_size,
            precision=world.scaler or "fp32",
        )
        world.result = float(result.loss)
        return Cut(result.micro_batch_sizes)

    return run


def peers_step(world: World, micro_batch_size: int) -> StepOf:
    """What a well-known trainer does: zero the gradients, halve the micro-batches, run the batch again."""
    now = [micro_batch_size]

    def run(batch: Any, cut: Cut | None) -> Cut:
        now[0] = max(cut.sizes) if cut else now[0]
        while True:
            try:
                sizes, loss = _plain_step(world, batch, now[0])
                break
            except RuntimeError as error:
                if not is_out_of_memory(error) or now[0] == 1:
                    raise
            now[0] //= 2
            world.optimizer.zero_grad()
        world.result, world.num_steps = loss, world.num_steps + 1
        world.scheduler.step()
        if world.ema is not None:
            world.ema.update_parameters(world.model)
        world.optimizer.zero_grad()
        return Cut(sizes)

    return run


def _plain_step(world: World, batch: dict[str, torch.Tensor], size: int) -> tuple[tuple[int, ...], float]:
    parts = list(zip(*(value.split(size) for value in batch.values()), strict=True))
    total, scaler, num_samples = 0.0, world.scaler, len(batch["y"])
    for part in parts:
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            found = world.case.net.loss_fn(world.model, dict(zip(batch, part, strict=True)))
        terms = list(found.values()) if isinstance(found, dict) else [found]
        values = [term.numerator / term.denominator if isinstance(term, bb.Ratio) else term for term in terms]
        loss = torch.stack([value.float() for value in values]).sum() * (len(part[0]) / num_samples)
        total += float(loss.detach())
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(world.optimizer)
    torch.nn.utils.clip_grad_norm_(world.model.parameters(), 1.0)
    if scaler is None:
        world.optimizer.step()
    else:
        scaler.step(world.optimizer)
        scaler.update()
    return tuple(len(part[0]) for part in parts), total


@dataclass
class Attack:
    """Attacks the steps of one case.

    Args:
        shim: Makes allocations fail.
        case: Whose steps.
        make_step: ``our_step``, ``accumulation`` or ``peers_step``.
        at_first: The attacked step is the first one, and not the second.
        micro_batch_size: Before anything fails.
    """

    shim: Shim
    case: Case
    make_step: Callable[[World, int], StepOf] = our_step
    at_first: bool = False
    micro_batch_size: int = MICRO_BATCH_SIZE

    def __post_init__(self) -> None:
        self.usual_cut = Cut(())
        self._expected: dict[Any, list[dict[str, Any]]] = {}

    def _begin(self) -> tuple[World, StepOf]:
        world = World(self.case)
        step = self.make_step(world, self.micro_batch_size)
        if not self.at_first:
            step(self.case.batches[0], None)
        return world, step

    def count(self) -> int:
        """Allocations of the undisturbed step."""
        _, step = self._begin()
        self.shim.arm(Failure())
        try:
            self.usual_cut = step(self.case.batches[1], None)
        finally:
            self.shim.disarm()
        return self.shim.count

    def expected(self, attacked: Cut | None, last: Cut) -> list[dict[str, Any]]:
        """States after the attacked and the last step of a run with these cuts; None: without that step."""
        key = (attacked, last)
        if key not in self._expected:
            world, step = self._begin()
            states = []
            for batch, cut in zip(self.case.batches[1:], (attacked, last), strict=True):
                if cut is not None:
                    done = step(batch, cut)
                    assert done == cut, f"Asked for {cut}, ran {done}."
                states.append(world.state())
            self._expected[key] = states
        return self._expected[key]

    def run(self, failure: Failure) -> tuple[Kind, str]:
        """What came of a step with this failure, and for a wrong one why."""
        world, step = self._begin()
        cut, stopped, is_clean = None, "", True
        self.shim.arm(failure)
        try:
            cut = step(self.case.batches[1], None)
        except Exception as error:
            stopped = f"{type(error).__name__}: {str(error)[:300]}"
            is_clean = is_out_of_memory(error) or isinstance(error, bb.BudgetError)
        finally:
            self.shim.disarm()
        if self.shim.failed < sum(number > 0 for number in failure):
            return "not reached", ""
        if stopped and not is_clean:
            return "wrong", f"raised {stopped}"
        after = world.state()
        try:
            last = step(self.case.batches[2], None)
        except Exception as error:
            return "wrong", f"the next step raised {type(error).__name__}: {error}; the attacked one {stopped or cut}"
        expected = self.expected(cut, last)
        for when, found, wanted in zip(("it", "the next step"), (after, world.state()), expected, strict=True):
            if differing := differences(found, wanted):
                more = f"{len(differing)} differ, such as {differing[:4]}"
                return "wrong", f"after {when}: {more}; {cut} {last}; {stopped}"
        if stopped:
            return "clean stop", stopped
        return ("same size" if cut and cut.sizes == self.usual_cut.sizes else "smaller"), ""


def points(wanted: argparse.Namespace, attack: Attack) -> Iterator[Failure]:
    """The failures that are tried on one case."""
    num_allocations = attack.count()
    # A recovery collects garbage, which takes 0.1 s with all the objects of the modules that are imported by now.
    gc.freeze()
    if not wanted.double:
        for number in range(num_allocations, 0, -wanted.every):  # so that the last ones, of the average, are among them
            yield Failure(all_from=number) if wanted.rest else Failure(first=number)
        return
    draw = random.Random(f"{attack.case}")
    for i in range(wanted.double):
        first = draw.randint(1, num_allocations)
        # Half of them soon after the first, where the step is being undone.
        yield Failure(first, first + draw.randint(1, 30 if i % 2 else num_allocations))


def attack_all(wanted: argparse.Namespace, shim: Shim) -> list[dict[str, Any]]:
    """A row of counts for each network and optimizer."""
    rows = []
    for net_name in wanted.nets:
        for optimizer_name in wanted.optimizers:
            make_step = peers_step if wanted.peer else accumulation if wanted.accumulate else our_step
            case = Case(net_name, optimizer_name)
            attack = Attack(shim, case, make_step, wanted.first, wanted.micro_batch_size)
            counts, examples, started = Counter(), [], time.perf_counter()
            for failure in points(wanted, attack):
                kind, why = attack.run(failure)
                counts[kind] += 1
                if kind == "wrong":
                    examples.append((list(failure), why))
            row = {"net": net_name, "optimizer": optimizer_name, **{kind: counts[kind] for kind in KINDS}}
            rows.append({**row, "seconds": time.perf_counter() - started, "examples": examples})
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    points = sum(row[kind] for kind in KINDS[:-1])
    counts = "".join(f"{row[kind]:>13}" for kind in KINDS)
    return f"{row['net']:<12} {row['optimizer']:<14}{points:>8}{counts}{row.get('seconds', 0):>8.1f}"


def work(wanted: argparse.Namespace) -> int:
    """Attack, print the table, and say with the exit code whether nothing was wrong."""
    torch.set_num_threads(1)
    costs.FEWEST_ENTRIES = 8  # masks of dropout are kept of tensors as small as those here
    logging.getLogger("bigbatch").setLevel(logging.ERROR)  # each recovery is announced
    shim = Shim(wanted.shim)
    print(f"{'net':<12} {'optimizer':<14}{'points':>8}{''.join(f'{kind:>13}' for kind in KINDS)}{'seconds':>8}")
    rows = attack_all(wanted, shim)
    total: dict[str, Any] = {kind: sum(row[kind] for row in rows) for kind in KINDS}
    print(_line({"net": "all", "optimizer": "", **total, "seconds": sum(row["seconds"] for row in rows)}))
    for row in rows:
        for failure, why in row["examples"][: wanted.examples]:
            print(f"WRONG {row['net']}, {row['optimizer']}, failure {failure}: {why}")
    if wanted.json:
        Path(wanted.json).write_text(json.dumps(rows))
    return 1 if total["wrong"] and not wanted.peer else 0


def compile_shim(folder: str) -> str | None:
    """Path of the compiled shim; None without a C compiler or where it cannot be preloaded."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    path = str(Path(folder) / "fail_allocation.so")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", path, str(SOURCE), "-ldl"], check=True)
    return path


def start(arguments: list[str], *, capture: bool = False) -> subprocess.CompletedProcess[str] | None:
    """Run this program with the shim loaded; None where it cannot be made."""
    with tempfile.TemporaryDirectory() as folder:
        path = compile_shim(folder)
        if path is None:
            return None
        environment = {**os.environ, "LD_PRELOAD": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.torture.allocation_failures", "--shim", path, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=capture, text=True)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--double", nargs="?", const=80, default=0, type=int, help="pairs of failures a case")
    parser.add_argument("--first", action="store_true", help="attack the first step, where optimizer state is made")
    parser.add_argument("--rest", action="store_true", help="from each point on, all allocations of the step fail")
    parser.add_argument("--accumulate", action="store_true", help="attack bb.accumulate, and not bb.Step")
    parser.add_argument("--micro-batch-size", type=int, default=MICRO_BATCH_SIZE, help="of 12 samples")
    parser.add_argument("--peer", action="store_true", help="attack: zero the gradients, halve, run again")
    parser.add_argument("--quick", action="store_true", help="every 10th point, or a tenth of the pairs")
    parser.add_argument("--every", type=int, default=1, help="every so many points")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--examples", type=int, default=3, help="wrong points shown of each case")
    parser.add_argument("--json", help="where to write the counts")
    parser.add_argument("--shim", help=argparse.SUPPRESS)
    wanted = parser.parse_args(arguments)
    if wanted.quick:
        wanted.every, wanted.double = 10 * wanted.every, wanted.double // 10
    return wanted


def main(arguments: list[str]) -> int:
    wanted = parsed(arguments)
    if wanted.shim:
        return work(wanted)
    done = start(arguments)
    if done is None:
        print("There is no C compiler here (gcc or cc), or this is not Linux; the shim cannot be made.")
        return 2
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
