"""Neighbours recomputed as one segment: only what goes into the first is kept, not what goes from one to the next.

The call of the first module runs all of them under one checkpoint. What the later ones return is handed to them when
the model calls them, so hooks, loops and collected hidden states see what they would see without us. For that to be
right, each must be called with the very tensor that the one before returned, and this is looked at in every call.

The calls are caught at ``_call_impl``, beneath ``Module.__call__``, so that hooks of the modules run with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from bigbatch.errors import RecomputeError
from bigbatch.memory.checkpointing import run_recomputed

# The tensor itself carries what comes next: dropped together with it, whatever the model does instead.
_NEXT = "_bigbatch_next"


class Place(NamedTuple):
    """A module's place in its segment, and whether the input of the segment lies on the host."""

    members: tuple[nn.Module, ...]
    names: tuple[str, ...]
    position: int
    offload: bool = False


@dataclass
class _Handover:
    """What the rest of a segment returns, carried by what the member before returned."""

    members: tuple[nn.Module, ...]
    position: int
    outputs: list[torch.Tensor]
    version: int
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def call_in_segment(
    place: Place, plain_call: Callable[[nn.Module], Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The output of the member at ``place``: computed with all the others if it is the first, else handed over.

    Args:
        plain_call: Gives the call of a member as it would be without us, hooks included.

    Raises:
        RecomputeError: The member was not called with what the one before returned.
    """
    if place.position == 0:
        return _run_all(place, plain_call, args, kwargs)
    return _take_over(place, args, kwargs)


def _run_all(
    place: Place, plain_call: Callable[[nn.Module], Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    if not args or not isinstance(args[0], torch.Tensor):
        raise RecomputeError(
            f"{place.names[0]!r} is recomputed in one group with {place.names[1]!r}, and was not called with a tensor "
            f"as its first positional argument (found {_kinds(args, kwargs)}). Recompute them one by one."
        )
    outputs: list[torch.Tensor] = []
    first_run = [outputs]

    def run(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        # In the second run nobody takes the outputs, and this function must not keep those of the first alive.
        keep = first_run.pop() if first_run else None
        for member, name in zip(place.members, place.names, strict=True):
            x = _only_tensor(plain_call(member)(x, *rest, **named), name, place)
            if keep is not None:
                keep.append(x)
        return x

    run_recomputed(run, args, kwargs, modules=place.members, offload=place.offload)
    outputs.reverse()  # The next one is at the end.
    output = outputs.pop()
    _carry(output, _Handover(place.members, 1, outputs, output._version, args[1:], kwargs))
    return output


def _only_tensor(output: Any, name: str, place: Place) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    raise RecomputeError(
        f"{name!r} is recomputed in one group {place.names}, and returned {type(output).__name__}; in a group each "
        f"module returns one tensor, the input of the next. Recompute these modules one by one."
    )


def _take_over(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    given = args[0] if args else None
    handover: _Handover | None = vars(given).pop(_NEXT, None) if isinstance(given, torch.Tensor) else None
    seen = _difference(place, handover, given, args, kwargs)
    if handover is None or seen is not None:
        before, this = place.names[place.position - 1 : place.position + 1]
        raise RecomputeError(
            f"{before!r} and {this!r} are recomputed in one group, for which the sole input of {this!r} must be the "
            f"tensor that {before!r} returned, with the same other arguments; but {seen}. Recompute them one by one."
        )
    output = handover.outputs.pop()
    if handover.outputs:
        handover.position, handover.version = handover.position + 1, output._version
        _carry(output, handover)
    return output


def _difference(
    place: Place, handover: _Handover | None, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """What is not as it must be, in words; None if all is."""
    before = place.names[place.position - 1]
    if not isinstance(given, torch.Tensor):
        return f"its first positional argument was {type(given).__name__}"
    if handover is None or handover.members[handover.position] is not place.members[place.position]:
        return f"it was called with another tensor, of shape {tuple(given.shape)}"
    if given._version != handover.version:
        return f"what {before!r} returned was changed in place in between"
    if len(args) - 1 != len(handover.args) or set(kwargs) != set(handover.kwargs):
        return f"it got {_kinds(args[1:], kwargs)} and the first one {_kinds(handover.args, handover.kwargs)}"
    for index, (found, first) in enumerate(zip(args[1:], handover.args, strict=True), start=1):
        if not _is_same(found, first):
            return f"its positional argument {index} was another {type(found).__name__} than that of the first one"
    for name, found in kwargs.items():
        if not _is_same(found, handover.kwargs[name]):
            return f"its argument {name!r} was another {type(found).__name__} than that of the first one"
    return None


def _is_same(found: Any, first: Any) -> bool:
    if found is first:
        return True
    return type(found) is type(first) and isinstance(found, bool | int | float | str) and found == first


def _carry(tensor: torch.Tensor, handover: _Handover) -> None:
    vars(tensor)[_NEXT] = handover


def _kinds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    named = [f"{name}={type(value).__name__}" for name, value in kwargs.items()]
    return f"({', '.join([*(type(value).__name__ for value in args), *named])})"
