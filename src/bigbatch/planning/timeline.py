"""From the record of a step to a picture of it: the bytes of each kind at every moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bigbatch.memory.events import Event
from bigbatch.planning.costs import MemoryProfile

KINDS = ("parameters", "optimizer", "buffers", "inputs", "gradients", "saved", "work")
"""From what is always there to what lives for a moment. "buffers" has averages and what a step itself keeps too."""


class Stretch(NamedTuple):
    """A part of the step, in seconds from its start.

    Attributes:
        kind: "forward", "backward" or "update".
        micro_batch: Its number, from 1; 0 for the update.
    """

    kind: str
    micro_batch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """The bytes of a step, moment by moment: its first micro-batch, one of the later ones, and the update.

    Attributes:
        seconds: Of each moment, estimated, from the start; ascending.
        kinds: Bytes at each moment, for each of ``KINDS``. Together they are all that is alive.
        stretches: The parts of the step, in order.
        num_later: Micro-batches that are as the one that is shown for them.
    """

    seconds: tuple[float, ...]
    kinds: dict[str, tuple[int, ...]]
    stretches: tuple[Stretch, ...]
    num_later: int

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes alive at each moment."""
        return tuple(map(sum, zip(*self.kinds.values(), strict=True)))

    @property
    def peak_bytes(self) -> int:
        """The most bytes of any moment."""
        return max(self.totals)


def read_timeline(
    events: Sequence[Event], profile: MemoryProfile, *, micro_batch_bytes: int, batch_bytes: int, num_later: int
) -> Timeline:
    """The moments of a recorded step: two for each event, where most was alive before it, and the event itself.

    Saved is what was saved for backward and has not been asked for again. Of a block that is recomputed these are its
    inputs; what its second forward saves is work.

    Args:
        events: Of a step that was watched closely, with its gradients.
        profile: What is resident.
        micro_batch_bytes: Bytes of the micro-batches that were given to the recorded step.
        batch_bytes: Bytes of the inputs that really lie on the device; they are shown instead.
        num_later: Micro-batches after the first one.
    """
    resident = {
        "parameters": profile.parameter_bytes,
        "optimizer": profile.optimizer_bytes,
        "inputs": batch_bytes,
    }
    # Copies for undoing the step are among these, and go before the step is over.
    buffers = profile.buffer_bytes + profile.average_bytes + profile.other_bytes + profile.bucket_bytes
    shift = batch_bytes - micro_batch_bytes
    events = [events[0]._replace(seconds=0.0), *events[1:]]  # The clock starts with the first micro-batch.
    moments, seconds, now = [], [], 0.0
    parts = {**resident, "gradients": 0, "buffers": buffers, "saved": 0}
    for event, saved in zip(events, _saved(events), strict=True):
        moments.append(_split(int(event.peak_bytes) + shift, parts))
        seconds.append(now + event.seconds / 2)
        now += event.seconds
        parts |= {"gradients": int(event.gradient_bytes), "saved": saved}
        moments.append(_split(int(event.live_bytes) + shift, parts))
        seconds.append(now)
    kinds = {kind: tuple(moment[kind] for moment in moments) for kind in KINDS}
    return Timeline(tuple(seconds), kinds, tuple(_stretches(events)), num_later)


def _split(live: int, parts: dict[str, int]) -> dict[str, int]:
    """What is alive, by kind. Where the parts would be more than that, the last ones were let go of unseen."""
    found: dict[str, int] = {}
    for kind, num_bytes in parts.items():
        found[kind] = min(num_bytes, live - sum(found.values()))
    return {**found, "work": live - sum(found.values())}


def _saved(events: Sequence[Event]) -> Iterator[int]:
    """Bytes saved for backward after each event; a storage until the last of its saves is loaded."""
    sizes: dict[int, int] = {}
    storages_of: dict[int, tuple[int, ...]] = {}
    waiting: Counter[int] = Counter()
    total = 0
    for event in events:
        if event.kind == "save":
            sizes.update(event.storages)
            storages_of[event.what] = tuple(storage.number for storage in event.storages)
            total += sum(sizes[index] for index in storages_of[event.what] if not waiting[index])
            waiting.update(storages_of[event.what])
        elif event.kind == "load":
            loaded = storages_of.pop(event.what, ())
            waiting.subtract(loaded)
            total -= sum(sizes[index] for index in loaded if not waiting[index])
        elif event.kind == "mark" and event.what in ("micro-batch", "update", "end"):
            storages_of, waiting, total = {}, Counter(), 0
        yield total


_KIND_AFTER = {"micro-batch": "forward", "backward": "backward", "update": "update"}


def _stretches(events: Sequence[Event]) -> Iterator[Stretch]:
    kind, start, now, micro_batch = "", 0.0, 0.0, 0
    for event in events:
        now += event.seconds
        if event.kind != "mark":
            continue
        if kind:
            yield Stretch(kind, micro_batch if kind != "update" else 0, start, now)
        micro_batch += event.what == "micro-batch"
        kind, start = _KIND_AFTER.get(event.what, ""), now
