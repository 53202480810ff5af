"""From the names in a plan to the modules of a model, or an error that says which name and why."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from bigbatch.errors import RecomputeError
from bigbatch.memory.switching import check_can_be_put_on

Names = tuple[str | tuple[str, ...], ...]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile.

    Raises:
        RecomputeError: It is inside ``DataParallel``. That copies modules for each device in a way that would go on
            computing with the parameters of the original.
    """
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, nn.DataParallel):
            raise RecomputeError(
                "The model is wrapped in DataParallel, and modules cannot be recomputed in its copies. Wrap it in "
                "DistributedDataParallel."
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def is_compiled_as_a_whole(model: nn.Module) -> bool:
    """Whether torch.compile runs it as a whole."""
    inside = model._modules.get("module") if isinstance(model, nn.parallel.DistributedDataParallel) else None
    return any(
        one is not None and ("_orig_mod" in one._modules or one._compiled_call_impl is not None)
        for one in (model, inside)
    )


def resolve(root: nn.Module, names: Names) -> list[dict[str, nn.Module]]:
    """For each entry of a plan its modules by name: one, or those of a group in order.

    Args:
        root: The model, unwrapped.

    Raises:
        RecomputeError: A name is unknown, twice, or inside another; or neighbours are none.
    """
    known = _known(root)
    entries = []
    for name in names:
        group = [name] if isinstance(name, str) else list(name)
        entry = {one: _find(one, known) for one in group}
        for one, module in entry.items():
            check_can_be_put_on(module, one, in_group=len(group) > 1)
        if len(group) != 1:
            _check_neighbours(group, known)
        entries.append(entry)
    _check_apart([(name, module) for entry in entries for name, module in entry.items()], names)
    return entries


def _known(root: nn.Module) -> dict[str, nn.Module]:
    known: dict[str, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        # A compiled module in the model goes by its own name, and what is in it by the names it had before.
        known.setdefault(".".join(part for part in name.split(".") if part != "_orig_mod"), module)
    return known


def _find(name: object, known: dict[str, nn.Module]) -> nn.Module:
    if name == "":
        raise RecomputeError(
            "'' is the whole model: recomputed as one it needs in backward all that it saved in the forward, and "
            "nothing is gained. Name modules in it."
        )
    if isinstance(name, str) and name in known:
        return known[name]
    close = difflib.get_close_matches(str(name), [*filter(None, known)], n=3, cutoff=0.4)
    hint = f"Close to it: {', '.join(map(repr, close))}." if close else f"There are {_some(known)}."
    raise RecomputeError(f"The model has no module named {name!r}. {hint}")


def _some(known: dict[str, nn.Module]) -> str:
    names = [repr(name) for name in known if name]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none in it"


def _check_neighbours(group: Sequence[str], known: dict[str, nn.Module]) -> None:
    if not group:
        raise RecomputeError("recompute has an empty group (); a group is a tuple of two or more names.")
    owners = {name.rpartition(".")[0] for name in group}
    owner = known[owners.pop()]
    children = list(owner._modules)
    places = [children.index(name.rpartition(".")[2]) for name in group] if not owners else []
    in_order = places and places == list(range(places[0], places[0] + len(places)))
    if not in_order or not isinstance(owner, nn.Sequential | nn.ModuleList):
        raise RecomputeError(
            f"{tuple(group)} is no group: it must be neighbours, in order, in one nn.Sequential or one nn.ModuleList"
            f"{'' if owners else f', and these are in a {type(owner).__name__}'}. Name them one by one."
        )


def _check_apart(named: Sequence[tuple[str, nn.Module]], names: Names) -> None:
    by_module: dict[nn.Module, str] = {}
    for name, module in named:
        if module in by_module:
            raise RecomputeError(
                f"recompute={names!r} names one module twice: {name!r} is {by_module[module]!r}. Name it once."
            )
        by_module[module] = name
    for name, module in named:
        for inner in module.modules():
            if inner is not module and inner in by_module:
                raise RecomputeError(
                    f"{by_module[inner]!r} is inside {name!r}, which is recomputed as a whole: it would be computed "
                    f"three times. Name one of the two."
                )
