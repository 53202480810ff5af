"""A bench for a person: one row for each way to make the steps."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigbatch.training.bench_result import BenchResult, BenchRow
from bigbatch.training.ways import Way
from bigbatch.units import format_bytes, format_count, format_seconds, format_share

_NOTHING = "-"


def bench_report(found: BenchResult) -> Group:
    """All there is to say about a bench, to be printed on a ``rich`` console."""
    parts: list[RenderableType] = [Text(_opening(found)), Text(), _table(found), Text()]
    return Group(*parts, *map(Text, _lines(found)))


def way_text(way: Way) -> str:
    """How a way cuts its batch: micro-batch × accumulation.

    >>> from bigbatch.values import Plan
    >>> way_text(Way(64, Plan(micro_batch_size=16), "none"))
    '16 × 4'
    """
    return f"{way.plan.micro_batch_size} × {way.accumulation_steps}"


def recompute_words(way: Way) -> str:
    """What a way recomputes, in a few words.

    >>> from bigbatch.values import Plan
    >>> recompute_words(Way(64, Plan(micro_batch_size=16, recompute=("a", "b")), "planned"))
    'planned: 2'
    """
    count = way.plan.num_recomputed
    if way.recompute == "none":
        return "none"
    return f"{way.recompute}: {count}" if count else f"{way.recompute}: none"


def row_text(row: BenchRow) -> str:
    """One line about a way that was tried."""
    way = row.way
    name = f"batch {way.batch_size}, {way_text(way)}, recompute {recompute_words(way)}"
    if row.outcome != "ran":
        return f"{name}: {row.outcome} ({row.why})"
    off = "" if row.gradient_difference is None else f", gradient off by {row.gradient_difference:.1e}"
    return f"{name}: peak {format_bytes(row.peak_bytes or 0)}{off}"


def _opening(found: BenchResult) -> str:
    budget = "" if found.budget_bytes is None else f", budget {format_bytes(found.budget_bytes)}"
    versions = found.versions
    threads = f", {format_count(versions['threads'], 'thread')}" if found.device == "cpu" else ""
    return (
        f"{found.task}: batches of {found.batch_size} on {versions['device']}{threads}, torch {versions['torch']}"
        f"{budget}; {format_count(found.num_rounds, 'round')} in turns, {format_seconds(found.seconds)} in all"
    )


def _table(found: BenchResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("batch", "micro × steps", "recompute"):
        table.add_column(name, justify="right" if name == "batch" else "left", no_wrap=True)
    target = _NOTHING if found.target_loss is None else f"{found.target_loss:.3g}"
    speed = "samples/s" if found.unit == "samples" else f"{found.unit}/s"
    for name in (speed, "speed", "step", "optimizer", "peak", "gradient off", "loss", f"to loss {target}"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*_cells(found, row))
    return table


def _cells(found: BenchResult, row: BenchRow) -> list[str]:
    way = row.way
    head = [str(way.batch_size), way_text(way) + (" *" if way.is_chosen else ""), recompute_words(way)]
    over = " over" if found.is_over_budget(row) else ""
    peak = _NOTHING if row.peak_bytes is None else f"{format_bytes(row.peak_bytes)}{over}"
    gradient = _NOTHING if row.gradient_difference is None else f"{row.gradient_difference:.1e}"
    if not row.turns:
        return [*head, row.outcome, *[_NOTHING] * 3, peak, gradient, *[_NOTHING] * 2]
    seconds = found.seconds_to_target(row)
    return [
        *head,
        f"{row.weight_per_second:,.1f}" if row.outcome == "ran" else row.outcome,
        _NOTHING if (speed := found.speed(row)) is None else f"{speed:.2f} ×",
        format_seconds(row.step_seconds or 0.0),
        format_share(row.optimizer_share or 0.0, digits=1),
        peak,
        gradient,
        f"{row.turns[-1].loss:.4g}",
        "not reached" if seconds is None else format_seconds(seconds),
    ]


def _lines(found: BenchResult) -> Iterator[str]:
    if any(row.way.is_chosen for row in found.rows):
        yield f"* what Step(memory_budget={format_bytes(found.planned_bytes or 0)!r}) would choose."
    if found.planned_bytes is not None and found.budget_bytes is None:
        room = "room for half of the activations of the big batch"
        yield f"planned: for {format_bytes(found.planned_bytes)}, with {room}."
    yield "speed: samples/s over those of the first row, the median over rounds. The number is of modules recomputed."
    how = "there is none, for it does not fit at once" if found.reference is None else found.reference
    yield f"gradient off: the worst parameter of the first batch against the big batch's ({how})."
    smaller = [row.way.batch_size for row in found.rows if row.way.batch_size != found.batch_size]
    if smaller:
        yield "A smaller batch has another gradient: its number is the noise of its samples, not a mistake."
    if any(row.exactness == "approximate" for row in found.rows):
        yield "Cut batches are approximate here: BatchNorm sees the statistics of a micro-batch."
    if any(row.exactness == "same in distribution" for row in found.rows):
        yield "Dropout draws other numbers for each cut, which shows in the gradient: it is the same in distribution."
    if found.num_rounds < found.asked_rounds:
        yield f"{found.num_rounds} of {found.asked_rounds} rounds were made: time or data were over."
    yield from found.notes
    for row in found.rows:
        if row.outcome != "ran":
            yield f"{way_text(row.way)}, recompute {row.way.recompute}: {row.outcome}: {row.why}"
