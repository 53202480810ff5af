"""The slots of a profile as a chain: which share storages, which may be recomputed together. Holds for every size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bigbatch.errors import OptionError
from bigbatch.planning.costs import MemoryProfile, Slot
from bigbatch.units import format_names

Segment = tuple[int, int]
"""First and last slot of what is recomputed as one; the same slot twice for a block alone."""

MAX_GROUP = 32
"""Members of a group that a search forms. The best groups of n equal blocks have about sqrt(n); this keeps its time
linear in the depth of a model."""


class Chain:
    """What a choice of recomputed blocks means for the slots.

    Walking along the slots, all that later slots need to know of earlier ones is how many bytes are held, and which of
    the storages that later slots save too: these have a bit each, so that a set of them is one number, the *key*.
    Modules that are called several times have a bit too: it says that the first call is recomputed.

    Attributes:
        slots: Of the profile.
        saved_own: By slot, storages that it saves and no other slot names.
        inputs_own: By slot, such storages of its arguments.
        again_own: By slot, of the saved ones those that are no arguments.
        saved_bits: By slot, the shared storages that it saves.
        inputs_bits: By slot, the shared storages of its arguments.
        alive_bits: By slot, the bits that it or a later slot asks for.
        repeat_bit: By slot, the bit of a module with several slots; 0 for others.
        storage_of: Shared storage of each bit.
        ends: By slot, where a segment that begins with it may end; empty when it may not be recomputed.
    """

    def __init__(self, profile: MemoryProfile):
        self.slots: Sequence[Slot] = profile.slots
        users: dict[int, int] = {}
        for slot in self.slots:
            for storage in {*slot.saved, *slot.inputs}:
                users[storage] = users.get(storage, 0) + 1
        shared = [storage for storage, count in users.items() if count > 1]
        bits = {storage: 1 << position for position, storage in enumerate(shared)}
        self.storage_of = dict(zip(bits.values(), bits, strict=True))

        def own(storages: Iterable[int]) -> tuple[int, ...]:
            return tuple(storage for storage in dict.fromkeys(storages) if storage not in bits)

        def of(storages: Iterable[int]) -> int:
            return sum(bits[storage] for storage in set(storages) if storage in bits)

        self.saved_own = [own(slot.saved) for slot in self.slots]
        self.inputs_own = [own(slot.inputs) for slot in self.slots]
        self.again_own = [own(s for s in slot.saved if s not in slot.inputs) for slot in self.slots]
        self.saved_bits = [of(slot.saved) for slot in self.slots]
        self.inputs_bits = [of(slot.inputs) for slot in self.slots]
        self.calls: dict[str, list[int]] = {}
        for position, slot in enumerate(self.slots):
            if slot.name is not None:
                self.calls.setdefault(slot.name, []).append(position)
        self.repeat_bit = self._repeat_bits(first=len(shared))
        self.alive_bits = self._alive_bits()
        self.ends = [self._ends_from(position) for position in range(len(self.slots))]

    def _repeat_bits(self, first: int) -> list[int]:
        repeated = [name for name, calls in self.calls.items() if len(calls) > 1]
        bits = {name: 1 << (first + position) for position, name in enumerate(repeated)}
        return [bits.get(slot.name or "", 0) for slot in self.slots]

    def _alive_bits(self) -> list[int]:
        alive = [0] * (len(self.slots) + 1)
        for position in reversed(range(len(self.slots))):
            asked = self.saved_bits[position] | self.inputs_bits[position] | self.repeat_bit[position]
            alive[position] = alive[position + 1] | asked
        return alive

    def _ends_from(self, start: int) -> tuple[int, ...]:
        if not self.may_recompute(start):
            return ()
        ends = [start]
        # A module with several calls is not put into a group: its neighbours would have to be the same in all of them.
        following = None if self.repeat_bit[start] else self._following(start)
        while following is not None and len(ends) < MAX_GROUP:
            ends.append(following)
            following = self._following(following)
        return tuple(ends)

    def may_recompute(self, position: int) -> bool:
        """Whether the slot is a block of which all calls may be recomputed."""
        name = self.slots[position].name
        return name is not None and all(self.slots[call].may_recompute for call in self.calls[name])

    def _following(self, position: int) -> int | None:
        """The block that may join a segment behind this one, if there is one."""
        for after in range(position + 1, len(self.slots)):
            slot = self.slots[after]
            if slot.name is not None:
                joins = slot.follows and self.may_recompute(after) and not self.repeat_bit[after]
                return after if joins else None
            if slot.saved:
                return None
        return None

    def every_block(self) -> tuple[Segment, ...]:
        """Each block that may be recomputed, alone."""
        return tuple((position, position) for position, ends in enumerate(self.ends) if ends)

    def entries_of(self, segments: Iterable[Segment]) -> list[list[Segment]]:
        """Segments that stand and fall together: those of all calls of a module."""
        entries: dict[str | tuple[str, ...], list[Segment]] = {}
        for segment in segments:
            entries.setdefault(self.names_of([segment])[0], []).append(segment)
        return list(entries.values())

    def names_of(self, segments: Iterable[Segment]) -> tuple[str | tuple[str, ...], ...]:
        """Segments as ``Plan.recompute`` has them."""
        entries: dict[str | tuple[str, ...], None] = {}
        for first, last in sorted(segments):
            names = tuple(slot.name for slot in self.slots[first : last + 1] if slot.name is not None)
            entries[names[0] if len(names) == 1 else names] = None
        return tuple(entries)

    def segments_of(self, recompute: Sequence[str | tuple[str, ...]]) -> tuple[Segment, ...]:
        """The segments that entries of ``Plan.recompute`` stand for.

        Raises:
            OptionError: A name is no block, stands twice, or a group is not of neighbours.
        """
        entries = [[entry] if isinstance(entry, str) else list(entry) for entry in recompute]
        names = [name for entry in entries for name in entry]
        if strangers := [name for name in names if name not in self.calls]:
            raise OptionError(
                f"recompute names {format_names(strangers)}, which the profile has no block for. "
                f"Its blocks are {format_names(list(self.calls), most=8)}."
            )
        if not all(entries):
            raise OptionError("recompute has an empty group. Name the modules of each group.")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise OptionError(f"recompute names {format_names(twice)} twice. Name each module once.")
        return tuple(sorted(segment for entry in entries for segment in self._segments_of_entry(entry)))

    def _segments_of_entry(self, entry: list[str]) -> list[Segment]:
        blocks = [position for position, slot in enumerate(self.slots) if slot.name is not None]
        segments = []
        for call in self.calls[entry[0]]:
            start = blocks.index(call)
            members = blocks[start : start + len(entry)]
            if [self.slots[member].name for member in members] != entry:
                raise OptionError(
                    f"recompute has the group {tuple(entry)}, but these are no neighbours in the order they run. "
                    f"Name neighbours in their order, or each of them alone."
                )
            segments.append((members[0], members[-1]))
        return segments
