"""Which modules normalise by the batch they get in a function: ``F.batch_norm`` in a forward of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

_FUNCTIONS = frozenset({F.batch_norm, torch.batch_norm, torch.native_batch_norm})
_TRAINING = 5  # the place of that argument in all of them


class BatchNormCalls(TorchFunctionMode):
    """Within it, the modules that call ``F.batch_norm`` for batch statistics over several samples are noted.

    Args:
        model: Whose modules are told apart. Its BatchNorm layers are left out.

    Attributes:
        callers: The innermost module of each call, by name; ``None`` for calls outside of the model.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.callers: dict[str | None, nn.Module | None] = {}
        self._model = model
        self._running: list[tuple[str, nn.Module]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> BatchNormCalls:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Any:
        return lambda module, args: self._running.append((name, module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            training = args[_TRAINING] if len(args) > _TRAINING else kwargs.get("training", False)
            x = args[0] if args else kwargs["input"]
            name, module = self._running[-1] if self._running else (None, None)
            # A norm of each sample may be written as one of a single sample with more channels.
            if training and x.shape[0] > 1 and not isinstance(module, _BatchNorm):
                self.callers[name] = module
        return func(*args, **kwargs)
