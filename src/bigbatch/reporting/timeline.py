"""A picture of one step: the bytes that are alive at every moment, by kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bigbatch.planning.timeline import Stretch, Timeline
from bigbatch.reporting import colors
from bigbatch.reporting.pictures import Scale, check_can_be_drawn, figure_of_size
from bigbatch.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "parameters": colors.BLUE,
    "optimizer": colors.SKY,
    "buffers": colors.GREY,
    "inputs": colors.PINK,
    "gradients": colors.ORANGE,
    "saved": colors.GREEN,
    "work": colors.RED,
}
_NAMES = {"saved": "saved for backward", "work": "work, for a moment", "buffers": "buffers and others"}
_HEADROOM = 1.2
_MOST_OVER_PEAK = 2.0
"""A budget that is higher than so many peaks would leave no room for what is to be seen."""
_NARROW, _TOO_NARROW = 0.09, 0.02
"""Of the width: a stretch below the first has its name upright, and one below the second has none."""


def draw_timeline(found: Timeline, path: Path, *, title: str, budget_bytes: int) -> None:
    """Write the picture.

    Args:
        title: Above it.
        budget_bytes: A line in it.

    Raises:
        OptionError: The name ends with what is no picture.
        MissingExtraError: matplotlib is not installed.
    """
    check_can_be_drawn(None, path)
    figure_of_timeline(found, title=title, budget_bytes=budget_bytes).savefig(path)


def figure_of_timeline(found: Timeline, *, title: str, budget_bytes: int) -> Figure:
    """The picture as a figure of matplotlib; arguments as for ``draw_timeline``."""
    time, memory = Scale.of_seconds(found.seconds[-1]), Scale.of_bytes(found.peak_bytes)
    x = [seconds / time.size for seconds in found.seconds]
    shown = {kind: values for kind, values in found.kinds.items() if any(values)}
    figure = figure_of_size(9, 5.2)
    axes = figure.add_subplot()
    axes.stackplot(
        x,
        *([value / memory.size for value in values] for values in shown.values()),
        labels=[_NAMES.get(kind, kind) for kind in shown],
        colors=[_COLORS[kind] for kind in shown],
        linewidth=0,
    )
    with_budget = budget_bytes <= _MOST_OVER_PEAK * found.peak_bytes
    highest = max(found.peak_bytes, budget_bytes if with_budget else 0) * _HEADROOM / memory.size
    axes.set_ylim(0, highest)
    axes.set_xlim(0, x[-1])
    if with_budget:
        _mark_budget(axes, budget_bytes, memory)
    label = f"peak {format_bytes(found.peak_bytes)}" + ("" if with_budget else f" of {format_bytes(budget_bytes)}")
    _mark_peak(axes, found, time, memory, label)
    for stretch in found.stretches:
        _mark_stretch(axes, stretch, found, time)
    axes.set_xlabel(f"time, {time.unit} (estimated)")
    axes.set_ylabel(f"bytes alive, {memory.unit}")
    axes.set_title(title, fontsize=11, pad=22)
    # The legend in the order in which the areas lie, the highest first.
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)
    return figure


def _mark_budget(axes: Axes, budget_bytes: int, memory: Scale) -> None:
    height = budget_bytes / memory.size
    axes.axhline(height, color=colors.BLACK, ls="--", lw=1.2)
    text = f"budget {format_bytes(budget_bytes)}"
    axes.annotate(text, (0, height), xytext=(4, 3), textcoords="offset points", va="bottom", fontsize=8)


def _mark_peak(axes: Axes, found: Timeline, time: Scale, memory: Scale, label: str) -> None:
    totals = found.totals
    moment = totals.index(found.peak_bytes)
    x, y = found.seconds[moment] / time.size, found.peak_bytes / memory.size
    axes.plot([x], [y], "v", color=colors.BLACK, markersize=6, clip_on=False)
    is_left = found.seconds[moment] < found.seconds[-1] / 2
    axes.annotate(
        label,
        (x, y),
        xytext=(7 if is_left else -7, 2),
        textcoords="offset points",
        ha="left" if is_left else "right",
        va="top",
        fontsize=9,
        weight="bold",
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )


def _mark_stretch(axes: Axes, stretch: Stretch, found: Timeline, time: Scale) -> None:
    start, end = stretch.start_seconds / time.size, stretch.end_seconds / time.size
    width = (stretch.end_seconds - stretch.start_seconds) / found.seconds[-1]
    above = axes.get_xaxis_transform()
    if stretch.kind == "backward":
        axes.axvspan(start, end, color=colors.GREY, alpha=0.18, lw=0, zorder=0)
    else:
        axes.axvline(start, color=colors.BLACK, lw=0.8, alpha=0.6)
    if stretch.kind == "update":
        axes.text(end, 1.015, "update", transform=above, ha="right", va="bottom", fontsize=9)
        return
    if width > _TOO_NARROW:
        middle, turned = (start + end) / 2, 90 if width < _NARROW else 0
        axes.text(middle, 0.985, stretch.kind, transform=above, ha="center", va="top", fontsize=8, rotation=turned)
    if stretch.kind == "forward" and width > _TOO_NARROW:
        name = _micro_batch(stretch, found) if width > _NARROW else str(stretch.micro_batch)
        axes.text(start, 1.015, name, transform=above, ha="left", va="bottom", fontsize=9)


def _micro_batch(stretch: Stretch, found: Timeline) -> str:
    if stretch.micro_batch == 1:
        return "micro-batch 1"
    return f"micro-batch 2, and {found.num_later - 1} like it" if found.num_later > 1 else "micro-batch 2"
