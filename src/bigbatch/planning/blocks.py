"""Which modules are the blocks of a model: neither the whole of it, nor single operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bigbatch.memory.events import Event

_LARGE_PART = 0.35
"""A module that saves more of the model than this is opened, because recomputing it would save too much at once."""
_MOST_IN_PARTS = 0.5
"""Opened, a module must have this much of what it saves in its parts."""


@dataclass(frozen=True)
class Node:
    """A module, without the module.

    Attributes:
        kind: Its class.
        children: Names of its children.
        is_list: An ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``.
    """

    kind: str
    children: tuple[str, ...] = ()
    is_list: bool = False


def find_blocks(tree: Mapping[str, Node], forward: Sequence[Event], wanted: Collection[str] = ()) -> list[str]:
    """Names of the blocks, none inside another: the entries of lists of modules, or the large parts of others.

    Args:
        tree: All modules by name; ``""`` is the model.
        forward: Events of one forward.
        wanted: Modules that are blocks in any case.
    """
    found = [name for name in _Finder(tree, forward).open("") if not any(_overlap(name, other) for other in wanted)]
    return [*found, *(name for name in wanted if name in tree)]


def _overlap(name: str, other: str) -> bool:
    """Whether one is the other or inside it."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


class _Finder:
    def __init__(self, tree: Mapping[str, Node], forward: Sequence[Event]):
        self._tree = tree
        self._calls = Counter(event.what for event in forward if event.kind == "enter")
        self._saved: Counter[str] = Counter()
        path: list[str] = []
        seen: set[int] = set()
        for event in forward:
            if event.kind == "enter":
                path.append(event.what)
            elif event.kind == "exit" and path:
                path.pop()
            elif event.kind == "save":
                fresh = sum(storage.num_bytes for storage in event.storages if storage.number not in seen)
                seen.update(storage.number for storage in event.storages)
                self._saved.update(dict.fromkeys({"", *(owner for name in path for owner in _owners(name))}, fresh))

    def open(self, name: str) -> list[str]:
        """The blocks in a module, in the order of its children."""
        return [block for child in self._tree[name].children for block in self._blocks_at(child)]

    def _blocks_at(self, name: str) -> list[str]:
        node = self._tree[name]
        is_called = self._calls[name] > 0
        if not self._saved[name] or (self._calls[name] > 1 and not node.children):
            return []
        if node.is_list and (not is_called or self._has_larger_parts(node)):
            return self.open(name)
        if self._saved[name] > _LARGE_PART * self._saved[""] or not is_called:
            inside = self.open(name)
            covered = sum(self._saved[block] for block in inside)
            if len(inside) > 1 and covered >= _MOST_IN_PARTS * self._saved[name]:
                return inside
        return [name] if is_called else []

    def _has_larger_parts(self, node: Node) -> bool:
        """Whether a list is one of blocks, and not of single operations."""
        return any(self._tree[child].children for child in node.children if self._calls[child])


def _owners(name: str) -> Iterator[str]:
    """A module and all that it is in, also lists that are never called themselves."""
    while name:
        yield name
        name = name.rpartition(".")[0]
