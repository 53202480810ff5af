"""Checks of what a plan says of recomputed modules: their names, what is kept of them, and where their inputs lie."""

from __future__ import annotations

from typing import Any

from bigbatch.errors import OptionError


def check_choice(name: str, found: object, choices: tuple[str, ...]) -> None:
    """Raise ``OptionError`` unless ``found`` is one of the words."""
    if not isinstance(found, str) or found not in choices:
        raise OptionError(f"{name}={found!r}; it is one of {', '.join(map(repr, choices))}.")


def check_recompute(recompute: Any) -> None:
    """Raise ``OptionError`` unless it holds names and groups of names."""
    listed = isinstance(recompute, tuple | list)
    if not listed or not all(_is_name_or_group(entry) for entry in recompute):
        raise OptionError(
            f"recompute={recompute!r}; it holds names of modules and tuples of such names: "
            f'recompute=("blocks.0", ("blocks.1", "blocks.2")).'
        )


def check_keep(keep: Any, recompute: tuple[str | tuple[str, ...], ...]) -> None:
    """Raise ``OptionError`` unless it holds pairs of a recomputed module and of what is kept of it."""
    pairs = isinstance(keep, tuple | list) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in keep)
    if not pairs or not all(isinstance(word, str) for pair in keep for word in pair):
        raise OptionError(f'keep={keep!r}; it holds pairs of a name and a word: keep=(("blocks.0", "attention"),).')
    for name, kept in keep:
        check_choice(f"keep[{name!r}]", kept, ("attention", "matmul"))
        if name not in recompute:
            groups = [entry for entry in recompute if name in entry and not isinstance(entry, str)]
            raise OptionError(
                f"keep names {name!r}, which is recomputed in the group {groups[0]!r}; of a group nothing is kept. "
                f"Write its names one by one in recompute=, or leave {name!r} out of keep=."
                if groups
                else f"keep names {name!r}, which is not recomputed, so all of it is kept anyway. Write {name!r} in "
                f"recompute= too, or leave it out of keep=."
            )
    if len({name for name, _ in keep}) < len(keep):
        raise OptionError(f'keep={keep!r} names a module twice; "matmul" keeps attention too: name each once.')


def check_offload(offload: Any, recompute: tuple[str | tuple[str, ...], ...]) -> None:
    """Raise ``OptionError`` unless it holds recomputed modules, of groups the first."""
    if not isinstance(offload, tuple | list) or not all(isinstance(name, str) for name in offload):
        raise OptionError(f'offload={offload!r}; it holds names of recomputed modules: offload=("blocks.0",).')
    groups = [entry for entry in recompute if not isinstance(entry, str) and entry]
    for name in offload:
        if name in recompute or any(name == group[0] for group in groups):
            continue
        inside = [group for group in groups if name in group]
        raise OptionError(
            f"offload names {name!r}, which is not the first of its group {inside[0]!r}: only the input of the group "
            f"is kept. Write {inside[0][0]!r}."
            if inside
            else f"offload names {name!r}, which is not recomputed, and what it saves stays where it is. Write "
            f"{name!r} in recompute= too, or leave it out of offload=."
        )


def _is_name_or_group(entry: object) -> bool:
    return isinstance(entry, str) or (isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry))
