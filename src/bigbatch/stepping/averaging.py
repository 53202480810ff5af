"""Moving averages of the weights, whoever made them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bigbatch.errors import OptionError
from bigbatch.stepping.checks import why_not_called
from bigbatch.stepping.insisting import insist
from bigbatch.stepping.optimizer_undo import Copies, are_little


def updater_of(ema: Any) -> Callable[[nn.Module], Any] | None:
    """How to update a moving average: ``update_parameters(model)``, ``update(model)`` or ``update()``.

    Raises:
        OptionError: It is none, or its ``update`` needs more than the model.
    """
    if ema is None:
        return None
    update = getattr(ema, "update_parameters", None) or getattr(ema, "update", None)
    if isinstance(ema, type | Mapping | set) or not callable(update):
        hint = f" Make one: {ema.__name__}(model)." if isinstance(ema, type) else ""
        kind = f"the class {ema.__name__}" if isinstance(ema, type) else f"a {type(ema).__name__}"
        raise OptionError(f"ema is {kind}, which has no update_parameters(model), update(model) or update().{hint}")
    try:
        signature = inspect.signature(update)
    except ValueError:
        return update
    if not why_not_called(update, 0) and "model" not in signature.parameters:
        return lambda model: update()
    if why_not_called(update, 1):
        raise OptionError(
            f"ema.{update.__name__}{signature} needs more than the model; give an object with update(model)."
        )
    return update


def update_all_or_nothing(update: Callable[[nn.Module], Any], ema: Any, model: nn.Module, *, may_fail: bool) -> None:
    """Update a moving average, and begin again when memory runs out half-way.

    Args:
        update: What ``updater_of`` gives for ``ema``.
        ema: The average; one that is no module, or is large, is not copied and cannot be begun again.
        model: Its weights are taken in.
        may_fail: Copy the average meanwhile.
    """
    tensors = [*ema.parameters(), *ema.buffers()] if isinstance(ema, nn.Module) else []
    if not may_fail or not tensors or not are_little(tensors):
        update(model)
        return
    kept: list[Copies] = []
    insist(lambda: kept.append(Copies(tensors)))
    insist(lambda: update(model), undo=kept[0].restore)
