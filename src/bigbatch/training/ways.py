"""The ways to make an optimizer step that a person would choose between: batch size, cut, what is recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from bigbatch.errors import BudgetError, OptionError, TraceError
from bigbatch.planning.costs import MemoryProfile
from bigbatch.stepping.fitting.footprints import planned
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.training.building import build
from bigbatch.training.data import first_batch
from bigbatch.training.task import Task
from bigbatch.units import format_bytes
from bigbatch.values import Plan, check_positive

Policy = Literal["none", "all", "planned"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
_PARTS = (1, 4, 8)
"""In how many micro-batches the big batch is run, when nobody says: 64, 16 × 4 and 8 × 8."""
_WORTH_TIMING = 0.3
"""Seconds that a step of the big batch is expected to take, at most, when the planner is to time micro-batches: it runs
some hundred of them."""


@dataclass(frozen=True)
class Way:
    """One way to make optimizer steps.

    Attributes:
        batch_size: Samples in an optimizer step.
        plan: Micro-batch size and recomputed modules.
        recompute: Who chose these modules: ``"none"`` of them, ``"all"`` blocks, or as few as the budget asks for.
        is_chosen: The planner chose the micro-batch size too, as a ``Step`` with this budget would.
        problem: Why it cannot be run, when that is known without trying.
    """

    batch_size: int
    plan: Plan
    recompute: Policy
    is_chosen: bool = False
    problem: str = ""

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches in a step of a full batch."""
        return math.ceil(self.batch_size / self.plan.micro_batch_size)

    @property
    def what_runs(self) -> tuple[object, ...]:
        """Ways that share it do the same."""
        return self.batch_size, self.plan.what_runs, self.problem


@dataclass(frozen=True)
class Ways:
    """What there is to compare.

    Attributes:
        ways: The big batch at once comes first.
        planned_bytes: What ``"planned"`` was planned for; None: nothing was planned.
        notes: What a reader has to know of the choice.
    """

    ways: tuple[Way, ...]
    planned_bytes: int | None
    notes: tuple[str, ...] = ()


def find_ways(
    task: Task,
    device: torch.device,
    *,
    budget_bytes: int | None = None,
    micro_batch_sizes: Sequence[int] = (),
    smaller_batch_sizes: Sequence[int] = (),
    policies: Sequence[Policy] = POLICIES,
) -> Ways:
    """The ways to make the steps of a task.

    These are the big batch at once and in micro-batches, each with every policy of recompute; smaller batches at once;
    and the plan that a ``Step`` would make. A planned way that runs what another one runs is left out.

    Args:
        budget_bytes: What is planned for. None: parameters, gradients, optimizer state, and half of what the big batch
            needs beside them.
        micro_batch_sizes: Of the big batch. Empty: all of it, a quarter and an eighth.
        smaller_batch_sizes: Divisors of the batch size. Empty: its half, if it has one.
        policies: Those of recompute.

    Raises:
        OptionError: A size or a policy is none.
    """
    data = task.train_data()
    batch_size = min(task.batch_size, len(data))
    sizes = tuple(micro_batch_sizes) or tuple(math.ceil(batch_size / parts) for parts in _PARTS)
    smaller = tuple(smaller_batch_sizes) or ((batch_size // 2,) if batch_size % 2 == 0 else ())
    _check(batch_size, sizes, smaller, policies)
    planning = _Planning(task, device, batch_size, budget_bytes, is_needed=set(policies) != {"none"})
    sizes = tuple(dict.fromkeys((batch_size, *sizes)))
    # In this order they are tried: where time is short, the last ones are left out.
    # The big batch at once is there in any case: the others are held against it.
    plain = sizes if "none" in policies else sizes[:1]
    ways = [Way(batch_size, Plan(micro_batch_size=size), "none") for size in plain]
    ways[1:1] = [Way(size, Plan(micro_batch_size=size), "none") for size in smaller]
    # Grouping by length multiplies the ways too, where a task has it: this is the place for its rows.
    ways += planning.ways(sizes, policies)
    planned_bytes = planning.budget_bytes if "planned" in policies else None
    return Ways(tuple(_without_doubles(ways)), planned_bytes, tuple(planning.notes))


def _check(batch_size: int, sizes: Sequence[int], smaller: Sequence[int], policies: Sequence[str]) -> None:
    for size in (*sizes, *smaller):
        check_positive("micro_batch_size" if size in sizes else "smaller batch size", size)
    for size in sizes:
        if size > batch_size:
            raise OptionError(f"Micro-batches of {size} do not go into a batch of {batch_size}.")
    for size in smaller:
        if size >= batch_size or batch_size % size:
            raise OptionError(
                f"A smaller batch of {size} beside {batch_size}: it must divide it, so that both see the same samples."
            )
    for policy in policies:
        if policy not in POLICIES:
            raise OptionError(f"recompute={policy!r}; it is one of {', '.join(POLICIES)}.")


class _Planning:
    """The planner of a task, on a model of its own that is let go afterwards.

    Attributes:
        budget_bytes: What is planned for.
        profile: With the times of this device; None: the model cannot be traced.
        notes: What a reader has to know.
    """

    def __init__(self, task: Task, device: torch.device, batch_size: int, budget_bytes: int | None, *, is_needed: bool):
        self._batch_size = batch_size
        self.notes: list[str] = []
        self.budget_bytes = budget_bytes
        self.profile: MemoryProfile | None = None
        if is_needed:
            parts = build(task, device)
            self._planner = Planner(parts.step(), first_batch(task, parts.train_data))
            self._profile()

    def _profile(self) -> None:
        planner, batch_size = self._planner, self._batch_size
        try:
            traced = planner.traced
        except TraceError as error:
            self.notes.append(f"Nothing is recomputed and nothing is planned, for the model cannot be traced: {error}")
            return
        at_once = planner.plan(traced, batch_size, None, micro_batch_size=batch_size, recompute="none")
        if self.budget_bytes is None:
            stays = traced.parameter_bytes + traced.gradient_bytes + traced.optimizer_bytes + traced.buffer_bytes
            self.budget_bytes = (stays + max(stays, at_once.peak_bytes or 0)) // 2
        if (at_once.step_seconds or 0.0) <= _WORTH_TIMING:
            self.profile = planner.timed(batch_size, self.budget_bytes)
        else:
            self.profile = traced
            self.notes.append("Plans were made on estimated times: measuring would take longer than the bench.")

    def ways(self, sizes: Sequence[int], policies: Sequence[Policy]) -> Iterator[Way]:
        """What a ``Step`` with this budget would do, and the big batch in micro-batches of these sizes."""
        if self.profile is None:
            return
        if "planned" in policies:
            yield dataclasses.replace(self._planned(None), is_chosen=True)
            yield from map(self._planned, sizes)
        if "all" in policies:
            for size in sizes:
                plan = self._planner.plan(self.profile, self._batch_size, None, micro_batch_size=size, recompute="all")
                yield Way(self._batch_size, plan, "all")

    def _planned(self, size: int | None) -> Way:
        assert self.profile is not None
        try:
            plan = planned(self._planner, self.profile, self._batch_size, self.budget_bytes, micro_batch_size=size)
        except BudgetError as error:
            needed = "" if error.smallest_bytes is None else f", it needs {format_bytes(error.smallest_bytes)}"
            problem = f"no plan fits in {format_bytes(self.budget_bytes or 0)}{needed}"
            return Way(self._batch_size, Plan(micro_batch_size=size or 1), "planned", problem=problem)
        return Way(self._batch_size, plan, "planned")


def _without_doubles(ways: Sequence[Way]) -> Iterator[Way]:
    """Each way once; the first of those that do the same is the chosen one if any of them is."""
    chosen = {way.what_runs for way in ways if way.is_chosen}
    seen = set()
    for way in ways:
        key = way.what_runs
        if key not in seen:
            seen.add(key)
            yield dataclasses.replace(way, is_chosen=key in chosen)
