"""A bench: all ways to make the steps of a task take turns, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from bigbatch.batch.logical import num_samples_of
from bigbatch.errors import BudgetError, NonFiniteError, StateLostError
from bigbatch.memory.out_of_memory import is_out_of_memory, release
from bigbatch.memory.recompute import apply
from bigbatch.training.bench_result import BenchResult, BenchRow, Outcome, loss_all_reached
from bigbatch.training.building import build
from bigbatch.training.comparison import cut_gradients, direct_gradients
from bigbatch.training.contending import Contender, on_host
from bigbatch.training.data import first_batch, going_through, train_loader
from bigbatch.training.task import Task
from bigbatch.training.ways import Ways, find_ways
from bigbatch.units import parse_bytes

_SHARE_OF_TRIALS = 0.6
_ALWAYS_TRIED = 3
"""The big batch, a smaller one, and one that is cut: with less there is nothing to compare."""
_T = TypeVar("_T")
_Gradients = Mapping[str, "torch.Tensor | None"]


class BenchListener:
    """Hears of a bench; every method may be left out."""

    def found(self, ways: Ways) -> None:
        """It is known what there is to compare."""

    def tried(self, row: BenchRow) -> None:
        """A way was tried once: its peak and its gradient are known, or why it cannot run."""

    def rounded(self, number: int, most: int) -> None:
        """All ways had their turn of a round."""


def bench(
    task: Task,
    *,
    device: str | torch.device = "cpu",
    memory_budget: int | str | None = None,
    num_rounds: int = 40,
    seconds: float = 480.0,
    target_loss: float | None = None,
    listener: BenchListener | None = None,
    **wanted: Any,
) -> BenchResult:
    """Let all ways begin with the same weights and train in turns on the same samples.

    A round is a big batch: one optimizer step for most, several for smaller batches. The order within a round is drawn
    anew each time. A way that runs out of memory, or whose loss is not finite, says so and is left out from then on.

    Args:
        task: Its batch size is that of the big batch.
        device: Where it runs.
        memory_budget: What is planned for. On CUDA it is a hard limit while a way is tried; on CPU, where bytes are
            counted, rows that need more are marked.
        num_rounds: To make, at most; no more than the task has batches.
        seconds: From the beginning; no round is begun that would end later, but one is made in any case. Ways that
            would be tried in the last four tenths of it are left out, but for the first three.
        target_loss: Times to this loss are told. None: to the lowest that all ways have reached.
        listener: Hears how it goes.
        wanted: Which ways; see ``find_ways``.

    Raises:
        OptionError: A size or a policy of ``wanted`` is none.
    """
    began = time.perf_counter()
    device, listener = torch.device(device), listener or BenchListener()
    budget_bytes = None if memory_budget is None else parse_bytes(memory_budget)
    ways = find_ways(task, device, budget_bytes=budget_bytes, **wanted)
    gc.collect()  # what was planned on is as large as what comes now
    listener.found(ways)
    arena = _Arena(task, ways, device, budget_bytes)
    reference = arena.try_all(began + _SHARE_OF_TRIALS * seconds, listener)
    made = arena.make_rounds(num_rounds, began + seconds, listener)
    rows = tuple(arena.rows)
    return BenchResult(
        task=task.name,
        device=str(device),
        batch_size=arena.batch_size,
        unit=_unit_of(task),
        rows=rows,
        num_rounds=made,
        asked_rounds=num_rounds,
        seconds=time.perf_counter() - began,
        budget_bytes=budget_bytes,
        planned_bytes=ways.planned_bytes,
        reference=reference,
        target_loss=loss_all_reached(rows) if target_loss is None else target_loss,
        notes=ways.notes,
        versions=_versions(device),
    )


class _Arena:
    """Where the ways meet.

    Attributes:
        rows: What was found so far.
        batch_size: Samples of a full big batch.
    """

    def __init__(self, task: Task, ways: Ways, device: torch.device, budget_bytes: int | None):
        self.batch_size = ways.ways[0].batch_size
        self.rows: list[BenchRow] = []
        self._task = dataclasses.replace(task, batch_size=self.batch_size)
        self._ways = ways
        self._device = device
        self._budget_bytes = budget_bytes
        self._data = task.train_data()
        self._contenders: dict[int, Contender] = {}  # by the number of their row: those that are still in it

    def try_all(self, deadline: float, listener: BenchListener) -> str | None:
        """Peak and gradient of each way; how the gradient was made that they are held against."""
        weights, gradients, how = self._reference()
        longest = 0.0
        for number, way in enumerate(self._ways.ways):
            start = time.perf_counter()
            self.rows.append(BenchRow(way, "no plan" if way.problem else "ran", way.problem))
            if not way.problem and number >= _ALWAYS_TRIED and start + longest > deadline:
                self._note(number, outcome="no time", why="It was not tried, so that there is time for rounds.")
            elif not way.problem:
                self._guarded(number, partial(self._try, number, weights, gradients))
            longest = max(longest, time.perf_counter() - start)
            listener.tried(self.rows[number])
        return how

    def _reference(self) -> tuple[Mapping[str, torch.Tensor], _Gradients | None, str | None]:
        """Weights to begin with, and the gradient of the first big batch, made without ``Step`` where that can be."""
        task = dataclasses.replace(self._task, precision="fp32")
        parts, batch = build(task, self._device), first_batch(task, self._data)
        weights = {name: t.detach().to("cpu", copy=True) for name, t in parts.model.state_dict().items()}
        torch.manual_seed(task.seed)
        device = self._device
        found = _unless_out_of_memory(lambda: on_host(direct_gradients(task, parts, batch, device=device)))
        if found is not None:
            return weights, found, "the big batch at once, by autograd alone"
        parts.model.zero_grad()
        parts.model.load_state_dict(weights)
        for way in self._ways.ways:
            if way.recompute == "all" and not way.problem:
                with apply(way.plan, parts.model):
                    torch.manual_seed(task.seed)
                    found = _unless_out_of_memory(
                        lambda: on_host(cut_gradients(task, parts, batch, micro_batch_size=None))
                    )
                break
        return weights, found, None if found is None else "the big batch at once, with all blocks recomputed"

    def _try(self, number: int, weights: Mapping[str, torch.Tensor], gradients: _Gradients | None) -> None:
        way = self._ways.ways[number]
        contender = Contender(way, self._task, self._device, weights)
        batch = first_batch(contender.task, self._data)
        self._note(number, peak_bytes=contender.peak_bytes(batch, self._budget_bytes))
        if gradients is not None:
            torch.manual_seed(self._task.seed)
            self._note(number, differences=contender.differences(batch, gradients))
        self._contenders[number] = contender

    def make_rounds(self, num_rounds: int, deadline: float, listener: BenchListener) -> int:
        """Rounds until there are enough, or time or data are over; how many."""
        rounds, made, longest = _rounds(self._task, self._ways, self._data), 0, 0.0
        order = random.Random(0)
        while made < num_rounds and self._contenders:
            start = time.perf_counter()
            if made and start + longest > deadline:
                break
            batches = next(rounds, None)
            if batches is None:
                break
            made += 1
            numbers = list(self._contenders)
            order.shuffle(numbers)
            for number in numbers:
                self._guarded(number, partial(self._turn, number, made, batches))
            longest = max(longest, time.perf_counter() - start)
            listener.rounded(made, num_rounds)
        return made

    def _turn(self, number: int, round_number: int, batches: Mapping[int, Sequence[Any]]) -> None:
        contender, row = self._contenders[number], self.rows[number]
        (whole,) = batches[self.batch_size]
        is_full = num_samples_of(whole, self._task) == self.batch_size
        # The same random numbers for all (dropout), as far as a cut draws the same.
        torch.manual_seed(self._task.seed + round_number)
        turn, exactness = contender.turn(round_number, batches[row.way.batch_size], is_full=is_full)
        self._note(number, turns=(*row.turns, turn), exactness=exactness)

    def _note(self, number: int, **found: Any) -> None:
        self.rows[number] = dataclasses.replace(self.rows[number], **found)

    def _guarded(self, number: int, act: Callable[[], None]) -> None:
        """Do it; a way that cannot go on leaves, and says why."""
        try:
            act()
            return
        except Exception as error:
            outcome: Outcome
            if isinstance(error, NonFiniteError):
                outcome = "not finite"
            elif isinstance(error, BudgetError | StateLostError) or is_out_of_memory(error):
                outcome = "out of memory"
            else:
                raise
            self._note(number, outcome=outcome, why=str(error).strip().split("\n")[0])
        # Out of the except block: the traceback holds the activations of what failed.
        self._contenders.pop(number, None)
        release()


def _rounds(task: Task, ways: Ways, data: Any) -> Iterator[Mapping[int, Sequence[Any]]]:
    """The batches of each round by their size: the same samples, in the big batch and in smaller ones."""
    sizes = {way.batch_size for way in ways.ways} - {task.batch_size}
    with ExitStack() as opened:
        loaded = {
            size: opened.enter_context(going_through(train_loader(dataclasses.replace(task, batch_size=size), data)))
            for size in (*sizes, task.batch_size)
        }
        for whole in loaded.pop(task.batch_size):
            num_samples = num_samples_of(whole, task)
            # Smaller sizes divide the big one, and the order of an epoch does not depend on the size.
            yield {task.batch_size: [whole]} | {
                size: [next(batches) for _ in range(math.ceil(num_samples / size))] for size, batches in loaded.items()
            }


def _unless_out_of_memory(make: Callable[[], _T]) -> _T | None:
    try:
        return make()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release()
    return None


def _unit_of(task: Task) -> str:
    if task.weight in (None, "samples"):
        return "samples"
    return "tokens" if task.weight in ("tokens", "next_tokens") else "weight"


def _versions(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
