"""The pictures: what is in them, read from the figures, and that no text lies on another."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

import bigbatch as bb
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.search import frontier
from bigbatch.planning.simulate import Simulation
from bigbatch.planning.timeline import KINDS, Stretch, Timeline
from bigbatch.reporting.frontier import Frontier, draw_frontier, figure_of_frontier, said
from bigbatch.reporting.pictures import Scale, check_can_be_drawn
from bigbatch.reporting.timeline import draw_timeline, figure_of_timeline
from tests.planning.profiles import equal_blocks, unet

BATCH = 32


def frontier_of(profile: MemoryProfile, budget_bytes: int | None = None) -> Frontier:
    plans = frontier(profile, batch_size=BATCH)
    direct = Simulation(profile, [BATCH])
    chosen = plans[len(plans) // 3]
    return Frontier(
        title="a model, batches of 32",
        time_label="time of a step (measured)",
        plans=plans,
        recompute_none=frontier(profile, batch_size=BATCH, recompute="none"),
        recompute_all=frontier(profile, batch_size=BATCH, recompute="all"),
        direct=bb.Plan(micro_batch_size=BATCH, peak_bytes=direct.peak_of(()), step_seconds=direct.plain_seconds),
        chosen=chosen,
        budget_bytes=budget_bytes or int((chosen.peak_bytes or 0) * 1.05),
    )


def timeline(num_later: int = 3) -> Timeline:
    """Forward, backward, forward, backward, update; 100 MiB of parameters, a peak of 450 MiB at 5 s."""
    mib = 2**20
    seconds = (0.0, 1.0, 3.0, 4.0, 5.0, 6.0, 6.5)
    kinds = dict.fromkeys(KINDS, (0,) * 7)
    kinds["parameters"] = (100 * mib,) * 7
    kinds["gradients"] = (0, 0, 100 * mib, 100 * mib, 100 * mib, 100 * mib, 100 * mib)
    kinds["saved"] = (0, 200 * mib, 0, 200 * mib, 150 * mib, 0, 0)
    kinds["work"] = (0, 0, 0, 0, 100 * mib, 0, 50 * mib)
    stretches = (
        Stretch("forward", 1, 0.0, 1.0),
        Stretch("backward", 1, 1.0, 3.0),
        Stretch("forward", 2, 3.0, 4.0),
        Stretch("backward", 2, 4.0, 6.0),
        Stretch("update", 0, 6.0, 6.5),
    )
    return Timeline(seconds, kinds, stretches, num_later)


def boxes_of_texts(figure, axes):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in axes.texts if text.get_text()]
    return {text.get_text(): text.get_window_extent(canvas.get_renderer()) for text in texts}


@pytest.mark.parametrize("profile", [equal_blocks(8), unet()], ids=["equal", "unet"])
def test_the_frontier_has_every_curve_and_the_chosen_plan(profile):
    found = frontier_of(profile)
    figure = figure_of_frontier(found)
    (axes,) = figure.axes

    curves = {line.get_label(): line for line in axes.lines}
    unit = Scale.of_bytes(max(plan.peak_bytes for plan in (*found.recompute_none, found.direct))).size
    for name, plans in (
        ("fastest plans", found.plans),
        ("nothing recomputed", found.recompute_none),
        ("every block recomputed", found.recompute_all),
    ):
        assert list(curves[name].get_xdata()) == [plan.peak_bytes / unit for plan in plans]
    budget = next(line for name, line in curves.items() if name.startswith("budget, "))
    assert list(budget.get_xdata()) == [found.budget_bytes / unit] * 2
    marked = {points.get_label(): points.get_offsets()[0] for points in axes.collections}
    assert marked["the batch at once"][0] == found.direct.peak_bytes / unit
    assert marked["chosen"][0] == found.chosen.peak_bytes / unit


@pytest.mark.parametrize("profile", [equal_blocks(8), equal_blocks(40), unet()], ids=["equal", "long", "unet"])
def test_labels_do_not_overlap(profile):
    found = frontier_of(profile)
    figure = figure_of_frontier(found)
    boxes = list(boxes_of_texts(figure, figure.axes[0]).values())

    assert len(boxes) >= 3
    for position, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:position])
    assert said(found.chosen) in [text.get_text() for text in figure.axes[0].texts]


def test_a_single_plan_can_be_drawn(tmp_path):
    plan = bb.Plan(micro_batch_size=4, peak_bytes=10**6, step_seconds=0.1)
    found = Frontier("one", "time", (plan,), (plan,), (plan,), plan, plan, 2 * 10**6)

    draw_frontier(found, tmp_path / "one.png")

    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("budget_mib", [460, 4600])
def test_the_timeline_has_kinds_stretches_and_the_peak(budget_mib):
    figure = figure_of_timeline(timeline(), title="a step", budget_bytes=budget_mib * 2**20)
    (axes,) = figure.axes

    boxes = boxes_of_texts(figure, axes)
    peak = "peak 450.00 MiB" if budget_mib == 460 else "peak 450.00 MiB of 4.49 GiB"
    assert {"forward", "backward", "update", "micro-batch 1", "micro-batch 2, and 2 like it", peak} <= set(boxes)
    assert ("budget 460.00 MiB" in boxes) == (budget_mib == 460)
    # What is never there is not in the legend.
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["work, for a moment", "saved for backward", "gradients", "parameters"], (
        "what is never there is not"
    )
    unmarked = [box for text, box in boxes.items() if text not in ("forward", "backward")]
    for position, box in enumerate(unmarked):
        assert not any(box.overlaps(other) for other in unmarked[:position])


def test_texts_of_narrow_stretches_do_not_overlap():
    """An update that takes most of the time, as with small models."""
    found = timeline()
    stretches = [*found.stretches[:-1], found.stretches[-1]._replace(end_seconds=60.0)]
    long = dataclasses.replace(found, seconds=(*found.seconds[:-1], 60.0), stretches=tuple(stretches))
    figure = figure_of_timeline(long, title="a step", budget_bytes=460 * 2**20)

    above = [box for text, box in boxes_of_texts(figure, figure.axes[0]).items() if text in ("1", "2", "update")]
    assert len(above) >= 1
    for position, box in enumerate(above):
        assert not any(box.overlaps(other) for other in above[:position])


def test_a_timeline_is_written(tmp_path):
    for name in ("t.png", "t.svg"):
        draw_timeline(timeline(num_later=1), tmp_path / name, title="a step", budget_bytes=2**30)

    assert (tmp_path / "t.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "t.svg").read_text()


def test_the_page_says_what_each_point_is(tmp_path):
    found = frontier_of(equal_blocks(8))

    draw_frontier(found, tmp_path / "f.html")

    page = (tmp_path / "f.html").read_text()
    assert len(page) > 10**6, "it needs nothing from elsewhere"
    hovers = re.findall(r"micro-batches of \d+(?:\\u003cbr\\u003e|<br>)\d+ modules recomputed", page)
    assert len(hovers) == len(found.plans) + len(found.recompute_none) + len(found.recompute_all) + 2


def test_units_are_chosen_by_size():
    assert Scale.of_bytes(5 * 2**20) == ("MiB", 2**20)
    assert Scale.of_bytes(100) == ("B", 1)
    assert Scale.of_seconds(2.0) == ("s", 1.0)


@pytest.mark.parametrize(("name", "package"), [("f.png", "matplotlib"), ("f.html", "plotly")])
def test_what_is_missing_is_named(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(bb.MissingExtraError, match=rf'{package}, .* not installed: pip install "bigbatch\[plot\]"'):
        check_can_be_drawn(Path(name), None)


def test_a_name_that_is_no_picture_is_refused():
    with pytest.raises(bb.OptionError, match=r"--frontier f.jpg: a picture ends with .png, .svg, .pdf, .html"):
        check_can_be_drawn(Path("f.jpg"), None)
    with pytest.raises(bb.OptionError, match=r"--timeline t.html: a picture ends with .png, .svg, .pdf\."):
        check_can_be_drawn(None, Path("t.html"))
