"""What one rank tells the others between two steps, so that all do it after the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_COUNT = "count"
KINDS = ("stop", "save")
"""``stop``: save and end, with the number of the signal; ``save``: save."""


class Notices:
    """Notices of all ranks, each for the end of a step.

    A signal reaches one rank before step 8 ends there, and another one after; and only one of them looks at the clock.
    Who has something to tell after step k names step k + 1. No rank is past that: the end of a step needs sums over
    all ranks, so none is at the end of step k + 1 before the one that tells has begun it. So a notice costs a step, and
    each step one question to the store, and no collective.

    >>> notices = Notices()
    >>> notices.tell("stop", 15, step=8)
    >>> notices.due(step=8)
    {'stop': 15}

    Args:
        store: What the ranks share; None: there are no others, and a notice is for the step at whose end it is told.
    """

    def __init__(self, store: Store | None = None):
        self._store = store
        self._num_seen = 0
        self._told: dict[str, tuple[int, int]] = {}

    def tell(self, what: str, value: int = 0, *, step: int) -> None:
        """Tell all ranks, at the end of a step. What was told and is not due yet is not told again."""
        # First what others told: it may be for this step, and must not be put off.
        self._read()
        if self._told.get(what, (-1, 0))[0] >= step:
            return
        if self._store is None:
            self._told[what] = step, value
            return
        self._told[what] = step + 1, value
        self._store.set(what, f"{step + 1} {value}")
        # After it is there, because the count is what others look at.
        self._store.add(_COUNT, 1)

    def due(self, *, step: int) -> dict[str, int]:
        """What is to be done at the end of this step, by name; on all ranks the same."""
        self._read()
        return {what: value for what, (due, value) in self._told.items() if due == step}

    def _read(self) -> None:
        count = 0 if self._store is None else self._store.add(_COUNT, 0)
        if self._store is None or count == self._num_seen:
            return
        self._num_seen = count
        for what in KINDS:
            if self._store.check([what]):
                due, value = map(int, self._store.get(what).split())
                self._told[what] = due, value
