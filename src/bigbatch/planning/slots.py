"""From the record of a step to the slots of a profile: what each block saves, and what it needs for a moment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import NamedTuple

from bigbatch.memory.events import Event, Storage
from bigbatch.planning.costs import Line, Part, Slot

_LEAST_FREED = 0.1
"""Of what a block saves: a part that frees less is not worth a choice."""
_MOST_CHILDREN = 3
_LEAST_SPARED = 0.05
"""Of the time of recomputing all of a block: what keeping some operations must spare."""


class ShapesDependOnSizeError(Exception):
    """Micro-batches of two sizes do not save the same tensors, so there is no line between them."""


@dataclass(frozen=True)
class MicroBatch:
    """The record of one micro-batch.

    Attributes:
        num_samples: Its size.
        live_bytes: Alive when it begins.
        forward: Events of its forward.
        backward: Events of its backward.
    """

    num_samples: int
    live_bytes: float
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        return sum(event.seconds for event in (*self.forward, *self.backward))


def micro_batches(events: Sequence[Event], sizes: Sequence[int]) -> list[MicroBatch]:
    """The micro-batches in the record of a step.

    Args:
        events: Of one step.
        sizes: Samples in each micro-batch.
    """
    found = []
    for size, part in zip(sizes, _split(events, "micro-batch"), strict=True):
        turn = next(i for i, event in enumerate(part) if event.marks("backward"))
        end = next((i for i, event in enumerate(part) if event.marks("update")), len(part))
        # The first event is the mark itself; what it tells passed before it. That of the mark at the end was backward.
        found.append(MicroBatch(size, part[0].live_bytes, tuple(part[1 : turn + 1]), tuple(part[turn + 1 : end + 1])))
    return found


def seconds_before(events: Sequence[Event]) -> float:
    """Seconds until the first micro-batch: of the first pass and the loss, where that is one of the whole batch."""
    start = next(i for i, event in enumerate(events) if event.marks("micro-batch"))
    return sum(event.seconds for event in events[: start + 1])


def _split(events: Sequence[Event], label: str) -> Iterator[list[Event]]:
    """The stretches that begin with such a mark; each has the mark of the next one at its end too."""
    starts = [i for i, event in enumerate(events) if event.marks(label)]
    for start, end in zip(starts, [*starts[1:], len(events) - 1], strict=True):
        yield list(events[start : end + 1])


class Traced(NamedTuple):
    """Records of micro-batches of two sizes: as the first of a step, without gradients, and as a later one."""

    first: tuple[MicroBatch, MicroBatch]
    later: tuple[MicroBatch, MicroBatch]


@dataclass
class _Child:
    """What one micro-batch needs in a module inside a block."""

    saved: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    recompute_seconds: float = 0.0
    num_calls: int = 0


@dataclass
class _Stretch:
    """What one micro-batch needs in one slot. What is saved outside of its children is that of the child ``""``."""

    name: str | None
    follows: bool = False
    others: object = None
    saved: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    forward_peak: float = 0.0
    recompute_peak: float = 0.0
    backward_peak: float | None = None
    pending: float | None = None
    seconds: float = 0.0
    recompute_seconds: float = 0.0
    children: dict[str, _Child] = field(default_factory=dict)
    inside: str = ""
    made: dict[str, dict[int, int]] = field(default_factory=dict)
    made_seconds: dict[str, float] = field(default_factory=dict)

    def pass_forward(self, event: Event) -> None:
        """Count what came before this event, which is in this slot or ends it."""
        self.forward_peak = max(self.forward_peak, event.peak_bytes)
        self.seconds += event.seconds
        child = self.children.setdefault(self.inside, _Child())
        child.seconds += event.seconds
        if event.kind == "save":
            self.recompute_peak, self.recompute_seconds = self.forward_peak, self.seconds
            self.saved.update(_sizes(event.storages))
            child.recompute_seconds = child.seconds
            child.saved.update(_sizes(event.storages))
        elif event.kind == "made":
            words, took = event.what
            for word in words:
                self.made.setdefault(word, {}).update(_sizes(event.storages))
                self.made_seconds[word] = self.made_seconds.get(word, 0.0) + took
        elif event.kind == "enter" and not self.inside and event.what.rpartition(".")[0] == self.name:
            self.inside = event.what
            child = self.children.setdefault(self.inside, _Child())
            child.inputs.update(_sizes(event.storages))
            child.num_calls += 1
        elif event.kind == "exit" and event.what == self.inside:
            self.inside = ""


def _sizes(storages: Sequence[Storage]) -> dict[int, int]:
    return {storage.number: storage.num_bytes for storage in storages}


def _stretches(micro_batch: MicroBatch, blocks: Collection[str]) -> list[_Stretch]:
    stretches, slot_of_save = [_Stretch(None)], {}
    for event in micro_batch.forward:
        stretches[-1].pass_forward(event)
        inside = stretches[-1].name
        if event.kind == "save":
            slot_of_save[event.what] = len(stretches) - 1
        elif event.kind == "enter" and inside is None and event.what in blocks:
            inputs = _sizes(event.storages)
            stretches.append(_Stretch(event.what, event.follows, event.others, inputs=inputs))
        elif event.kind == "exit" and event.what == inside:
            stretches.append(_Stretch(None))
    _pass_backward(stretches, micro_batch, slot_of_save)
    return stretches


def _pass_backward(stretches: list[_Stretch], micro_batch: MicroBatch, slot_of_save: dict[int, int]) -> None:
    """The backward of a slot is from the first load of what it saved to the first load of another one's."""
    now = stretches[-1]
    for event in micro_batch.backward:
        now.backward_peak = max(now.backward_peak or 0.0, event.peak_bytes)
        if event.kind == "load" and event.what in slot_of_save:
            now = stretches[slot_of_save[event.what]]
            now.backward_peak = max(now.backward_peak or 0.0, event.live_bytes)
            if now.pending is None:
                now.pending = event.live_bytes


class _Held:
    """Bytes that slots hold, each storage with the first that saves it."""

    def __init__(self, stretches: Sequence[_Stretch]):
        holder: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for slot, stretch in enumerate(stretches):
            for index, num_bytes in stretch.saved.items():
                holder.setdefault(index, slot)
                sizes[index] = max(num_bytes, sizes.get(index, 0))
        own = [0] * len(stretches)
        for index, slot in holder.items():
            own[slot] += sizes[index]
        self.upto = list(accumulate(own))
        self.before = [0, *self.upto[:-1]]


class _Beyond(NamedTuple):
    """Bytes of a slot beyond what is held, for one micro-batch."""

    forward: float
    recompute: float
    backward: float
    pending: float


def _beyond(micro_batch: MicroBatch, stretches: Sequence[_Stretch]) -> list[_Beyond]:
    held, base = _Held(stretches), micro_batch.live_bytes
    return [
        _Beyond(
            forward=max(0.0, stretch.forward_peak - base - held.before[slot]),
            recompute=max(0.0, stretch.recompute_peak - base - held.before[slot]),
            backward=0.0 if stretch.backward_peak is None else stretch.backward_peak - base - held.upto[slot],
            pending=0.0 if stretch.pending is None else stretch.pending - base - held.upto[slot],
        )
        for slot, stretch in enumerate(stretches)
    ]


def read_slots(
    traced: Traced, blocks: dict[str, str], may_recompute: Collection[str], neighbours: Collection[tuple[str, str]]
) -> tuple[tuple[Line, ...], tuple[Slot, ...]]:
    """Storages and slots of a profile.

    Args:
        traced: The records.
        blocks: Modules that are slots of their own, with their classes.
        may_recompute: Those that may be recomputed.
        neighbours: Pairs of blocks, one after the other in one ``nn.Sequential`` or ``nn.ModuleList``.

    Raises:
        ShapesDependOnSizeError: There is no line between the two sizes.
    """
    sizes = [micro_batch.num_samples for micro_batch in traced.later]
    both = [_stretches(micro_batch, blocks) for micro_batch in traced.later]
    both_first = [_stretches(micro_batch, blocks) for micro_batch in traced.first]
    _check_same(both)
    _check_same([both[0], both_first[0]])
    beyond = [_beyond(m, s) for m, s in zip(traced.later, both, strict=True)]
    beyond_first = [_beyond(m, s) for m, s in zip(traced.first, both_first, strict=True)]
    first_sizes = [micro_batch.num_samples for micro_batch in traced.first]

    def line(values: Sequence[float], of: Sequence[int] = sizes) -> Line:
        return Line.through((of[0], values[0]), (of[1], values[1]))

    slots = []
    for slot, (small, large) in enumerate(zip(*both, strict=True)):
        now, later = beyond[0][slot], beyond[1][slot]
        first = [values[slot] for values in beyond_first]
        before = both[0][slot - 2] if slot >= 2 else None
        slots.append(
            Slot(
                small.name,
                kind=blocks.get(small.name or "", ""),
                saved=tuple(small.saved),
                inputs=tuple(small.inputs),
                forward=line((now.forward, later.forward)),
                recompute=line((now.recompute, later.recompute)),
                backward=line((now.backward, later.backward)),
                backward_first=line([values.backward for values in first], first_sizes),
                pending=line((now.pending, later.pending)),
                pending_first=line([values.pending for values in first], first_sizes),
                forward_seconds=line((small.seconds, large.seconds)),
                recompute_seconds=line((small.recompute_seconds, large.recompute_seconds)),
                may_recompute=small.name in may_recompute,
                follows=before is not None and _follows(small, before, both[0][slot - 1], neighbours),
                parts=(*_parts(small, large, sizes, may_recompute), *_but_kept(small, large, sizes, may_recompute)),
            )
        )
    return _storages(both, sizes), tuple(slots)


def _check_same(both: Sequence[Sequence[_Stretch]]) -> None:
    one, other = both
    shapes = [
        [
            (s.name, tuple(s.saved), tuple(s.inputs), {word: tuple(made) for word, made in s.made.items()})
            for s in stretches
        ]
        for stretches in (one, other)
    ]
    if shapes[0] != shapes[1]:
        raise ShapesDependOnSizeError("what it saves for backward is not the same for micro-batches of two sizes")


def _follows(this: _Stretch, before: _Stretch, between: _Stretch, neighbours: Collection[tuple[str, str]]) -> bool:
    """Whether the block only gets what the one before returned, with the same other arguments."""
    is_next = (before.name, this.name) in neighbours and not between.saved
    return is_next and this.follows and this.others == before.others


def _parts(small: _Stretch, large: _Stretch, sizes: Sequence[int], may_recompute: Collection[str]) -> tuple[Part, ...]:
    """The modules inside a block that are worth recomputing alone, and those of them together."""
    worth = sorted(
        (name for name in large.children if name in may_recompute and name in small.children),
        key=lambda name: -_freed(large, (name,)),
    )
    least = _LEAST_FREED * sum(large.saved.values())
    worth = [name for name in worth if large.children[name].num_calls == 1 and _freed(large, (name,)) > least]
    parts = []
    for names in (c for count in (1, 2, 3) for c in combinations(worth[:_MOST_CHILDREN], count)):
        seconds = [sum(stretch.children[name].recompute_seconds for name in names) for stretch in (small, large)]
        line = Line.through((sizes[0], seconds[0]), (sizes[1], seconds[1]))
        in_order = tuple(name for name in large.children if name in names)
        parts.append(Part(in_order, tuple(sorted(_held_without(small, names))), line))
    return tuple(parts)


def _but_kept(small: _Stretch, large: _Stretch, sizes: Sequence[int], may_recompute: Collection[str]) -> Iterator[Part]:
    """All of a block but the operations that a word of ``Plan.keep`` keeps, where that frees bytes and saves time."""
    if large.name is None or large.name not in may_recompute:
        return
    for word, made in large.made.items():
        held = {**large.inputs, **made}
        seconds = [max(0.0, s.recompute_seconds - s.made_seconds.get(word, 0.0)) for s in (small, large)]
        freed = sum(large.saved.values()) - sum(held.values())
        if (
            freed > _LEAST_FREED * sum(large.saved.values())
            and seconds[1] < (1 - _LEAST_SPARED) * large.recompute_seconds
        ):
            line = Line.through((sizes[0], seconds[0]), (sizes[1], seconds[1]))
            yield Part((large.name,), tuple(sorted(held)), line, word)


def _held_without(stretch: _Stretch, names: Collection[str]) -> set[int]:
    """Storages that a block holds when these children of it are recomputed."""
    kept = {index for name, child in stretch.children.items() if name not in names for index in child.saved}
    return kept | {index for name in names for index in stretch.children[name].inputs}


def _freed(stretch: _Stretch, names: Collection[str]) -> int:
    """Bytes that recomputing these children frees."""
    sizes = {**stretch.saved, **{i: size for name in names for i, size in stretch.children[name].inputs.items()}}
    held = sum(sizes[index] for index in _held_without(stretch, names))
    return sum(stretch.saved.values()) - held


def _storages(both: Sequence[Sequence[_Stretch]], sizes: Sequence[int]) -> tuple[Line, ...]:
    found: list[dict[int, int]] = []
    for stretches in both:
        num_bytes: dict[int, int] = {}
        for stretch in stretches:
            inputs = [item for child in stretch.children.values() for item in child.inputs.items()]
            made = [item for sizes_made in stretch.made.values() for item in sizes_made.items()]
            for index, size in (*stretch.saved.items(), *stretch.inputs.items(), *inputs, *made):
                num_bytes[index] = max(size, num_bytes.get(index, 0))
        found.append(num_bytes)
    # One that only a module outside of all blocks was given is nobody's, and has no bytes.
    count = max(found[0], default=-1) + 1
    return tuple(
        Line.through((sizes[0], found[0].get(index, 0)), (sizes[1], found[1].get(index, 0))) for index in range(count)
    )


class SlotSeconds(NamedTuple):
    """Seconds of one slot: of its forward, of it up to the last save, and of each module in it up to its last save."""

    forward: float
    recompute: float
    children: dict[str, float]


def seconds_of_slots(micro_batch: MicroBatch, blocks: Collection[str]) -> list[SlotSeconds]:
    """What was timed in each slot; where nothing was saved, all of the forward counts."""
    return [
        SlotSeconds(
            stretch.seconds,
            stretch.recompute_seconds or stretch.seconds,
            {name: child.recompute_seconds or child.seconds for name, child in stretch.children.items()},
        )
        for stretch in _stretches(micro_batch, blocks)
    ]
