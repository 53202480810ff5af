"""What torch keeps for each thread: taken, and put back.

Two functions that take turns in one thread each find it as they have left it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]


class ThreadState:
    """Grad mode, autocast, modes, hooks of saved tensors and the stream, as they are in this thread when it is made.

    Args:
        device: That is computed on.
    """

    def __init__(self, device: torch.device):
        self._grad = torch.is_grad_enabled()
        types = dict.fromkeys(("cpu", device.type))
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        self._cache = torch.is_autocast_cache_enabled()
        self._dispatch = _get_current_dispatch_mode_stack()
        self._function = _get_current_function_mode_stack()
        self._hooks = _take_hooks()
        _put_hooks(self._hooks)
        self._stream = torch.cuda.current_stream() if device.type == "cuda" else None

    def put(self) -> None:
        """Make it so again."""
        torch.set_grad_enabled(self._grad)
        for device_type, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device_type, is_enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # and its device
        _take_hooks()
        _put_hooks(self._hooks)
        # Popped and pushed, not left and entered: what a mode does when it is entered, it has done.
        for _ in range(_len_torch_dispatch_stack()):
            _pop_dispatch_mode()
        for _ in range(_len_torch_function_stack()):
            _pop_function_mode()
        for mode in self._function:
            _push_function_mode(mode)
        for mode in self._dispatch:
            _push_dispatch_mode(mode)


def _take_hooks() -> list[Any]:
    """All pairs of hooks of saved tensors, the last first; none is left."""
    found = []
    while (hooks := _AUTOGRAD._top_saved_tensors_default_hooks(True)) is not None:
        found.append(hooks)
        _AUTOGRAD._pop_saved_tensors_default_hooks()
    return found


def _put_hooks(found: list[Any]) -> None:
    for hooks in reversed(found):
        _AUTOGRAD._push_saved_tensors_default_hooks(*hooks)
