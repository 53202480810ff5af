"""Names of modules as ``Plan.recompute`` has them, and the segments of a chain that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bigbatch.errors import OptionError
from bigbatch.planning.chain import WHOLE, Chain, Segment
from bigbatch.units import format_names

Entry = str | tuple[str, ...]


def names_of(chain: Chain, segments: Iterable[Segment]) -> tuple[Entry, ...]:
    """Segments as ``Plan.recompute`` has them: a part is one entry for each of its modules."""
    entries: dict[Entry, None] = {}
    for first, last, part in sorted(segments):
        if part != WHOLE:
            entries |= dict.fromkeys(chain.slots[first].parts[part].names)
            continue
        names = tuple(slot.name for slot in chain.slots[first : last + 1] if slot.name is not None)
        entries[names[0] if len(names) == 1 else names] = None
    return tuple(entries)


def keep_of(chain: Chain, segments: Iterable[Segment]) -> tuple[tuple[str, str], ...]:
    """What of them is kept, as ``Plan.keep`` has it."""
    parts = [chain.slots[first].parts[part] for first, _, part in sorted(segments) if part != WHOLE]
    return tuple(dict.fromkeys((name, part.keep) for part in parts if part.keep for name in part.names))


def entries_of(chain: Chain, segments: Iterable[Segment]) -> list[list[Segment]]:
    """Segments that stand and fall together: those of all calls of a module."""
    entries: dict[tuple[Entry, ...], list[Segment]] = {}
    for segment in segments:
        entries.setdefault(names_of(chain, [segment]), []).append(segment)
    return list(entries.values())


def segments_of(chain: Chain, recompute: Sequence[Entry], keep: Iterable[tuple[str, str]] = ()) -> tuple[Segment, ...]:
    """The segments that entries of ``Plan.recompute`` stand for.

    Args:
        recompute: Names of blocks, of parts of blocks, and groups of neighbours.
        keep: As in ``Plan.keep``; what the profile does not know the costs of is taken as recomputed in full.

    Raises:
        OptionError: A name is neither a block nor a part of one, stands twice, a group is not of neighbours, or names
            inside a block are none of its parts.
    """
    entries = [[entry] if isinstance(entry, str) else list(entry) for entry in recompute]
    names = [name for entry in entries for name in entry]
    block_of = _blocks_of_parts(chain)
    if strangers := [name for name in names if name not in chain.calls and name not in block_of]:
        raise _unknown(chain, strangers, block_of)
    if not all(entries):
        raise OptionError("recompute has an empty group. Name the modules of each group.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"recompute names {format_names(twice)} twice. Name each module once.")
    segments, inside, kept = [], dict[str, list[str]](), dict(keep)
    for entry in entries:
        parts = [name for name in entry if name not in chain.calls]
        if parts and len(entry) > 1:
            raise OptionError(
                f"recompute has the group {tuple(entry)}, but {format_names(parts)} are parts of blocks, which are not "
                f"recomputed in groups. Name each of them alone."
            )
        if parts:
            inside.setdefault(block_of[entry[0]], []).extend(parts)
        elif (word := kept.get(entry[0])) and (but_kept := _segments_but_kept(chain, entry[0], word)):
            segments += but_kept
        else:
            segments += _segments_of_blocks(chain, entry)
    for block, parts in inside.items():
        segments += _segments_of_part(chain, block, parts, is_whole=block in names)
    return tuple(sorted(segments))


def _blocks_of_parts(chain: Chain) -> dict[str, str]:
    """By module inside a block that may be recomputed alone: its block."""
    return {
        name: slot.name
        for slot, choices in zip(chain.slots, chain.choices, strict=True)
        for segment in choices
        if segment.part != WHOLE and slot.name is not None and not slot.parts[segment.part].keep
        for name in slot.parts[segment.part].names
    }


def _unknown(chain: Chain, strangers: list[str], block_of: dict[str, str]) -> OptionError:
    within = {block for block in chain.calls for name in strangers if name.startswith(f"{block}.")}
    parts = [name for name, block in block_of.items() if block in within]
    known = f" Inside of {format_names(sorted(within))} it knows {format_names(parts, most=8)}." if parts else ""
    return OptionError(
        f"recompute names {format_names(strangers)}, which the profile has no block for. "
        f"Its blocks are {format_names(list(chain.calls), most=8)}.{known}"
    )


def _segments_of_blocks(chain: Chain, entry: list[str]) -> list[Segment]:
    blocks = [position for position, slot in enumerate(chain.slots) if slot.name is not None]
    segments = []
    for call in chain.calls[entry[0]]:
        start = blocks.index(call)
        members = blocks[start : start + len(entry)]
        if [chain.slots[member].name for member in members] != entry:
            raise OptionError(
                f"recompute has the group {tuple(entry)}, but these are no neighbours in the order they run. "
                f"Name neighbours in their order, or each of them alone."
            )
        segments.append(Segment(members[0], members[-1]))
    return segments


def _segments_but_kept(chain: Chain, block: str, word: str) -> list[Segment]:
    return [
        segment
        for call in chain.calls[block]
        for segment in chain.choices[call]
        if segment.part != WHOLE and chain.slots[call].parts[segment.part].keep == word
    ]


def _segments_of_part(chain: Chain, block: str, names: list[str], *, is_whole: bool) -> list[Segment]:
    if is_whole:
        raise OptionError(
            f"recompute names {block!r} and {format_names(names)} inside of it. Name the block, or only what is inside."
        )
    found, known = [], dict[tuple[str, ...], None]()
    for call in chain.calls[block]:
        for segment in chain.choices[call]:
            if segment.part != WHOLE and not chain.slots[call].parts[segment.part].keep:
                part = chain.slots[call].parts[segment.part].names
                known[part] = None
                found += [segment] if set(part) == set(names) else []
    if not found:
        texts = [" with ".join(map(repr, part)) for part in known]
        raise OptionError(
            f"recompute names {format_names(names)} inside of {block!r}, of which the profile knows what these cost: "
            f"{'; '.join(texts)}. Name all modules of one of them, or {block!r}."
        )
    return found
