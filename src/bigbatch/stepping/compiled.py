"""Models that torch.compile has compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a module in it, runs compiled code."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())


def without_compiled_code(model: nn.Module) -> AbstractContextManager[Any]:
    """Let the model run as it was written, so that its hooks are called and its tensors are seen."""
    # Only where it is needed: torch.compiler loads the compiler, which takes longer than a small run.
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
