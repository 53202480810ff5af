"""How long a run waits for its data, and what to do about it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from bigbatch.units import format_share

T = TypeVar("T")

_TOO_MUCH = 0.05


@dataclass
class Waiting:
    """Time of a run that went into waiting for batches, and into all else between the first batch and the last.

    The first wait is left out: it is the start of the workers, which no number of them makes shorter.

    Attributes:
        last_seconds: What the last batch took to come.
        seconds: What all of them took, but the first.
    """

    last_seconds: float = 0.0
    seconds: float = 0.0
    _busy_seconds: float = 0.0

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; what happens between two of them is counted as work."""
        waiting, is_first = iter(batches), True
        while True:
            began = time.perf_counter()
            try:
                batch = next(waiting)
            except StopIteration:
                return
            came = time.perf_counter()
            self.last_seconds = came - began
            self.seconds += 0.0 if is_first else self.last_seconds
            is_first = False
            yield batch
            self._busy_seconds += time.perf_counter() - came

    @property
    def share(self) -> float:
        """Of the time: what went into waiting, from 0 to 1."""
        all_seconds = self.seconds + self._busy_seconds
        return self.seconds / all_seconds if all_seconds else 0.0


def advice(share: float, num_workers: int, num_cores: int | None = None) -> str:
    """What to do when more than 5 % of the time is spent waiting for data; empty when it is less.

    >>> advice(0.02, 0), advice(0.2, 1, num_cores=8)[:73]
    ('', 'The run waited for data 20 % of the time. Load it with --workers 4 (now 1')

    Args:
        share: Of the time, from 0 to 1.
        num_workers: Processes that load the data now.
        num_cores: Of the machine; None: those of this one.
    """
    if share <= _TOO_MUCH:
        return ""
    wanted = max((num_cores or os.cpu_count() or 1) // 2, 1)
    found = f"The run waited for data {format_share(share)} of the time."
    if num_workers < wanted:
        return (
            f"{found} Load it with --workers {wanted} (now {num_workers}), half of the cores; in a loop of your own "
            f"DataLoader(num_workers={wanted}, persistent_workers=True), and pin_memory=True for CUDA."
        )
    return (
        f"{found} There are {num_workers} workers, half of the cores or more: make a sample cheaper (decode or "
        f"tokenize it once and keep that), or put the data on a faster disk."
    )
