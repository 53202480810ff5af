"""Errors of predicted peaks as figures, tables and a page."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from bigbatch.planning.search import MARGIN

if TYPE_CHECKING:
    from benchmarks.planner.accuracy import Row

GIB = 2**30
LEAST_ROWS, LEAST_LARGE, LEAST_PROCESSES = 200, 40, 20
MEDIAN_BAR, HIGH_BAR, WORST_BAR, PROCESS_BAR = 0.005, 0.02, 0.05, 0.05


class Errors(NamedTuple):
    """Errors of predictions, as shares of what was measured.

    Attributes:
        median, high, worst: Of their absolute values; ``high`` is the 95th percentile.
        num_under: How many predictions were less than what was measured.
        most_under: By how much at most, above zero.
    """

    num: int
    median: float
    high: float
    worst: float
    num_under: int
    most_under: float


class Verdict(NamedTuple):
    """One bar: what it asks for, what was found, and whether that is enough."""

    asked: str
    found: str
    is_met: bool


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors:
    """Errors of pairs ``(predicted, measured)``.

    >>> errors_of([(102, 100), (99, 100), (100, 100)])
    Errors(num=3, median=0.01, high=0.02, worst=0.02, num_under=1, most_under=0.01)
    """
    signed = [round(predicted / measured - 1, 12) for predicted, measured in pairs]
    sizes = sorted(map(abs, signed))
    high = sizes[math.ceil(0.95 * len(sizes)) - 1]
    under = [-error for error in signed if error < 0]
    return Errors(len(pairs), statistics.median(sizes), high, sizes[-1], len(under), max(under, default=0.0))


def of_tensors(row: Row) -> tuple[float, float]:
    """Tensors, predicted and counted."""
    return row.predicted_bytes, row.counted_bytes


def of_allocator(row: Row) -> tuple[float, float]:
    """All that the allocator gives out, predicted and metered."""
    return row.predicted_with_workspace_bytes, row.allocated_bytes


def without_workspace(row: Row) -> tuple[float, float]:
    """Tensors as predicted, and all that the allocator gave out."""
    return row.predicted_bytes, row.allocated_bytes


def meters(row: Row) -> tuple[float, float]:
    """The allocator, by the meter, and a fresh process."""
    assert row.process_bytes is not None
    return row.allocated_bytes, row.process_bytes


def predicted_process(row: Row) -> tuple[float, float]:
    """What is predicted for the allocator, and a fresh process."""
    assert row.process_bytes is not None
    return row.predicted_with_workspace_bytes, row.process_bytes


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """What is asked for, and whether it was found."""
    num_large = sum(row.allocated_bytes >= GIB for row in rows)
    found = [
        Verdict(f"at least {LEAST_ROWS} configurations", str(len(rows)), len(rows) >= LEAST_ROWS),
        Verdict(f"of them at least {LEAST_LARGE} with 1 GiB or more", str(num_large), num_large >= LEAST_LARGE),
    ]
    for what, pair in (("tensors", of_tensors), ("allocator", of_allocator)):
        errors = errors_of([pair(row) for row in rows])
        bars = (("median", errors.median, MEDIAN_BAR), ("95 %", errors.high, HIGH_BAR))
        for name, value, bar in (*bars, ("worst", errors.worst, WORST_BAR)):
            found.append(Verdict(f"{what}: {name} at most {bar:.1%}", f"{value:.2%}", value <= bar))
        asked = f"{what}: never under by more than the margin of {MARGIN:.0%}"
        found.append(Verdict(asked, f"{errors.most_under:.2%} at most", errors.most_under <= MARGIN))
    processes = [row for row in rows if row.process_bytes is not None]
    enough = len(processes) >= LEAST_PROCESSES
    worst = errors_of([meters(row) for row in processes]).worst if processes else math.inf
    asked = f"the meter and a fresh process, on at least {LEAST_PROCESSES}: worst at most {PROCESS_BAR:.0%}"
    found.append(Verdict(asked, f"{worst:.2%} on {len(processes)}", enough and worst <= PROCESS_BAR))
    return found


def line(row: Row) -> str:
    """One row for a person who waits."""
    c = row.configuration
    tensors, all_of_it = (predicted / measured - 1 for predicted, measured in (of_tensors(row), of_allocator(row)))
    process = "" if row.process_bytes is None else f" process {row.process_bytes / 1e6:9.2f}"
    return (
        f"{c.size:5} {c.model:23} {c.optimizer:14} {c.batch_size:2} in {c.micro_batch_size:2} {c.recompute:18} "
        f"tensors {row.counted_bytes / 1e6:9.2f} MB {tensors:+.3%}  "
        f"allocator {row.allocated_bytes / 1e6:9.2f} MB {all_of_it:+.3%}{process}"
    )


def _errors_row(name: str, rows: Sequence[Row], pair: Callable[[Row], tuple[float, float]]) -> str:
    e = errors_of([pair(row) for row in rows])
    return f"| {name} | {e.num} | {e.median:.3%} | {e.high:.3%} | {e.worst:.3%} | {e.num_under} | {e.most_under:.3%} |"


def _grouped(rows: Sequence[Row], name_of: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(name_of(row), []).append(row)
    return found


def _errors_table(rows: Sequence[Row], pair: Callable[[Row], tuple[float, float]]) -> str:
    head = "| | configurations | median | 95 % | worst | predicted too little | by at most |"
    groups: dict[str, list[Row]] = {"all": list(rows)}
    groups["1 GiB or more"] = [row for row in rows if row.allocated_bytes >= GIB]
    groups |= _grouped(rows, lambda row: row.configuration.model)
    groups |= _grouped(rows, lambda row: row.configuration.optimizer)
    groups |= _grouped(rows, lambda row: f"recompute: {row.configuration.recompute}")
    return "\n".join(
        [
            head,
            "|---|---|---|---|---|---|---|",
            *(_errors_row(name, some, pair) for name, some in groups.items() if some),
        ]
    )


def _process_table(rows: Sequence[Row]) -> str:
    lines = ["| configuration | process, MB | allocator | predicted |", "|---|---|---|---|"]
    for row in rows:
        c = row.configuration
        (metered, process), (predicted, _) = meters(row), predicted_process(row)
        lines.append(
            f"| {c.model}, {c.optimizer}, {c.batch_size} in {c.micro_batch_size}, recompute {c.recompute} "
            f"| {process / 1e6:.1f} | {metered / process - 1:+.2%} | {predicted / process - 1:+.2%} |"
        )
    return "\n".join(lines)


def tables(rows: Sequence[Row]) -> str:
    """All figures, in Markdown."""
    processes = [row for row in rows if row.process_bytes is not None]
    bars = ["| asked for | found | |", "|---|---|---|"]
    bars += [f"| {v.asked} | {v.found} | {'met' if v.is_met else 'MISSED'} |" for v in verdicts(rows)]
    parts = [
        "\n".join(bars),
        "## Tensors\n\nPredicted against the bytes of real tensors in the real step.",
        _errors_table(rows, of_tensors),
        "## Allocator\n\nPredicted, with the workspace that small micro-batches showed, against all that the allocator "
        "gave out.",
        _errors_table(rows, of_allocator),
        "Without the workspace:",
        _errors_table(rows, without_workspace),
    ]
    if processes:
        parts += [
            "## Process memory\n\nA fresh process, beyond what it held before it built the model. Columns are the "
            "meter and the prediction, relative to it.",
            _process_table(processes),
        ]
    return "\n\n".join(parts)


def page(rows: Sequence[Row]) -> str:
    """The page for the documentation."""
    return _PAGE.format(tables=tables(rows), torch=torch.__version__, python=platform.python_version(), cpu=_cpu())


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_PAGE = """# How exact predicted peaks are

`python -m benchmarks.planner.accuracy --write docs/accuracy.md` wrote this page. It takes half an hour to an hour;
`make accuracy` installs what it needs first.

A *configuration* is a model, an optimizer, a batch, a micro-batch size, and what is recomputed. For each, the peak of a
steady step is predicted from shapes alone and measured in a real step of `bb.Step` on real numbers:

- **Tensors**: what `Plan.peak_bytes` promises, and a count of the real tensors that are alive.
- **Allocator**: all that torch's CPU allocator gave out, read from the events of `torch.profiler` by a meter that
  shares no code with the predictor. It sees what convolutions and LSTMs of oneDNN need while they run, which belongs
  to no tensor. The planner notes this *workspace* of each kernel in two small micro-batches that it really runs, and
  adds it where that kernel is called.
- **Process memory**: what a fresh process holds at most, asked of the operating system.

An error is |predicted / measured - 1|. Plans keep {margin} of the budget free for it. "Predicted too little" counts
configurations; below 0.01 % it is the state of random number generators (5 kB), which no trace of tensors sees.

torch {torch}, Python {python}, {cpu}, one thread.

{tables}
""".replace("{margin}", f"{MARGIN:.0%}")
