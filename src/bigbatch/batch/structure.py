"""Containers of a batch: what they hold, by dotted path, and how to make the same container with other contents."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

UNSET = object()
"""In the place of a field of a dataclass that was never set."""

_PLAIN = (str, bytes, int, float, complex, range, type, torch.nn.Module, torch.dtype, torch.device)


def is_array(value: object) -> bool:
    """Whether it is a tensor or a NumPy array, the things that have a dimension of samples."""
    if isinstance(value, torch.Tensor):
        return True
    numpy = sys.modules.get("numpy")  # not imported for this: a batch that holds an array has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def children(value: Any) -> list[tuple[str, Any]] | None:
    """Name and content of each thing that a container holds, or None for a leaf.

    A list or tuple is a container when a tensor is somewhere inside (``DataLoader`` gives ``[x, y]``); otherwise it
    is a leaf, as a list of N strings is.
    """
    if isinstance(value, Mapping):
        return [(str(key), inner) for key, inner in value.items()]
    if isinstance(value, PackedSequence):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, list | tuple):
        return [(str(i), inner) for i, inner in enumerate(value)] if holds_arrays(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(spec.name, getattr(value, spec.name, UNSET)) for spec in dataclasses.fields(value)]
    return None


def beside(value: Any) -> dict[str, Any]:
    """Attributes of a container that are not its contents, and hold tensors all the same."""
    own = set() if isinstance(value, Mapping) else {name for name, _ in children(value) or ()}
    if isinstance(value, UserDict):
        own.add("data")
    contents = [id(inner) for _, inner in children(value) or ()]
    attributes = getattr(value, "__dict__", {})
    return {name: v for name, v in attributes.items() if name not in own and id(v) not in contents and hides_arrays(v)}


def holds_arrays(value: Any) -> bool:
    """Whether a tensor or an array is it, or is somewhere inside."""
    if is_array(value) or isinstance(value, PackedSequence):
        return True
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return any(holds_arrays(inner) for inner in value)
    return any(holds_arrays(inner) for _, inner in children(value) or ())


def hides_arrays(value: Any, depth: int = 4) -> bool:
    """Whether a tensor is inside an object that is no container here: among its attributes, or in a set or deque."""
    if holds_arrays(value):
        return True
    if depth == 0 or value is None or isinstance(value, _PLAIN):
        return False
    slots = [getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    inside = [*getattr(value, "__dict__", {}).values(), *slots, *(value if isinstance(value, Collection) else ())]
    return any(hides_arrays(inner, depth - 1) for inner in inside)


def rebuilt(value: Any, contents: Sequence[Any]) -> Any:
    """A container of the same type as ``value`` with other ``contents``, in the order of ``children``."""
    if type(value) in (tuple, list):  # the most frequent ones, before any look at abstract classes
        return type(value)(contents)
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, contents)
    if isinstance(value, tuple):
        # Of a namedtuple, _make: its constructor may take something else than the fields.
        return value._make(contents) if hasattr(value, "_fields") else type(value)(contents)  # pyright: ignore
    if isinstance(value, list):
        if type(value) is list:
            return list(contents)
        new = copy.copy(value)
        new[:] = contents
        return new
    # Not dataclasses.replace: it calls __init__, which fails on fields with init=False and repeats __post_init__.
    new = copy.copy(value)
    for spec, inner in zip(dataclasses.fields(value), contents, strict=True):
        object.__setattr__(new, spec.name, inner)
    return new


def _rebuilt_mapping(value: Mapping[Any, Any], contents: Sequence[Any]) -> Any:
    items = dict(zip(value, contents, strict=True))
    if type(value) is dict:
        return items
    if isinstance(value, dict) and not dataclasses.is_dataclass(value):
        new = copy.copy(value)  # keeps what a subclass carries, such as the factory of a defaultdict
        new.update(items)
        return new
    return type(value)(**items) if dataclasses.is_dataclass(value) else type(value)(items)  # pyright: ignore


def leaves(value: Any) -> Iterator[Any]:
    """Everything in it that is no container."""
    inside = children(value)
    if inside is None:
        yield value
    for _, inner in inside or ():
        yield from leaves(inner)


def mapped(function: Any, value: Any) -> Any:
    """The same nesting with ``function`` applied to each leaf."""
    inside = children(value)
    if inside is None:
        return function(value)
    return rebuilt(value, [mapped(function, inner) for _, inner in inside])


def joined(path: str, name: str) -> str:
    """The dotted path of what is called ``name`` inside ``path``."""
    return f"{path}.{name}" if path else name


def shapes_in(value: Any) -> tuple[tuple[int, ...] | None, ...]:
    """Of the leaves; None for what is no array."""
    return tuple(tuple(leaf.shape) if is_array(leaf) else None for leaf in leaves(value))
