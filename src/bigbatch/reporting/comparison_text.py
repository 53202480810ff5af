"""Lines about a comparison with the direct big batch."""

from __future__ import annotations

from bigbatch.reporting.text import direct_line, metric_text, peak_line
from bigbatch.training.comparison import MAX_ACCURACY_DIFFERENCE, MAX_DIFFERENCE, RunsComparison, StepsComparison
from bigbatch.values import Exactness


def peaks_text(peak_bytes: int | None, direct_bytes: int | None, budget_bytes: int | None) -> str:
    """Both peaks."""
    return f"  this run: {peak_line(peak_bytes, budget_bytes)}\n  {direct_line(direct_bytes, budget_bytes)}"


def steps_text(found: StepsComparison) -> str:
    """Some steps in float64."""
    bound = f"allowed {MAX_DIFFERENCE:g}: {_verdict(found.within)}"
    if found.exactness != "exact":
        bound = f"{found.exactness}, so held to no bound"
    return (
        f"  {found.task}, float64, {found.num_steps} optimizer steps in micro-batches of {found.micro_batch_size}: "
        f"largest relative difference of a parameter {found.difference:.1e} ({found.parameter}), {bound}"
    )


def runs_text(found: RunsComparison, exactness: Exactness) -> str:
    """A whole run."""
    lines = [
        f"  this run is {exactness}: its first gradient differs by {found.gradient_difference:.1e} ({found.parameter})"
    ]
    for name, direct in found.direct.items():
        cut = found.cut[name]
        line = f"  {name}: {metric_text(name, cut)} here, {metric_text(name, direct)} directly"
        if name.endswith("accuracy"):
            is_close = abs(cut - direct) <= MAX_ACCURACY_DIFFERENCE
            points = f"{100 * abs(cut - direct):.2f} points apart"
            line += f", {points} ({exactness}), allowed {100 * MAX_ACCURACY_DIFFERENCE:g}: {_verdict(is_close)}"
        lines.append(line)
    return "\n".join(lines)


def _verdict(is_well: bool) -> str:
    return "ok" if is_well else "OUTSIDE"
