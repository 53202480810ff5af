from __future__ import annotations

import itertools

import numpy as np
import pytest
from rich.console import Console

from bigbatch.reporting.bench_pictures import figure_of_losses, figure_of_memory
from bigbatch.reporting.bench_text import bench_report
from bigbatch.training.bench_result import BenchResult, BenchRow, Turn
from bigbatch.training.ways import Way
from bigbatch.values import Plan

MIB = 2**20


def row(size: int, peak: float, seconds: float, recompute="none", batch_size: int = 512, **others) -> BenchRow:
    names = ("a", "b") if recompute != "none" else ()
    turns = tuple(
        Turn(number, 512, 5120.0, 512 // batch_size, seconds, seconds / 50, 2.0 - number / 4) for number in range(1, 5)
    )
    fields = {"turns": turns, "peak_bytes": int(peak * MIB), "differences": {"w": 1e-7, "v": 1e-8}, **others}
    return BenchRow(Way(batch_size, Plan(micro_batch_size=size, recompute=names), recompute), **fields)


@pytest.fixture
def found() -> BenchResult:
    rows = (
        row(512, 104, 1.2),
        row(512, 46, 1.40, "all"),
        row(512, 42, 1.41, "planned"),
        row(128, 28, 0.8),
        row(128, 13.5, 1.8, "all"),
        row(64, 15, 1.01),
        row(64, 8, 1.81, "all"),
        row(256, 53, 0.75, batch_size=256),
        row(
            4, 0, 1.0, outcome="out of memory", why="DefaultCPUAllocator: no", turns=(), peak_bytes=None, differences={}
        ),
    )
    versions = {"device": "a machine", "threads": 1, "torch": "2.13.0"}
    return BenchResult(
        "digits", "cpu", 512, "tokens", rows, 4, 40, 9.0, 45 * MIB, 45 * MIB, "by autograd", 1.25, versions=versions
    )


def lines_of(found: BenchResult) -> list[str]:
    console = Console(width=132, highlight=False)
    with console.capture() as captured:
        console.print(bench_report(found))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_table_says_what_was_found(found):
    lines = lines_of(found)
    rows = [" ".join(line.split()) for line in lines]

    assert "tokens/s" in lines[2]
    assert "to loss 1.25" in lines[2]
    assert "512 512 × 1 none 4,266.7 1.00 × 1.2 s 2.0 % 104.00 MiB over 1.0e-07 1 3.6 s" in rows
    assert "512 128 × 4 all: 2 2,844.4 0.67 × 1.8 s 2.0 % 13.50 MiB 1.0e-07 1 5.4 s" in rows
    assert "256 256 × 1 none 6,826.7 1.60 × 375.0 ms 2.0 % 53.00 MiB over 1.0e-07 1 2.2 s" in rows
    assert "512 4 × 128 none out of memory - - - - - - -" in rows
    assert "4 × 128, recompute none: out of memory: DefaultCPUAllocator: no" in rows
    assert "4 of 40 rounds were made: time or data were over." in rows
    assert max(map(len, lines)) <= 132


def test_labels_of_points_are_there_and_do_not_overlap(found):
    figure = figure_of_memory(found)
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]

    assert sorted(text.get_text() for text in axes.texts) == sorted(
        ["512 × 1", "512 × 1", "512 × 1", "128 × 4", "128 × 4", "64 × 8", "64 × 8", "256 × 1"]
    )
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    points = [axes.transData.transform(xy) for dots in axes.collections for xy in np.asarray(dots.get_offsets())]
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_lines_are_the_losses(found):
    over_samples, over_seconds = figure_of_losses(found).axes
    first = over_samples.lines[0]

    assert list(first.get_xdata()) == [512, 1024, 1536, 2048]
    assert list(first.get_ydata()) == [1.75, 1.5, 1.25, 1.0]
    assert list(over_seconds.lines[0].get_xdata()) == pytest.approx([1.2, 2.4, 3.6, 4.8])
    names = [line.get_label() for line in over_samples.lines]
    assert len(set(names)) == len(names) == 8
