"""What is noted while a step runs: plain values, which whoever reads them can do without torch."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Storage(NamedTuple):
    """A storage that was saved, or given to a module: its number within the micro-batch, and its size."""

    number: int
    num_bytes: int


class Event(NamedTuple):
    """One moment of a step.

    Attributes:
        kind: "enter" or "exit" of a module; "save" of a tensor for backward; "load" of it in backward; "made" by an
            operation whose output may be kept; "mark".
        what: The name of the module; the number of the save, also for its load; or the label of the mark:
            "micro-batch", "backward", "update", "end". Of what was made, the words of ``Plan.keep`` that keep it, and
            the seconds that it took.
        storages: Of what is saved or given to the module, without those that are there all the time.
        peak_bytes: The most bytes that were alive since the event before.
        live_bytes: Bytes alive now.
        gradient_bytes: Of these, what lies in ``.grad``; 0 unless asked for.
        seconds: Since the event before: measured, or estimated.
        follows: On "enter": the first argument is what the module that was left last has returned.
        others: On "enter": its other arguments, as something that can be compared.
    """

    kind: Literal["enter", "exit", "save", "load", "made", "mark"]
    what: Any
    storages: tuple[Storage, ...] = ()
    peak_bytes: float = 0.0
    live_bytes: float = 0.0
    seconds: float = 0.0
    follows: bool = False
    others: Any = None
    gradient_bytes: float = 0.0

    def marks(self, label: str) -> bool:
        """Whether it is the mark with this label."""
        return self.kind == "mark" and self.what == label
