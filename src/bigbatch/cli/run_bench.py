"""What ``bigbatch bench`` does: run it, print the table, write table, JSON and pictures. This loads torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigbatch.cli.speaking import print_now, tell
from bigbatch.cli.wanted import Wanted
from bigbatch.errors import MissingExtraError
from bigbatch.reporting.bench_pictures import draw_bench
from bigbatch.reporting.bench_text import bench_report, row_text
from bigbatch.reporting.pictures import needed
from bigbatch.reporting.text import rendered
from bigbatch.training.bench import BenchListener, bench
from bigbatch.training.bench_result import BenchRow
from bigbatch.training.log import make_run_dir
from bigbatch.training.rank import Rank
from bigbatch.training.ways import Ways
from bigbatch.units import format_bytes, format_count

_WIDTH = 132


class _Lines(BenchListener):
    """Says on the way how far it is."""

    def found(self, ways: Ways) -> None:
        """How many there are to compare."""
        planned = "" if ways.planned_bytes is None else f", planned for {format_bytes(ways.planned_bytes)}"
        print_now(f"{format_count(len(ways.ways), 'way')}{planned}")

    def tried(self, row: BenchRow) -> None:
        """What one of them needs."""
        print_now(row_text(row))

    def rounded(self, number: int, most: int) -> None:
        """How many rounds were made."""
        if number <= 3 or number % 10 == 0 or number == most:
            print_now(f"round {number} of {most}")


def run(wanted: Wanted, *, folder: Path | None, pictures: bool, **how: Any) -> None:
    """Bench, print, write.

    Without matplotlib there are no pictures, which is said before anything runs.

    Raises:
        OptionError: An option cannot be.
    """
    device, task = wanted.prepare(Rank()), wanted.found()
    pictures = pictures and _can_draw()
    with _without_warnings_of_each_step():
        found = bench(task, device=device, memory_budget=wanted.memory_budget, listener=_Lines(), **how)
    text = rendered(bench_report(found), _WIDTH)
    print_now(f"\n{text}")
    place = make_run_dir(folder, f"bench-{task.name}")
    files = [place / "bench.json", place / "bench.txt"]
    files[0].write_text(found.to_json() + "\n", encoding="utf-8")
    files[1].write_text(text + "\n", encoding="utf-8")
    if pictures:
        files += draw_bench(found, place)
    print_now(f"files: {', '.join(map(str, files))}")


def _can_draw() -> bool:
    try:
        needed("matplotlib")
    except MissingExtraError as error:
        tell(f"{error} There will be table and JSON alone.")
        return False
    return True


@contextlib.contextmanager
def _without_warnings_of_each_step() -> Iterator[None]:
    """Each way would say that it is approximate; the table says it once."""
    log = logging.getLogger("bigbatch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
