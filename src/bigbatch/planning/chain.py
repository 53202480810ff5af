"""The slots of a profile as a chain: which share storages, which may be recomputed together. Holds for every size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bigbatch.planning.costs import Line, MemoryProfile, Slot

WHOLE = -1

MAX_GROUP = 32
"""Members of a group that a search forms. The best groups of n equal blocks have about sqrt(n); this keeps its time
linear in the depth of a model."""


class Segment(NamedTuple):
    """What is recomputed as one: a block, a group of neighbours, or a part of a block.

    Attributes:
        first: Its first slot.
        last: Its last slot; the first one for a block alone.
        part: Which of ``Slot.parts`` of that slot; ``WHOLE`` when the rest of it is recomputed too.
    """

    first: int
    last: int
    part: int = WHOLE


class Chain:
    """What a choice of recomputed blocks means for the slots.

    Walking along the slots, all that later slots need to know of earlier ones is how many bytes are held, and which of
    the storages that later slots save too: these have a bit each, so that a set of them is one number, the *key*.
    Modules that are called several times have bits too, one for each way to recompute them: it says that the first
    call is recomputed so.

    Attributes:
        slots: Of the profile.
        saved_own: By slot, bytes of the storages that it saves and no other slot names, as lines that add up.
        inputs_own: By slot, of such storages of its arguments.
        again_own: By slot, of the saved ones those that are no arguments.
        parts_own: By slot and part, of such storages that are held when the part is recomputed.
        parts_again_own: By slot and part, of the saved ones those that are not held then.
        written: By slot, bytes that recompute of it writes, about.
        parts_written: By slot and part, the same of the part.
        saved_bits: By slot, the shared storages that it saves.
        inputs_bits: By slot, the shared storages of its arguments.
        parts_bits: By slot and part, the shared storages that are held when the part is recomputed.
        alive_bits: By slot, the bits that it or a later slot asks for.
        repeat_bits: By slot, the bits of a module with several slots, by part; empty for others.
        line_of: Bytes of the shared storage of each bit.
        ends: By slot, where a segment that begins with it may end; empty when it may not be recomputed.
        choices: By slot, the segments that may begin with it: whole blocks to each of the ends, then parts.
    """

    def __init__(self, profile: MemoryProfile):
        self.slots: Sequence[Slot] = profile.slots
        self.calls: dict[str, list[int]] = {}
        for position, slot in enumerate(self.slots):
            if slot.name is not None:
                self.calls.setdefault(slot.name, []).append(position)
        bits = self._bits_of_shared()
        self.line_of = {bit: profile.storages[storage] for storage, bit in bits.items()}

        def own(storages: Iterable[int]) -> tuple[Line, ...]:
            return _merged(profile.storages[storage] for storage in dict.fromkeys(storages) if storage not in bits)

        def of(storages: Iterable[int]) -> int:
            return sum(bits[storage] for storage in set(storages) if storage in bits)

        slots = self.slots
        self.saved_own = [own(slot.saved) for slot in slots]
        self.inputs_own = [own(slot.inputs) for slot in slots]
        self.again_own = [own(s for s in slot.saved if s not in slot.inputs) for slot in slots]
        self.parts_own = [[own(part.saved) for part in slot.parts] for slot in slots]
        self.parts_again_own = [
            [own(s for s in slot.saved if s not in part.saved) for part in slot.parts] for slot in slots
        ]
        lines = profile.storages
        self.written = [_total(lines[storage] for storage in slot.saved) for slot in slots]
        self.parts_written = [
            [_total(lines[s] for s in slot.saved if s not in part.saved) for part in slot.parts] for slot in slots
        ]
        self.saved_bits = [of(slot.saved) for slot in slots]
        self.inputs_bits = [of(slot.inputs) for slot in slots]
        self.parts_bits = [[of(part.saved) for part in slot.parts] for slot in slots]
        self.ends = [self._ends_from(position) for position in range(len(slots))]
        self.choices = self._choices()
        self.repeat_bits = self._repeat_bits(first=len(bits))
        self.alive_bits = self._alive_bits()

    def _bits_of_shared(self) -> dict[int, int]:
        users: dict[int, int] = {}
        for slot in self.slots:
            for storage in {*slot.saved, *slot.inputs, *(held for part in slot.parts for held in part.saved)}:
                users[storage] = users.get(storage, 0) + 1
        shared = [storage for storage, count in users.items() if count > 1]
        return {storage: 1 << position for position, storage in enumerate(shared)}

    def _choices(self) -> list[tuple[Segment, ...]]:
        owners: dict[str, set[str | None]] = {name: {None} for name in self.calls}
        for slot in self.slots:
            for name in {name for part in slot.parts if not part.keep for name in part.names}:
                owners.setdefault(name, set()).add(slot.name)
        # A module that is in several blocks is recomputed in all of them or in none: such a part is not offered.
        alone = {name for name, found in owners.items() if len(found) == 1}
        ways = [{p.way for p in slot.parts if p.keep or alone.issuperset(p.names)} for slot in self.slots]
        found = []
        for position, ends in enumerate(self.ends):
            slot = self.slots[position]
            in_all = set[frozenset[str]]()
            if slot.name is not None:
                in_all = set.intersection(*(ways[call] for call in self.calls[slot.name]))
            parts = [index for index, part in enumerate(slot.parts) if part.way in in_all]
            whole = [Segment(position, end) for end in ends]
            found.append((*whole, *(Segment(position, position, part) for part in parts)))
        return found

    def _repeat_bits(self, first: int) -> list[dict[int, int]]:
        bits: dict[tuple[str, frozenset[str]], int] = {}
        found = []
        for position, slot in enumerate(self.slots):
            own: dict[int, int] = {}
            for segment in self.choices[position] if slot.name and len(self.calls[slot.name]) > 1 else ():
                part = frozenset() if segment.part == WHOLE else slot.parts[segment.part].way
                own[segment.part] = bits.setdefault((slot.name or "", part), 1 << (first + len(bits)))
            found.append(own)
        return found

    def _alive_bits(self) -> list[int]:
        alive = [0] * (len(self.slots) + 1)
        for position in reversed(range(len(self.slots))):
            alive[position] = alive[position + 1] | self.saved_bits[position] | self.inputs_bits[position]
            for bits in (*self.parts_bits[position], *self.repeat_bits[position].values()):
                alive[position] |= bits
        return alive

    def _ends_from(self, start: int) -> tuple[int, ...]:
        if not self.may_recompute(start):
            return ()
        ends = [start]
        # A module with several calls is not put into a group: its neighbours would have to be the same in all of them.
        following = None if self._is_repeated(start) else self._following(start)
        while following is not None and len(ends) < MAX_GROUP:
            ends.append(following)
            following = self._following(following)
        return tuple(ends)

    def _is_repeated(self, position: int) -> bool:
        return len(self.calls[self.slots[position].name or ""]) > 1

    def may_recompute(self, position: int) -> bool:
        """Whether the slot is a block of which all calls may be recomputed."""
        name = self.slots[position].name
        return name is not None and all(self.slots[call].may_recompute for call in self.calls[name])

    def _following(self, position: int) -> int | None:
        """The block that may join a segment behind this one, if there is one."""
        for after in range(position + 1, len(self.slots)):
            slot = self.slots[after]
            if slot.name is not None:
                joins = slot.follows and self.may_recompute(after) and not self._is_repeated(after)
                return after if joins else None
            if slot.saved:
                return None
        return None

    def every_block(self) -> tuple[Segment, ...]:
        """Each block that may be recomputed, alone."""
        return tuple(Segment(position, position) for position, ends in enumerate(self.ends) if ends)

    def held_bits(self, segment: Segment) -> int:
        """The shared storages that are held when this is recomputed."""
        first, _, part = segment
        return self.inputs_bits[first] if part == WHOLE else self.parts_bits[first][part]

    def is_open(self, segment: Segment, key: int) -> bool:
        """Whether the first call of the module was recomputed as this one would be."""
        bit = self.repeat_bits[segment.first].get(segment.part)
        return bit is None or bool(key & bit) or self.calls[self.slots[segment.first].name or ""][0] == segment.first

    def after(self, segment: Segment) -> int:
        """The bits that this adds to the key: shared storages, and how the first call of a module is recomputed."""
        return self.held_bits(segment) | self.repeat_bits[segment.first].get(segment.part, 0)

    def must_recompute(self, slot: int, key: int) -> bool:
        """Whether the first call of the module was recomputed, so that this one is not kept."""
        return any(key & bit for bit in self.repeat_bits[slot].values())


def _merged(lines: Iterable[Line]) -> tuple[Line, ...]:
    """As few lines as give the same bytes: those of whole numbers are one, others are rounded each for itself."""
    whole, others = [], []
    for line in lines:
        is_whole = all(value >= 0 and float(value).is_integer() for value in line)
        (whole if is_whole else others).append(line)
    return (*([_total(whole)] if whole else []), *others)


def _total(lines: Iterable[Line]) -> Line:
    fixed, per_sample = 0.0, 0.0
    for line in lines:
        fixed, per_sample = fixed + line.fixed, per_sample + line.per_sample
    return Line(fixed, per_sample)
