"""What all pictures share: the packages that draw them, a figure to begin with, and units for its axes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bigbatch.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html",)
"""Ends of the names of files: drawn by matplotlib, and by plotly."""


class Scale(NamedTuple):
    """A unit for an axis.

    >>> Scale.of_bytes(3 * 2**30), Scale.of_seconds(0.2)
    (Scale(unit='GiB', size=1073741824), Scale(unit='ms', size=0.001))
    """

    unit: str
    size: float

    @classmethod
    def of_bytes(cls, most: float) -> Scale:
        """The unit for amounts up to this one."""
        for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if most >= 2**power:
                return cls(unit, 2**power)
        return cls("B", 1)

    @classmethod
    def of_seconds(cls, most: float) -> Scale:
        """The unit for times up to this one."""
        return cls("s", 1.0) if most >= 1 else cls("ms", 1e-3)


def check_can_be_drawn(frontier: Path | None, timeline: Path | None) -> None:
    """Before anything is computed: whether these files can be made.

    Raises:
        OptionError: A name ends with what is no picture.
        MissingExtraError: What draws it is not installed.
    """
    for option, path, pages in (("--frontier", frontier, PAGES), ("--timeline", timeline, ())):
        if path is None:
            continue
        if path.suffix not in (*PICTURES, *pages):
            raise OptionError(f"{option} {path}: a picture ends with {', '.join((*PICTURES, *pages))}.")
        needed("plotly" if path.suffix in pages else "matplotlib")


def needed(package: str) -> Any:
    """The package, or an error that says how to get it.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f'A picture needs the package {package}, which is not installed: pip install "bigbatch[plot]".'
        ) from error


def figure_of_size(width: float, height: float) -> Figure:
    """An empty figure of matplotlib, in inches.

    Raises:
        MissingExtraError: It is not installed.
    """
    needed("matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def make_light(axes: Axes) -> None:
    """A faint grid, and no lines at the top and to the right."""
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
