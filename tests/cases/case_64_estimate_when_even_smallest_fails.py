"""A line fitted to noisy or empty measurements.

It must never answer a size as large as one that failed, nor an absurd one.
"""

import math

from bigbatch.errors import BudgetError
from bigbatch.stepping.fitting.sizing import largest_that_fits


def build():
    # Points are (samples, GB); `want` is the range of acceptable answers, None where only an error is right.
    return dict(
        tables=[
            dict(points=[], failed=[1, 2, 4], budget=2.0, want=None),
            # The reserved cache hides the slope.
            dict(
                points=[(1, 2.798), (2, 2.749), (4, 2.718), (8, 2.720), (16, 5.207)],
                failed=[],
                budget=7.79,
                want=(16, 32),
            ),
            # A slope of about zero.
            dict(
                points=[(1, 0.30), (2, 0.30), (4, 0.30), (8, 0.30), (16, 0.30)],
                failed=[],
                budget=8.0,
                want=(16, 512),
            ),
            dict(points=[(1, 0.5), (2, 0.9), (4, 1.7)], failed=[8], budget=3.0, want=(4, 7)),
        ]
    )


def reference():
    return [table["want"] for table in build()["tables"]]


def _bounded_answer(table):
    points, budget = table["points"], table["budget"]
    if not points:
        return "error"
    top, used = max(points)
    below = [point for point in points if point[0] < top][-1]
    slope = max((used - below[1]) / (top - below[0]), used / top / 8)
    answer = int(top + (budget - used) / slope) if used <= budget else top
    return max(min([answer, 2 * top, *(failed - 1 for failed in table["failed"])]), 1)


def careful():
    return [_bounded_answer(table) for table in build()["tables"]]


def _least_squares_answer(table):
    points = table["points"]
    if not points:
        return 16
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if abs(slope) <= 1e-9:
        return 253731
    return int((table["budget"] * 0.9 - (mean_y - slope * mean_x)) / slope)


def naive_least_squares():
    return [_least_squares_answer(table) for table in build()["tables"]]


def _peak_of(table):
    """Peaks in GB that go through the points, and further as the last two do; infinite where it failed."""
    points = dict(table["points"])

    def peak_of(size):
        if size >= min(table["failed"], default=math.inf):
            return math.inf
        below = max((known for known in points if known <= size), default=None)
        above = min((known for known in points if known >= size), default=None)
        if below is None or above is None:
            top, before = max(points), sorted(points)[-2]
            return points[top] + max(points[top] - points[before], 0.01) / (top - before) * (size - top)
        share = (size - below) / max(above - below, 1)
        return points[below] + share * (points[above] - points[below])

    return peak_of


def ours():
    """A line only says what to try next: every answer was tried, and so was the next size."""
    answers = []
    for table in build()["tables"]:
        try:
            answers.append(largest_that_fits(range(1, 513), _peak_of(table), table["budget"])[0])
        except BudgetError:
            answers.append("error")
    return answers


def check(result):
    for found, wanted in zip(result, reference(), strict=True):
        if wanted is None:
            assert found == "error", f"answered {found} although nothing fits"
        else:
            assert found != "error"
            assert wanted[0] <= found <= wanted[1], f"answered {found}, acceptable {wanted}"
