"""A comparison with the true big batch as a table."""

from __future__ import annotations

from bigbatch.reporting.text import identity
from bigbatch.verification.comparison import Comparison, described


def comparison_text(name: str, found: Comparison) -> str:
    """The verdict, the parameters that are farthest off, and what was found.

    Args:
        name: Of what was compared.
        found: By ``verify``.
    """
    verdict = "equal up to rounding" if found.equal else "NOT equal"
    lines = [f"{name}: the cut batch and the whole batch at once, in {found.dtype}: {verdict}"]
    lines += [f"  cut: {identity(sizes)}" for sizes in found.cuts]
    return "\n".join([*lines, *described(found)])
