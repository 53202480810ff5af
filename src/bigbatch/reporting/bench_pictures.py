"""Pictures of a bench: speed against memory, and how the loss falls with samples and with time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.reporting import colors
from bigbatch.reporting.bench_text import way_text
from bigbatch.reporting.pictures import Scale, figure_of_size, make_light
from bigbatch.training.bench_result import BenchResult, BenchRow
from bigbatch.training.ways import Policy
from bigbatch.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_LOOKS: dict[Policy, tuple[str, str, str, str]] = {
    "none": ("nothing recomputed", colors.ORANGE, "s", "-"),
    "all": ("every block recomputed", colors.RED, "^", ":"),
    "planned": ("planned", colors.BLUE, "o", "--"),
}
"""By policy: its name, the color and marker of its points, the style of its lines."""
_SMALLER = "smaller batch", colors.PINK, "D"
_COLORS = (colors.BLACK, colors.BLUE, colors.ORANGE, colors.GREEN, colors.RED, colors.SKY, colors.GREY)
"""Of lines, by micro-batch size."""
_AROUND = [
    (dx * distance, dy * distance, across, up)
    for distance in (1, 2.2)
    for (dx, across), (dy, up) in product(((7, "left"), (-7, "right"), (0, "center")), ((6, "bottom"), (-6, "top")))
]
"""Where a label may be: to the right or left of its point or in the middle, above or below."""


def draw_bench(found: BenchResult, folder: Path) -> list[Path]:
    """Write ``memory.png`` and ``loss.png``; which files were written: no way that ran, no picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    rows = [row for row in found.rows if row.turns]
    if not rows:
        return []
    paths = [folder / "memory.png", folder / "loss.png"]
    figure_of_memory(found).savefig(paths[0])
    figure_of_losses(found).savefig(paths[1])
    return paths


def figure_of_memory(found: BenchResult) -> Figure:
    """Speed against peak memory, each point a way."""
    rows = [row for row in found.rows if row.turns and row.peak_bytes is not None]
    memory = Scale.of_bytes(max([*(row.peak_bytes or 0 for row in rows), found.budget_bytes or 0]))
    figure = figure_of_size(9, 5.6)
    axes = figure.add_subplot()
    places = [((row.peak_bytes or 0) / memory.size, row.weight_per_second or 0.0) for row in rows]
    for name, color, marker, of_it in _kinds(found, rows):
        x, y = zip(*(places[rows.index(row)] for row in of_it), strict=True)
        axes.scatter(x, y, s=60, color=color, marker=marker, label=name, zorder=3, edgecolors="white", linewidths=0.8)
    for row, (x, y) in zip(rows, places, strict=True):
        if row.way.is_chosen:
            axes.scatter(
                [x], [y], s=220, facecolors="none", edgecolors=colors.GREEN, linewidths=1.6, label="chosen by Step"
            )
    if found.budget_bytes is not None:
        label = f"budget, {format_bytes(found.budget_bytes)}"
        axes.axvline(found.budget_bytes / memory.size, color=colors.GREY, ls="--", lw=1.4, label=label)
    axes.set_xlabel(f"peak of a step, {memory.unit}")
    axes.set_ylabel(f"{found.unit} per second")
    axes.set_title(f"{_title(found)}\nlabels: samples in a micro-batch × micro-batches of a step", fontsize=11)
    axes.set_ylim(0, max(y for _, y in places) * 1.15)
    axes.set_xlim(0, max([*(x for x, _ in places), (found.budget_bytes or 0) / memory.size]) * 1.12)
    _finish(figure, axes)
    _add_labels(figure, axes, [(way_text(row.way), place) for row, place in zip(rows, places, strict=True)])
    return figure


def figure_of_losses(found: BenchResult) -> Figure:
    """The mean loss of each round, over samples and over the seconds of the steps."""
    figure = figure_of_size(10, 5.8)
    over_samples, over_seconds = figure.subplots(1, 2, sharey=True)
    rows = [row for row in found.rows if row.turns]
    time = Scale.of_seconds(max(row.seconds for row in rows))
    sizes = list(dict.fromkeys(row.way.plan.micro_batch_size for row in rows))
    for row in rows:
        losses = [turn.loss for turn in row.turns]
        style = _line(found, row, sizes)
        over_samples.plot([*accumulate(turn.num_samples for turn in row.turns)], losses, **style)
        over_seconds.plot([*accumulate(turn.seconds / time.size for turn in row.turns)], losses, **style)
    if found.target_loss is not None:
        label = f"loss {found.target_loss:.3g}"
        over_seconds.axhline(found.target_loss, color=colors.GREY, ls="-", lw=0.8, label=label, zorder=0)
    over_samples.set_xlabel("samples seen")
    over_samples.set_ylabel("mean loss of a round, before its steps")
    over_seconds.set_xlabel(f"time of the steps, {time.unit}")
    figure.suptitle(f"{_title(found)}: one seed, {format_count(found.num_rounds, 'round')} in turns", fontsize=11)
    handles, labels = over_seconds.get_legend_handles_labels()
    _finish(figure, over_samples, legend=None)
    _finish(figure, over_seconds, legend=(handles, labels))
    return figure


def _title(found: BenchResult) -> str:
    return f"{found.task}, batches of {found.batch_size} on {found.versions.get('device', found.device)}"


def _kinds(found: BenchResult, rows: Sequence[BenchRow]) -> Iterator[tuple[str, str, str, list[BenchRow]]]:
    smaller = [row for row in rows if row.way.batch_size != found.batch_size]
    for policy, (name, color, marker, _) in _LOOKS.items():
        of_it = [row for row in rows if row.way.recompute == policy and row not in smaller]
        if of_it:
            yield name, color, marker, of_it
    if smaller:
        yield *_SMALLER, smaller


def _line(found: BenchResult, row: BenchRow, sizes: Sequence[int]) -> dict[str, Any]:
    """How the line of a way looks, and what it is called."""
    is_smaller = row.way.batch_size != found.batch_size
    color = colors.PINK if is_smaller else _COLORS[sizes.index(row.way.plan.micro_batch_size) % len(_COLORS)]
    more = {"none": "", "all": ", all recomputed", "planned": ", planned"}[row.way.recompute]
    name = way_text(row.way) + more + (", smaller batch" * is_smaller)
    marker = "." if len(row.turns) < 12 else ""
    return {"color": color, "ls": _LOOKS[row.way.recompute][3], "lw": 1.5, "label": name, "marker": marker}


def _finish(figure: Figure, axes: Axes, *, legend: tuple[Any, Any] | None = ((), ())) -> None:
    make_light(axes)
    if legend is not None:
        handles, labels = legend if legend[0] else axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _add_labels(figure: Figure, axes: Axes, labels: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Name each point, where there is room beside it; where there is none, its name is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    inside = axes.get_window_extent()
    pixels = axes.transData.transform([place for _, place in labels])
    taken: list[Any] = [_around(x, y) for x, y in pixels]
    for (name, place), own in zip(labels, list(taken), strict=True):
        for dx, dy, across, up in _AROUND:
            text = _label(axes, name, place, dx, dy, across, up)
            box = text.get_window_extent(canvas.get_renderer()).padded(4)
            is_inside = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if is_inside and not any(box.overlaps(other) for other in taken if other is not own):
                taken.append(box)
                break
            text.remove()


def _around(x: float, y: float, size: float = 9) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(x - size, y - size, x + size, y + size)


def _label(axes: Axes, name: str, place: tuple[float, float], dx: float, dy: float, across: str, up: str) -> Text:
    return axes.annotate(
        name, place, xytext=(dx, dy), textcoords="offset points", ha=across, va=up, fontsize=8, color=colors.BLACK
    )
