"""What torch keeps for each thread, and some of what it keeps for the process: taken, and put back.

Two functions that take turns in one thread each find it as they have left it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

_C: Any = torch._C
_AUTOGRAD = _C._autograd

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda found: torch.set_anomaly_enabled(*found),
    ),
    (asyncio._get_running_loop, asyncio._set_running_loop),
)
"""Of the process or the thread: what a context manager around a layer may have set, and how to set it back."""


class ThreadState:
    """Grad mode, autocast, modes, hooks of saved tensors, the stream and settings, as they are when it is made.

    The rest of what autograd keeps is the worker's own to put back (``Worker.meet``).

    Args:
        device: That is computed on.
    """

    def __init__(self, device: torch.device):
        self._grad = torch.is_grad_enabled()
        types = dict.fromkeys(("cpu", device.type))
        self._settings = [get() for get, _ in _SETTINGS]
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        self._cache = torch.is_autocast_cache_enabled()
        self._overrides = _C._get_torch_function_state()
        self._dispatch = _get_current_dispatch_mode_stack()
        self._function = _get_current_function_mode_stack()
        self._why_no_hooks: str | None = _AUTOGRAD._saved_tensors_hooks_get_disabled_error_message()
        self._hooks = _take_hooks()
        _put_hooks(self._hooks, self._why_no_hooks)
        self._stream = torch.cuda.current_stream() if device.type == "cuda" else None

    def put(self) -> None:
        """Make it so again."""
        torch.set_grad_enabled(self._grad)
        for (get, set_again), before in zip(_SETTINGS, self._settings, strict=True):
            if get() != before:
                set_again(before)
        for device_type, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device_type, is_enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # and its device
        _take_hooks()
        _put_hooks(self._hooks, self._why_no_hooks)
        # Popped and pushed, not left and entered: what a mode does when it is entered, it has done.
        for _ in range(_len_torch_dispatch_stack()):
            _pop_dispatch_mode()
        for _ in range(_len_torch_function_stack()):
            _pop_function_mode()
        for mode in self._function:
            _push_function_mode(mode)
        for mode in self._dispatch:
            _push_dispatch_mode(mode)
        _C._set_torch_function_state(self._overrides)


def _take_hooks() -> list[Any]:
    """All pairs of hooks of saved tensors, the last first; none is left."""
    found = []
    while (hooks := _AUTOGRAD._top_saved_tensors_default_hooks(True)) is not None:
        found.append(hooks)
        _AUTOGRAD._pop_saved_tensors_default_hooks()
    return found


def _put_hooks(found: list[Any], why_no_more: str | None) -> None:
    """Push them.

    Args:
        why_no_more: What torch says to who pushes another one; None: it may.
    """
    _AUTOGRAD._saved_tensors_hooks_enable()
    for hooks in reversed(found):
        _AUTOGRAD._push_saved_tensors_default_hooks(*hooks)
    if why_no_more is not None:
        _AUTOGRAD._saved_tensors_hooks_disable(why_no_more, False)
