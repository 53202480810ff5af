"""A run while it runs: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from bigbatch.reporting.text import data_text, identity, metrics_text, noise_scale_text, opening, padding_text
from bigbatch.training.events import EpochRecord, Listener, RunInfo, RunResult, StepRecord
from bigbatch.units import format_bytes, format_count, format_seconds, format_share
from bigbatch.values import Plan

_SECONDS_BETWEEN_REFRESHES = 0.25
_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_TO_HALF_AS_MANY = 100.0
_MUCH_WAITING = 0.02


def announced(plan: Plan) -> str:
    """The line about a plan that was found."""
    count = plan.num_recomputed
    recompute = f" with {format_count(count, 'module')} recomputed" if count else ""
    peak = f", measured peak {format_bytes(plan.peak_bytes)}" if plan.peak_bytes else ""
    return f"micro-batches of {plan.micro_batch_size}{recompute} fit{peak}"


class PlainLines(Listener):
    """Prints what happens, a line every two seconds at first and ever fewer later, so that a log stays readable.

    Args:
        write: Gets each line.
        seconds_between: The least time between two lines about steps or epochs; the first and the last are printed
            whenever they come. It grows with the run: twice that after 100 seconds, 37 times after an hour.
    """

    def __init__(self, write: Callable[[str], None], *, seconds_between: float = _SECONDS_BETWEEN_LINES):
        self._write = write
        self._seconds_between = seconds_between
        self._is_first = True
        self._num_ranks = 1
        self._began = self._last_line = time.monotonic()

    def began(self, info: RunInfo) -> None:
        """Say what will be run."""
        self._num_ranks = info.num_ranks
        self._write(opening(info))

    def fitting(self, budget_bytes: int) -> None:
        """Say that a plan is looked for."""
        self._write(f"planning for {format_bytes(budget_bytes)} ...")

    def fitted(self, plan: Plan) -> None:
        """Say what fits."""
        self._write(announced(plan))

    def stepped(self, record: StepRecord) -> None:
        """Say how the batch is cut, once, and how the run goes, now and then."""
        is_first, self._is_first = self._is_first, False
        if is_first:
            self._write(f"micro × accumulation × ranks: {cut_text(record, self._num_ranks)}")
        if is_first or record.step == record.total_steps or self._is_due():
            self._print(step_text(record))

    def epoch_ended(self, record: EpochRecord) -> None:
        """Give the results of an evaluation."""
        if record.metrics and self._is_due():
            self._print(f"epoch {record.epoch}: {metrics_text(record.metrics)}")

    def _is_due(self) -> bool:
        now = time.monotonic()
        return now - self._last_line >= self._seconds_between * (1 + (now - self._began) / _SECONDS_TO_HALF_AS_MANY)

    def _print(self, line: str) -> None:
        self._write(line)
        self._last_line = time.monotonic()


def cut_text(record: StepRecord, num_ranks: int) -> str:
    """How the batch of a step is cut."""
    return identity(record.result.micro_batch_sizes, num_ranks, batch_size=record.num_samples)


def step_text(record: StepRecord) -> str:
    """One step in one line. This reads its loss."""
    result = record.result
    norm = "" if result.grad_norm is None else f", gradient norm {float(result.grad_norm):.3g}"
    peak = "" if record.peak_bytes is None else f", peak {format_bytes(record.peak_bytes)}"
    skipped = ", SKIPPED" if result.skipped else ""
    data = f", {data_text(record.data_share)} for data" if record.data_share > _MUCH_WAITING else ""
    padding = "" if result.padding is None else f", padding {format_share(result.padding[1])}"
    return (
        f"step {record.step}/{record.total_steps}, epoch {record.epoch}, loss {float(result.loss):.4f}{norm}, "
        f"lr {record.learning_rate:.3g}, {record.samples_per_second:,.0f} samples/s{peak}{padding}{data}, "
        f"{_time_left(record)} left{skipped}"
    )


def _time_left(record: StepRecord) -> str:
    return format_seconds(record.seconds_left) if record.step < record.total_steps else "0 s"


@dataclass(frozen=True)
class _Shown:
    """What the panel shows at the moment."""

    info: RunInfo
    step: StepRecord | None = None
    epoch: EpochRecord | None = None
    micro_batch: tuple[int, int | None] = (0, None)
    doing: str = "begins"
    micro: str = ""


class LivePanel(Listener):
    """A panel that stays in its place on the terminal; the loss is read when it is drawn, four times a second at most.

    Args:
        console: Where to draw.
        memory: Gives memory in use on the device now, for display.
    """

    def __init__(self, console: Console, memory: Callable[[], int]):
        self._console = console
        self._memory = memory
        # Drawn by the run itself and not by a thread of rich: reading a tensor belongs between two micro-batches.
        self._live = Live(console=console, auto_refresh=False)
        self._shown: _Shown | None = None
        self._last_drawn = float("-inf")

    def began(self, info: RunInfo) -> None:
        """Say what will be run, and open the panel."""
        self._shown = _Shown(info)
        self._console.print(opening(info), highlight=False, markup=False)
        self._live.start()

    def fitting(self, budget_bytes: int) -> None:
        """Show that a plan is looked for."""
        self._show(now=True, doing=f"plans for {format_bytes(budget_bytes)}")

    def fitted(self, plan: Plan) -> None:
        """Say what fits."""
        self._console.print(announced(plan), highlight=False, markup=False)

    def micro_batch(self, number: int, count: int | None) -> None:
        """Show which micro-batch runs."""
        self._show(micro_batch=(number, count), doing="trains")

    def stepped(self, record: StepRecord) -> None:
        """Show the step."""
        is_first = self._shown is not None and self._shown.step is None
        if self._shown is not None and is_first:
            line = cut_text(record, self._shown.info.num_ranks)
            self._console.print(f"micro × accumulation × ranks: {line}", highlight=False, markup=False)
            self._show(micro=line)
        self._show(now=is_first or record.step == record.total_steps, step=record)

    def evaluating(self) -> None:
        """Show that the model is evaluated."""
        self._show(doing="evaluates")

    def epoch_ended(self, record: EpochRecord) -> None:
        """Show the results of an evaluation."""
        if record.metrics:
            self._show(epoch=record)

    def ended(self, result: RunResult) -> None:
        """Show the end."""
        self._show(now=True, doing="is done")

    def close(self) -> None:
        """Leave the panel as it is, and give the terminal back."""
        self._live.stop()

    def _show(self, *, now: bool = False, **changes: object) -> None:
        assert self._shown is not None  # `began` comes first
        self._shown = replace(self._shown, **changes)  # pyright: ignore[reportArgumentType]
        if now or time.monotonic() - self._last_drawn >= _SECONDS_BETWEEN_REFRESHES:
            self._live.update(_drawn(self._shown, self._memory()), refresh=True)
            self._last_drawn = time.monotonic()


def _drawn(shown: _Shown, memory_bytes: int) -> Panel:
    number, count = shown.micro_batch
    rows = {"micro-batch": f"{number} of {count if count is not None else '?'}    {shown.micro}"}
    step = shown.step.step if shown.step else 0
    if shown.step is not None:
        rows |= _step_rows(shown.step)
    if shown.epoch is not None:
        rows["evaluation"] = f"{metrics_text(shown.epoch.metrics)} (epoch {shown.epoch.epoch})"
    rows["memory"] = _memory_text(shown, memory_bytes)
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(f"[dim]{name}[/dim]", value)
    outer = Table.grid()
    outer.add_row(ProgressBar(total=shown.info.total_steps, completed=step, width=60))
    outer.add_row(grid)
    return Panel(outer, title=f"{shown.info.task} {shown.doing}", title_align="left", expand=False)


def _step_rows(record: StepRecord) -> dict[str, str]:
    result = record.result
    padding = {} if result.padding is None else {"padding": padding_text(result.padding)}
    rows = {
        "step": f"{record.step} of {record.total_steps}, epoch {record.epoch}",
        "loss": f"{float(result.loss):.4f}" + (" (skipped)" if result.skipped else ""),
        "gradient norm": "not asked for" if result.grad_norm is None else f"{float(result.grad_norm):.3g}",
        "learning rate": f"{record.learning_rate:.3g}",
        "speed": f"{record.samples_per_second:,.0f} samples/s",
        "data": data_text(record.data_share),
        **padding,
        "time left": _time_left(record),
    }
    if result.noise_scale is not None:
        rows["batch"] = noise_scale_text(float(result.noise_scale), sum(result.micro_batch_sizes))
    return rows


def _memory_text(shown: _Shown, memory_bytes: int) -> str:
    peak = shown.step.peak_bytes if shown.step else None
    counted = "peak not counted yet" if peak is None else f"peak of a step {format_bytes(peak)}"
    budget = f" of {format_bytes(shown.info.budget_bytes)}" if shown.info.budget_bytes else ""
    whose = "process" if shown.info.device == "cpu" else "device"
    return f"{counted}{budget}, {whose} now {format_bytes(memory_bytes)}"
