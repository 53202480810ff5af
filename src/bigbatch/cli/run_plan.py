"""What ``bigbatch plan`` does: build the task or the shape, plan it, print. This loads torch."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from torch import nn

import bigbatch as bb
from bigbatch.cli.devices import device_named
from bigbatch.errors import BudgetError, DeviceError, OptionError, TaskError, TraceError, warn
from bigbatch.planning.advice import what_else, with_advice, wrong_tool
from bigbatch.planning.cards import Card, find_card, parse_peak
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.explanation import explain
from bigbatch.planning.search import Recompute, frontier, undominated
from bigbatch.reporting.frontier import Frontier, draw_frontier
from bigbatch.reporting.pictures import check_can_be_drawn
from bigbatch.reporting.plan_text import Planned, plan_report
from bigbatch.reporting.text import rendered
from bigbatch.reporting.timeline import draw_timeline
from bigbatch.stepping.fitting.merged_offer import offer_of_merging
from bigbatch.stepping.fitting.planner import Planner
from bigbatch.stepping.fitting.sharded_plans import costs_of
from bigbatch.stepping.step import Step
from bigbatch.tasks.finding import find_task
from bigbatch.tasks.names import BUILT_IN, SHAPE_NAMES, SHAPES_TO_PLAN, TASKS_TO_PLAN
from bigbatch.tasks.shapes import find_shape
from bigbatch.training.building import build
from bigbatch.training.data import first_batch
from bigbatch.training.task import Task
from bigbatch.units import format_bytes, parse_bytes
from bigbatch.values import Plan, json_ready
from bigbatch.verification.nearness import nearness

_WIDTH = 120
_PLANNED_FOR = ("cpu", "cuda")


@dataclass(frozen=True)
class Wanted:
    """What the command line says; see ``cli/plan.py``."""

    name: str
    memory_budget: str
    batch_size: int | None = None
    micro_batch_size: int | None = None
    recompute: str | None = None
    device: str | None = None
    card: str | None = None
    device_peak: str | None = None
    model_device: str | None = None
    size: int | None = None
    estimate: bool = False
    world_size: int = 1
    parallel: str = "ddp"

    @property
    def is_shape(self) -> bool:
        """Whether it is a built-in shape, and no task."""
        return self.name in SHAPE_NAMES

    def found_card(self) -> Card | None:
        """What times are estimated for; None: the default of the device.

        Raises:
            OptionError: There is no such card, or it is not one for this device.
        """
        card = parse_peak(self.device_peak) if self.device_peak is not None else None
        card = find_card(self.card) if self.card is not None else card
        if card is not None and card.name != "custom" and self.device == ("cuda" if card.name == "cpu" else "cpu"):
            raise OptionError(f"--card {card.name} does not go with --device {self.device}.")
        return card

    def found_device(self, card: Card | None) -> str:
        """Where it will run, here or elsewhere.

        Raises:
            DeviceError: It is no device that plans are made for.
        """
        if self.device not in (None, *_PLANNED_FOR):
            wanted = " or ".join(_PLANNED_FOR)
            raise DeviceError(f"--device {self.device}: a plan is for {wanted}. Give one of these.", _PLANNED_FOR)
        if self.device is not None:
            return self.device
        if card is not None:
            return "cpu" if card.name == "cpu" else "cuda"
        return "cuda" if self.is_shape or torch.cuda.is_available() else "cpu"

    def found_model_device(self, otherwise: str) -> torch.device:
        """Where the model is built: where the command line says, or ``otherwise``.

        Raises:
            DeviceError: There is no such device.
        """
        name = self.model_device or otherwise
        return torch.device(name) if name == "meta" else device_named(name, "--model-device")

    def found_recompute(self) -> Recompute:
        """What is held, as the search wants it."""
        if self.recompute is None or self.recompute in ("all", "none"):
            return self.recompute  # pyright: ignore[reportReturnType]
        groups = [tuple(map(str.strip, entry.split("+"))) for entry in self.recompute.split(",")]
        return tuple(group[0] if len(group) == 1 else group for group in groups)


@dataclass(frozen=True)
class _Model:
    """What is planned."""

    step: Step
    batch: Any
    batch_size: int
    name: str
    description: str


def run(wanted: Wanted, *, as_json: bool, frontier_file: Path | None, timeline_file: Path | None) -> None:
    """Plan, print, draw.

    Raises:
        BudgetError: Nothing fits; the message says what else would help.
        OptionError: An option cannot be.
        TaskError: There is no such task or shape.
        MissingExtraError: A picture is asked for, and what draws it is not installed.
    """
    check_can_be_drawn(frontier_file, timeline_file)
    card = wanted.found_card()
    device = wanted.found_device(card)
    budget_bytes = parse_bytes(wanted.memory_budget)
    model = _shape(wanted) if wanted.is_shape else _task(wanted, device)
    ranks: dict[str, Any] = {
        "num_ranks": wanted.world_size,
        "sharding": wanted.parallel if wanted.world_size > 1 else None,
    }
    planner = Planner(model.step, model.batch, device=device, card=card, **ranks)
    whole_batch_size = model.batch_size
    model = dataclasses.replace(model, batch_size=-(-whole_batch_size // wanted.world_size))
    profile = _profile(planner, model, wanted, budget_bytes)
    try:
        chosen = _plan(planner, profile, model, wanted, budget_bytes)
    except BudgetError as error:
        held = wanted.micro_batch_size, wanted.found_recompute()
        offers = offer_of_merging(planner, model.batch_size, budget_bytes, *held)
        raise _nothing_fits(error, offers, profile, model, budget_bytes, as_json) from error
    if planner.spread.is_sharded:
        profile = costs_of(profile, planner.shards, chosen)
    fastest = frontier(profile, batch_size=model.batch_size)
    # The chosen plan is one of them where its traced peak is the simulated one, and may not be its own neighbour.
    others = [plan for plan in fastest if plan.what_runs != chosen.what_runs]
    found = Planned(
        name=model.name,
        description=model.description,
        batch_size=model.batch_size,
        device=planner.device,
        card=planner.card.name,
        profile=profile,
        plan=chosen,
        explanation=explain(profile, chosen, batch_size=model.batch_size, budget_bytes=budget_bytes, others=others),
        advice=(
            *wrong_tool(profile, batch_size=model.batch_size, budget_bytes=budget_bytes, plan=chosen),
            *_measured_batch_norm(planner, model, chosen),
        ),
        num_ranks=wanted.world_size,
        whole_batch_size=whole_batch_size,
        ranks_text=_ranks_text(planner, chosen),
    )
    _print(found, as_json=as_json)
    if frontier_file is not None:
        draw_frontier(_frontier(found, fastest), frontier_file)
    if timeline_file is not None:
        _draw_timeline(planner, found, timeline_file)


def _measured_batch_norm(planner: Planner, model: _Model, chosen: Plan) -> list[str]:
    """How far BatchNorm turns the gradient of the micro-batches of a plan, where the model can be run."""
    step, size = model.step, chosen.micro_batch_size
    if not planner.can_run or size >= model.batch_size:
        return []
    found = nearness(step.model, step.accumulator.given_loss_fn, model.batch, size, step.options)
    if found is None or found.cosine is None or found.is_near:
        return []
    return [f"Measured: {found}. {found.remedy}"]


def _ranks_text(planner: Planner, plan: Plan) -> str:
    if planner.spread.num_ranks == 1:
        return ""
    if not planner.spread.is_sharded:
        return "summed once a step, beside a copy of all of them in the buckets of DDP"
    units = planner.shards.units
    kept = format_bytes(sum(unit.kept_bytes for unit in units))
    if plan.accumulation_steps == 1:
        return "summed by FSDP2 in the one backward"
    if plan.reduce == "after":
        return f'summed once a step (reduce="after"); until then those of all modules stay, {kept}'
    return f'summed in each micro-batch (reduce="each"): those of all modules, {kept}, do not stay between them'


def _shape(wanted: Wanted) -> _Model:
    if wanted.batch_size is None:
        raise OptionError(f"{wanted.name} has no batch size of its own; give one: --batch-size 64.")
    shape = find_shape(wanted.name, size=wanted.size)
    with wanted.found_model_device("meta"):
        model, batch = shape.model(), shape.batch(1)
    step = Step(model, shape.loss_fn, shape.optimizer(model))
    unit = "tokens" if batch[0].ndim == 2 else "pixels on each side"
    return _Model(step, batch, wanted.batch_size, shape.name, f"{shape.description}; {shape.size} {unit}")


def _task(wanted: Wanted, device: str) -> _Model:
    if wanted.size is not None:
        raise OptionError(f"--size is for shapes ({SHAPES_TO_PLAN}); the samples of {wanted.name} are its own.")
    task = _found_task(wanted)
    here = "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"
    on = wanted.found_model_device(here)
    if on.type == "meta":
        task = dataclasses.replace(task, model=_on_meta(task.model))
    parts = build(task, on)
    step = parts.step()
    return _Model(
        step, first_batch(task, parts.train_data), wanted.batch_size or task.batch_size, task.name, _described(step)
    )


def _found_task(wanted: Wanted) -> Task:
    if ":" not in wanted.name and wanted.name not in BUILT_IN:
        raise TaskError(
            f"There is no task or shape {wanted.name!r}. The tasks are {TASKS_TO_PLAN}, the shapes "
            f"{SHAPES_TO_PLAN}; a task of your own is written as file.py:name."
        )
    return find_task(wanted.name)


def _on_meta(make: Any) -> Any:
    def made() -> nn.Module:
        with torch.device("meta"):
            return make()

    return made


def _described(step: Step) -> str:
    number = sum(p.numel() for p in step.model.parameters())
    optimizers = " + ".join(type(optimizer).__name__ for optimizer in step.optimizers)
    precision = step.options.precision
    words = precision if isinstance(precision, str) else type(precision).__name__
    return f"{type(step.model).__name__}, {number:,} parameters, {words}, {optimizers}"


def _profile(planner: Planner, model: _Model, wanted: Wanted, budget_bytes: int) -> MemoryProfile:
    """The profile, with measured times unless they are wanted for a card, or cannot be had."""
    try:
        if wanted.estimate:
            return planner.traced
        return planner.timed(model.batch_size, budget_bytes)
    except TraceError:
        if not planner.can_run:
            raise
        step = model.step
        loss_fn, options = step.accumulator.given_loss_fn, vars(step.options)
        return bb.profile(step.model, loss_fn, model.batch, optimizer=step.optimizers, **options)


def _plan(planner: Planner, profile: MemoryProfile, model: _Model, wanted: Wanted, budget_bytes: int) -> Plan:
    held = {"micro_batch_size": wanted.micro_batch_size, "recompute": wanted.found_recompute()}
    if profile.fallback is None:
        return planner.plan(profile, model.batch_size, budget_bytes, **held)
    return planner.by_trying(model.batch_size, budget_bytes, **held)


def _nothing_fits(
    error: BudgetError, offers: tuple[str, ...], profile: MemoryProfile, model: _Model, budget_bytes: int, as_json: bool
) -> BudgetError:
    if as_json:
        reliefs = what_else(profile, batch_size=model.batch_size, budget_bytes=budget_bytes)
        found = {
            "error": str(error),
            "smallest_bytes": error.smallest_bytes,
            "budget_bytes": budget_bytes,
            "what_else": [dataclasses.asdict(relief) for relief in reliefs],
            "offers": offers,
        }
        print(json.dumps(found, indent=2))
    return with_advice(error, profile, model.batch_size, offers)


def _print(found: Planned, *, as_json: bool) -> None:
    if not as_json:
        _print_report(plan_report(found))
        return
    value = {
        "name": found.name,
        "batch_size": found.whole_batch_size,
        "world_size": found.num_ranks,
        "times": found.timing,
        "plan": dataclasses.asdict(found.plan),
        "explanation": dataclasses.asdict(found.explanation),
        "advice": found.advice,
        "profile": dataclasses.asdict(found.profile),
    }
    print(json.dumps(json_ready(value), indent=2))


def _print_report(report: RenderableType) -> None:
    if sys.stdout.isatty():
        Console(highlight=False).print(report)
        return
    print(rendered(report, _WIDTH))


def _frontier(found: Planned, fastest: tuple[Plan, ...]) -> Frontier:
    explanation, batch = found.explanation, {"batch_size": found.batch_size}
    none = frontier(found.profile, recompute="none", **batch)
    every = frontier(found.profile, recompute="all", **batch)
    ranks = f" on {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    return Frontier(
        title=f"{found.name}, batches of {found.whole_batch_size}{ranks}",
        time_label=f"time of a step ({found.timing})",
        plans=undominated([*fastest, *none, *every]),
        recompute_none=none,
        recompute_all=every,
        direct=Plan(
            micro_batch_size=found.batch_size,
            peak_bytes=explanation.direct_bytes,
            step_seconds=explanation.direct_seconds,
        ),
        chosen=dataclasses.replace(found.plan, step_seconds=explanation.step_seconds),
        budget_bytes=explanation.budget_bytes,
    )


def _draw_timeline(planner: Planner, found: Planned, path: Path) -> None:
    if found.profile.fallback is not None:
        warn(f"There is no picture of the step, because the model cannot be traced: {found.profile.fallback}")
        return
    timeline = planner.timeline(found.plan, found.batch_size)
    title = f"{found.name}, batches of {found.batch_size} in micro-batches of {found.plan.micro_batch_size}"
    draw_timeline(timeline, path, title=title, budget_bytes=found.explanation.budget_bytes)
