"""The arguments of a call, kept so that the call can be made again exactly as it was made the first time.

A function may change a list or a dict that it is given (a cache that grows by one entry a layer). Called again with the
changed one it computes something else. So the containers are copied before the first call. The tensors in them are not
copied but handed over apart: ``torch.utils.checkpoint`` saves, checks and frees only tensors that it is given by
position, and restores the random numbers of their devices only.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands where a tensor was."""

    index: int


class Arguments:
    """Positional and named arguments of a call; what could be changed in them is copied at every depth.

    Attributes:
        tensors: The tensors in them, in order. Whoever keeps this object should empty the list.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.tensors: list[torch.Tensor] = []
        self._structure = structural_copy((tuple(args), dict(kwargs)), self._take, {})

    def _take(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        self.tensors.append(leaf)
        return _Slot(len(self.tensors) - 1)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they were before the call, in fresh containers, around these tensors."""

        def put(leaf: Any) -> Any:
            return tensors[leaf.index] if isinstance(leaf, _Slot) else leaf

        return structural_copy(self._structure, put, {})


def structural_copy(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Copy lists, dicts, tuples, dataclasses and caches at every depth, and pass everything else through ``leaf``.

    What is one container under two names stays one, so ``memo`` maps the id of each to its copy.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, _Slot | torch.Tensor | torch.nn.Module):
        return leaf(value)
    if isinstance(value, dict | list):
        copied = memo[id(value)] = copy.copy(value)
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            copied[key] = structural_copy(inner, leaf, memo)
        return copied
    if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_make")):
        inner = [structural_copy(inner, leaf, memo) for inner in value]
        return tuple(inner) if type(value) is tuple else value._make(inner)  # pyright: ignore[reportAttributeAccessIssue]
    names = _attributes_to_copy(value)
    if not names:
        return leaf(value)
    copied = memo[id(value)] = copy.copy(value)
    for name in names:
        # A frozen dataclass refuses plain assignment.
        object.__setattr__(copied, name, structural_copy(getattr(value, name), leaf, memo))
    return copied


def _attributes_to_copy(value: Any) -> list[str]:
    """Attributes of a dataclass, or of a key-value cache of transformers, which grows as it is used."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    is_cache = isinstance(value, loaded_types("transformers.cache_utils", "Cache", "CacheLayerMixin"))
    return list(vars(value)) if is_cache else []


def loaded_types(module: str, *names: str) -> tuple[type, ...]:
    """Those of the classes that there are; none of a module that nobody has imported, for then nothing is one."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
