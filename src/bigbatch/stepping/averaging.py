"""Moving averages of the weights, whoever made them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def update_average(ema: Any, model: nn.Module) -> None:
    """Update a moving average: ``update_parameters(model)``, ``update(model)`` or ``update()``, whichever it has."""
    if hasattr(ema, "update_parameters"):
        ema.update_parameters(model)
        return
    try:
        takes_model = (
            bool(_required(inspect.signature(ema.update))) or "model" in inspect.signature(ema.update).parameters
        )
    except ValueError:
        takes_model = True
    ema.update(model) if takes_model else ema.update()


def _required(signature: inspect.Signature) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind in positional
    ]
