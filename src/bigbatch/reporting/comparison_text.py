"""Lines about a comparison with the direct big batch: of a gradient, of steps, or of a run."""

from __future__ import annotations

from bigbatch.reporting.text import direct_line, identity, metric_text, peak_line
from bigbatch.training.comparison import MAX_ACCURACY_DIFFERENCE, RunsComparison, StepsComparison
from bigbatch.values import Exactness
from bigbatch.verification.comparison import MAX_DIFFERENCE, Comparison, described


def verification_text(name: str, found: Comparison) -> str:
    """The verdict on a gradient, the parameters that are farthest off, and what was found.

    Args:
        name: Of what was compared.
        found: By ``verify``.
    """
    verdict = "equal up to rounding" if found.equal else "NOT equal"
    lines = [f"{name}: the cut batch and the whole batch at once, in {found.dtype}: {verdict}"]
    lines += [f"  cut: {identity(sizes)}" for sizes in found.cuts]
    return "\n".join([*lines, *described(found)])


def peaks_text(peak_bytes: int | None, direct_bytes: int | None, budget_bytes: int | None) -> str:
    """Both peaks."""
    return f"  this run: {peak_line(peak_bytes, budget_bytes)}\n  {direct_line(direct_bytes, budget_bytes)}"


def steps_text(found: StepsComparison) -> str:
    """Some steps in float64."""
    bound = f"allowed {MAX_DIFFERENCE['float64']:g}: {_verdict(found.within)}"
    if not found.is_cut:
        return f"  {found.task}: a batch of {found.whole} cannot be cut, so there is nothing to compare"
    if found.exactness != "exact":
        bound = f"{found.exactness}, so held to no bound"
    other = "" if found.whole is None else f" (the run took {found.whole} at once, which would show nothing)"
    return (
        f"  {found.task}, float64, {found.num_steps} optimizer steps in micro-batches of {found.micro_batch_size}"
        f"{other}: largest relative difference of a parameter {found.difference:.1e} ({found.parameter}), {bound}"
    )


def runs_text(found: RunsComparison, exactness: Exactness) -> str:
    """A whole run."""
    lines = [
        f"  this run is {exactness}: its first gradient differs by {found.gradient_difference:.1e} ({found.parameter})"
    ]
    for name, direct in found.direct.items():
        line = f"  {name}: {metric_text(name, found.cut[name])} here, {metric_text(name, direct)} directly"
        apart = found.accuracy_differences.get(name)
        if apart is not None:
            allowed = f"allowed {100 * MAX_ACCURACY_DIFFERENCE:g}: {_verdict(apart <= MAX_ACCURACY_DIFFERENCE)}"
            line += f", {100 * apart:.2f} points apart ({exactness}), {allowed}"
        lines.append(line)
    return "\n".join(lines)


def _verdict(is_well: bool) -> str:
    return "ok" if is_well else "OUTSIDE"
