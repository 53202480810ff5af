"""A comparison with the true big batch as a table."""

from __future__ import annotations

from bigbatch.reporting.text import identity
from bigbatch.verification.comparison import MAX_DIFFERENCE, Comparison

_MOST_ROWS = 10


def comparison_text(name: str, found: Comparison) -> str:
    """The verdict, the parameters that are farthest off, and what was found.

    Args:
        name: Of what was compared.
        found: By ``verify``.
    """
    verdict = "equal up to rounding" if found.equal else "NOT equal"
    lines = [f"{name}: the cut batch and the whole batch at once, in {found.dtype}: {verdict}"]
    lines += [f"  cut: {identity(sizes)}" for sizes in found.cuts]
    rows = list(found.differences.items())[:_MOST_ROWS]
    width = max(len("parameter"), *(len(parameter) for parameter, _ in rows))
    lines += ["", f"  {'parameter':{width}}  relative difference of the gradient"]
    lines += [f"  {parameter:{width}}  {difference:.1e}" for parameter, difference in rows]
    if len(found.differences) > len(rows):
        lines.append(f"  and {len(found.differences) - len(rows)} more, which are closer")
    lines.append(f"  {'(the loss)':{width}}  {found.loss_difference:.1e}")
    lines.append(f"  allowed: {MAX_DIFFERENCE[found.dtype]:.0e}")
    for title, texts in (("Found", found.findings), ("Done otherwise than in a step", found.notes)):
        lines += ["", f"{title}:", *(f"  - {text}" for text in texts)] if texts else []
    return "\n".join(lines)
