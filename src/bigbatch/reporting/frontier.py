"""A picture of all good plans: memory against time, each point a plan; PNG by matplotlib, HTML by plotly."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bigbatch.reporting import colors
from bigbatch.reporting.pictures import PAGES, Scale, check_can_be_drawn, figure_of_size, make_light, needed
from bigbatch.units import format_bytes, format_seconds
from bigbatch.values import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_ROOM_ON_THE_LEFT, _ROOM_ON_THE_RIGHT = 0.25, 0.06
"""Of the width of what is shown."""


@dataclass(frozen=True)
class Frontier:
    """What is in the picture; plans with their peaks and times, ascending by peak.

    Attributes:
        title: Above it.
        time_label: Of the axis of time: where the times come from.
        plans: The fastest for their memory.
        recompute_none: The same with nothing recomputed.
        recompute_all: The same with every block recomputed.
        direct: The batch in one piece, with nothing recomputed.
        chosen: The plan that was chosen.
        budget_bytes: What it was chosen for.
    """

    title: str
    time_label: str
    plans: tuple[Plan, ...]
    recompute_none: tuple[Plan, ...]
    recompute_all: tuple[Plan, ...]
    direct: Plan
    chosen: Plan
    budget_bytes: int


def draw_frontier(found: Frontier, path: Path) -> None:
    """Write the picture; the end of the name says in which form.

    Raises:
        MissingExtraError: What draws it is not installed.
    """
    check_can_be_drawn(path, None)
    if path.suffix in PAGES:
        _page(found).write_html(path, include_plotlyjs=True)
    else:
        figure_of_frontier(found).savefig(path)


def said(plan: Plan) -> str:
    """A plan in a few words."""
    count = plan.num_recomputed
    return f"{plan.micro_batch_size}, {count} recomputed" if count else f"{plan.micro_batch_size}"


class _Curve(NamedTuple):
    name: str
    plans: Sequence[Plan]
    color: str
    marker: str
    line: str


def _curves(found: Frontier) -> Iterator[_Curve]:
    yield _Curve("every block recomputed", found.recompute_all, colors.RED, "^", ":")
    yield _Curve("nothing recomputed", found.recompute_none, colors.ORANGE, "s", "--")
    yield _Curve("fastest plans", found.plans, colors.BLUE, "o", "-")


def _points(found: Frontier) -> Iterator[tuple[str, Plan, str]]:
    yield "the batch at once", found.direct, colors.BLACK
    yield "chosen", found.chosen, colors.GREEN


def _all_plans(found: Frontier) -> list[Plan]:
    return [*found.recompute_all, *found.recompute_none, *found.plans, found.direct, found.chosen]


def _scales(found: Frontier) -> tuple[Scale, Scale]:
    plans = _all_plans(found)
    most_bytes = max(found.budget_bytes, *(plan.peak_bytes or 0 for plan in plans))
    return Scale.of_bytes(most_bytes), Scale.of_seconds(max(plan.step_seconds or 0.0 for plan in plans))


def _places(plans: Sequence[Plan], scales: tuple[Scale, Scale]) -> tuple[list[float], list[float]]:
    memory, time = scales
    return [(p.peak_bytes or 0) / memory.size for p in plans], [(p.step_seconds or 0) / time.size for p in plans]


def figure_of_frontier(found: Frontier) -> Figure:
    """The picture as a figure of matplotlib."""
    figure, scales = figure_of_size(9, 5.6), _scales(found)
    axes = figure.add_subplot()
    for curve in _curves(found):
        x, y = _places(curve.plans, scales)
        axes.plot(x, y, curve.line, marker=curve.marker, color=curve.color, label=curve.name, markersize=5, lw=1.4)
    for (name, plan, color), (marker, size) in zip(_points(found), (("X", 90), ("*", 260)), strict=True):
        x, y = _places([plan], scales)
        axes.scatter(x, y, s=size, marker=marker, color=color, label=name, zorder=5, edgecolors="white", linewidths=0.8)
    budget = format_bytes(found.budget_bytes)
    axes.axvline(found.budget_bytes / scales[0].size, color=colors.GREY, ls="--", lw=1.4, label=f"budget, {budget}")
    _set_up_axes(axes, found, scales)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _add_labels(figure, axes, found, scales)
    return figure


def _set_up_axes(axes: Axes, found: Frontier, scales: tuple[Scale, Scale]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"peak memory, {scales[0].unit}")
    axes.set_ylabel(f"{found.time_label}, {scales[1].unit}")
    axes.set_title(f"{found.title}\nlabels: samples in a micro-batch, modules recomputed", fontsize=11)
    make_light(axes)
    peaks = [(plan.peak_bytes or 0) / scales[0].size for plan in _all_plans(found)]
    ends = min(peaks), max(*peaks, found.budget_bytes / scales[0].size)
    ratio = max(1.1, ends[1] / ends[0])
    # Labels are to the left of their points.
    axes.set_xlim(ends[0] / ratio**_ROOM_ON_THE_LEFT, ends[1] * ratio**_ROOM_ON_THE_RIGHT)
    axes.margins(y=0.12)


def _add_labels(figure: Figure, axes: Axes, found: Frontier, scales: tuple[Scale, Scale]) -> None:
    """Name the chosen plan, the leanest one, and of the others those for which there is room below the curve."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    inside = axes.get_window_extent()
    taken: list[Any] = []
    for plan in [found.chosen, *found.plans]:
        text = _label(axes, plan, scales, is_chosen=plan is found.chosen)
        box = text.get_window_extent(canvas.get_renderer()).padded(3)
        is_inside = inside.x0 <= box.x0 and inside.y0 <= box.y0
        if not is_inside or any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)


def _label(axes: Axes, plan: Plan, scales: tuple[Scale, Scale], *, is_chosen: bool) -> Text:
    (x,), (y,) = _places([plan], scales)
    return axes.annotate(
        said(plan),
        (x, y),
        xytext=(-6, -6),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9 if is_chosen else 8,
        color=colors.GREEN if is_chosen else colors.BLACK,
        weight="bold" if is_chosen else "normal",
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
    )


def _page(found: Frontier) -> Any:
    needed("plotly")
    graphs = importlib.import_module("plotly.graph_objects")
    scales = _scales(found)
    page = graphs.Figure()
    symbols = {"^": "triangle-up", "s": "square", "o": "circle"}
    dashes = {":": "dot", "--": "dash", "-": "solid"}
    for curve in _curves(found):
        x, y = _places(curve.plans, scales)
        page.add_scatter(
            x=x, y=y, name=curve.name, mode="lines+markers", text=[*map(_hover, curve.plans)],
            hovertemplate="%{text}", line={"color": curve.color, "dash": dashes[curve.line]},
            marker={"symbol": symbols[curve.marker], "size": 8},
        )  # fmt: skip
    for (name, plan, color), (symbol, size) in zip(_points(found), (("x", 12), ("star", 18)), strict=True):
        x, y = _places([plan], scales)
        page.add_scatter(
            x=x, y=y, name=name, mode="markers", text=[_hover(plan)], hovertemplate="%{text}",
            marker={"symbol": symbol, "size": size, "color": color},
        )  # fmt: skip
    budget = f"budget, {format_bytes(found.budget_bytes)}"
    page.add_vline(
        found.budget_bytes / scales[0].size, line={"color": colors.GREY, "dash": "dash"}, annotation_text=budget
    )
    page.update_layout(title=found.title, template="plotly_white")
    page.update_xaxes(type="log", title=f"peak memory, {scales[0].unit}")
    page.update_yaxes(title=f"{found.time_label}, {scales[1].unit}")
    return page


def _hover(plan: Plan) -> str:
    lines = [
        f"micro-batches of {plan.micro_batch_size}",
        f"{plan.num_recomputed} modules recomputed",
        format_bytes(plan.peak_bytes or 0),
        format_seconds(plan.step_seconds or 0.0),
    ]
    return "<br>".join(lines)
