"""Made-up profiles for the search, the plain way to count their peaks, and all that can be chosen from."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from bigbatch.planning.costs import Line, MemoryProfile, Part, Slot


class Maker:
    """Adds slots and storages one after the other; bytes are whole numbers, so that sums are exact."""

    def __init__(self, seed: int = 0):
        self.random = random.Random(seed)
        self.storages: list[Line] = []
        self.slots: list[Slot] = []

    def storage(self, per_sample: int, fixed: int = 0) -> int:
        self.storages.append(Line(fixed, per_sample))
        return len(self.storages) - 1

    def line(self, most: int) -> Line:
        return Line(self.random.randrange(most // 4 + 1), self.random.randrange(most + 1))

    def bytes_of(self, storages: tuple[int, ...]) -> Line:
        lines = [self.storages[storage] for storage in set(storages)]
        return Line(sum(line.fixed for line in lines), sum(line.per_sample for line in lines))

    def profile(self, **changes) -> MemoryProfile:
        forward = sum(slot.forward_seconds.at(1) for slot in self.slots)
        values: dict = {
            "parameter_bytes": 5000,
            "gradient_bytes": 3000,
            "optimizer_bytes": 4000,
            "update_bytes": 700,
            "batch": Line(0, 50),
            "storages": tuple(self.storages),
            "slots": tuple(self.slots),
            "micro_seconds": ((1, 4 * forward), (2, 6.5 * forward), (5, 15.0 * forward)),
            "update_seconds": 0.25,
        }
        return MemoryProfile(**{**values, **changes})


def random_profile(seed: int, num_blocks: int, **changes) -> MemoryProfile:
    """Unequal blocks with skips, shared storages, glue, blocks that must be kept, and gradients that wait."""
    make = Maker(seed)
    chance = make.random.random
    skip_chance, glue_chance, heavy = chance() * 0.5, chance() * 0.5, make.random.choice(["", "glue", "tail"])
    mask = make.storage(make.random.randrange(60))
    passed = make.storage(make.random.randrange(10, 200))
    make.slots.append(Slot(None, saved=(make.storage(30),), forward=make.line(100), backward=make.line(100)))
    produced = [passed]
    for index in range(num_blocks):
        has_glue = index > 0 and chance() < glue_chance
        if has_glue:
            saved = (passed, make.storage(make.random.randrange(900 if heavy == "glue" else 90), 7))
            make.slots.append(Slot(None, saved=saved, forward=make.line(200), backward=make.line(200)))
        passed = _add_block(make, index, passed, mask, produced, skip_chance, follows=index > 0 and not has_glue)
        produced.append(passed)
    saved = (passed, make.storage(900 if heavy == "tail" else 20))
    make.slots.append(Slot(None, saved=saved, forward=make.line(300), backward=make.line(300)))
    return make.profile(batch_is_whole=chance() < 0.5, workspace=Line(*make.line(40)), **changes)


def _add_block(
    make: Maker, index: int, passed: int, mask: int, produced: list[int], skip_chance: float, *, follows: bool
) -> int:
    chance = make.random.random
    skips = tuple(storage for storage in produced[:-1] if chance() < skip_chance)
    inputs = (passed, *skips, *((mask,) if chance() < 0.5 else ()))
    output = make.storage(make.random.randrange(10, 200), make.random.randrange(20))
    own = tuple(make.storage(make.random.randrange(300), make.random.randrange(30)) for _ in range(3))
    kept = tuple(storage for storage in (*inputs, mask) if chance() < 0.7)
    saved = (*own, *kept, *((output,) if chance() < 0.4 else ()))
    forward, seconds = make.bytes_of((*own, output)), Line(chance() * 1e-3, 0.01 + chance())
    make.slots.append(
        Slot(
            f"blocks.{index}",
            "Block",
            saved=saved,
            inputs=inputs,
            forward=Line(forward.fixed, forward.per_sample + make.random.randrange(100)),
            recompute=forward,
            backward=make.line(400),
            backward_first=Line(make.random.randrange(3000), make.random.randrange(400)),
            pending=make.line(300),
            pending_first=Line(make.random.randrange(2000), make.random.randrange(300)),
            forward_seconds=seconds,
            recompute_seconds=Line(seconds.fixed, seconds.per_sample * (0.5 + 0.5 * chance())),
            may_recompute=chance() < 0.9,
            follows=follows and not skips,
        )
    )
    return output


def equal_blocks(num_blocks: int, num_own: int = 4, **changes) -> MemoryProfile:
    """A transformer: every block is the same, saves much, and hands on little."""
    make = Maker()
    passed = make.storage(100)
    make.slots.append(Slot(None, saved=(make.storage(100),), forward=Line(0, 300), backward=Line(0, 300)))
    for index in range(num_blocks):
        own = tuple(make.storage(240 + 8 * place) for place in range(num_own))
        saved = make.bytes_of(own).per_sample
        make.slots.append(
            Slot(
                f"blocks.{index}",
                "Block",
                saved=(passed, *own),
                inputs=(passed,),
                forward=Line(0, saved + 200),
                recompute=Line(0, saved + 100),
                backward=Line(0, 500),
                backward_first=Line(40 * (num_blocks - index), 500),
                pending=Line(0, 100),
                pending_first=Line(40 * (num_blocks - 1 - index), 100),
                forward_seconds=Line(1e-5, 1e-3),
                recompute_seconds=Line(1e-5, 8e-4),
                may_recompute=True,
                follows=index > 0,
            )
        )
        passed = make.storage(100)
    make.slots.append(Slot(None, saved=(passed, make.storage(600)), forward=Line(0, 900), backward=Line(0, 900)))
    return make.profile(gradient_bytes=40 * num_blocks, **changes)


def unet(depth: int = 4) -> MemoryProfile:
    """An encoder and a decoder: what an encoder block returns is saved by a decoder block much later."""
    make = Maker()
    passed, returned = make.storage(300), []
    make.slots.append(Slot(None, forward=Line(0, 400)))
    sizes = [2400 // 2**level for level in range(depth)]
    for level, size in enumerate([*sizes, *reversed(sizes)]):
        is_down = level < depth
        skip = () if is_down else (returned[2 * depth - 1 - level],)
        output = make.storage(size)
        # What waits while the blocks inside of a skip run backward: gradients of all skips across them.
        waiting = sum(sizes[: level if is_down else 2 * depth - 1 - level])
        make.slots.append(
            Slot(
                f"{'down' if is_down else 'up'}.{level}",
                "Stage",
                saved=(passed, *skip, make.storage(2 * size), make.storage(size)),
                inputs=(passed, *skip),
                forward=Line(0, 4 * size),
                recompute=Line(0, 3 * size),
                backward=Line(0, 2 * size + waiting),
                backward_first=Line(0, 2 * size + waiting),
                pending=Line(0, size + waiting),
                pending_first=Line(0, size + waiting),
                forward_seconds=Line(0, 1 + 0.1 * level),
                recompute_seconds=Line(0, 1 + 0.1 * level),
                may_recompute=True,
            )
        )
        returned.append(output)
        passed = make.storage(size // 4 if is_down else size)
        glue = Slot(None, saved=(output, passed), forward=Line(0, size // 2), backward=Line(0, size + waiting))
        make.slots.append(glue)
    return make.profile()


def with_parts(profile: MemoryProfile, seed: int, most: int = 3) -> MemoryProfile:
    """The same with parts in most blocks: they hold some of what the block saves, and what goes into them.

    That may be a storage that nobody else has, one of the arguments, or one that other slots save too.
    """
    rng = random.Random(seed)
    storages, slots = list(profile.storages), []
    for slot in profile.slots:
        parts = []
        for index in range(rng.randrange(most + 1) if slot.name is not None else 0):
            rest = [storage for storage in slot.saved if rng.random() < 0.6]
            into = rng.choice([*slot.saved[:1], *slot.inputs, len(storages)])
            if into == len(storages):
                storages.append(Line(rng.randrange(20), rng.randrange(80)))
            names = [f"{slot.name}.{index}", *([f"{slot.name}.norm"] if rng.random() < 0.4 else [])]
            seconds = slot.recompute_seconds.per_sample * rng.random()
            parts.append(Part(tuple(names), tuple(dict.fromkeys((*rest, into))), Line(1e-4, seconds)))
        slots.append(dataclasses.replace(slot, parts=tuple(parts)))
    return dataclasses.replace(profile, storages=tuple(storages), slots=tuple(slots))


# ----- the plain way


def reference_peak(profile: MemoryProfile, sizes: list[int], recompute: tuple) -> float:
    """The peak of a step, every micro-batch walked event by event with sets of storages."""
    moments: list[float] = [profile.gradient_bytes + profile.update_bytes]
    for index, size in enumerate(sizes):
        moments += _moments_of_micro_batch(profile, size, recompute, is_first=index == 0)
    batch = profile.batch.at(sum(sizes) if profile.batch_is_whole else max(sizes))
    return profile.resident_bytes + batch + max(moments)


def _moments_of_micro_batch(profile: MemoryProfile, size: int, recompute: tuple, *, is_first: bool) -> Iterator[float]:
    def total(storages: set[int]) -> float:
        return sum(profile.storages[storage].at(size) for storage in storages)

    slots = profile.slots
    names = [slot.name for slot in slots]
    part_at = {position: part for position, slot in enumerate(slots) if (part := _part_in(slot, recompute))}
    groups = [[e] if isinstance(e, str) else list(e) for e in recompute if not isinstance(e, str) or e in names]
    group_at: dict[int, list[int]] = {}
    for group in groups:
        for start in [position for position, name in enumerate(names) if name == group[0]]:
            stop = start
            for name in group[1:]:
                stop = names.index(name, stop + 1)
            group_at[start] = list(range(start, stop + 1))
    later_members = {position for members in group_at.values() for position in members[1:]}
    gradients = 0 if is_first else profile.gradient_bytes
    held: set[int] = set()
    put_by: list[set[int]] = []
    for position, slot in enumerate(slots):
        yield gradients + total(held) + slot.forward.at(size)
        kept = part_at[position].saved if position in part_at else slot.saved
        keeps = set(slot.inputs if position in group_at else () if position in later_members else kept)
        put_by.append(keeps - held)
        held |= keeps
    for position in reversed(range(len(slots))):
        if position in later_members:
            continue
        for members in [group_at[position]] if position in group_at else []:
            last, again = slots[members[-1]], set()
            waiting = (last.pending_first if is_first else last.pending).at(size)
            for member in members:
                work = last.recompute if member == members[-1] else slots[member].forward
                yield gradients + total(held | again) + waiting + work.at(size)
                again |= set(slots[member].saved)
            for member in reversed(members):
                back = slots[member].backward_first if is_first else slots[member].backward
                yield gradients + total(held | again) + back.at(size)
                others = [set(slots[other].saved) for other in members if other < member]
                again = set().union(*others)
        if position not in group_at:
            back = slots[position].backward_first if is_first else slots[position].backward
            yield gradients + total(held | set(slots[position].saved)) + back.at(size)
        held -= put_by[position]


def _part_in(slot: Slot, recompute: tuple) -> Part | None:
    inside = {entry for entry in recompute if isinstance(entry, str) and entry.startswith(f"{slot.name}.")}
    return next((part for part in slot.parts if set(part.names) == inside), None)


def every_choice(profile: MemoryProfile) -> list[tuple]:
    """Everything that ``Plan.recompute`` can be: each block kept, or recomputed alone, in a group or in part."""
    blocks = [slot for slot in profile.slots if slot.name is not None]
    calls = {slot.name: [other for other in blocks if other.name == slot.name] for slot in blocks}
    grown: list[tuple[tuple[str, ...], ...]] = [()]
    for name, (first, *others) in calls.items():
        part_names = [part.names for part in first.parts]
        names = [found for found in part_names if all(found in [p.names for p in other.parts] for other in others)]
        before = blocks[blocks.index(first) - 1].name
        can_join = first.follows and not others and len(calls[before]) == 1
        following: dict[tuple, None] = {}
        for choice in grown:
            following[choice] = None
            following |= {(*choice, ("part of", *found)): None for found in names}
            if all(other.may_recompute for other in (first, *others)):
                following[(*choice, (name,))] = None
                if can_join and choice and choice[-1][-1] == before:
                    following[(*choice[:-1], (*choice[-1], name))] = None
        grown = list(following)
    return [tuple(entry for group in choice for entry in _entries(group)) for choice in grown]


def _entries(group: tuple[str, ...]) -> list:
    if group[0] == "part of":
        return list(group[1:])
    return [group[0] if len(group) == 1 else group]
