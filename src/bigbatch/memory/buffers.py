"""Buffers that a module changes while it runs, when it runs a second time only to compute what backward needs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bigbatch.errors import RecomputeError


def has_running_statistics(module: nn.Module) -> bool:
    """Whether this is BatchNorm, InstanceNorm or one like them, with running statistics."""
    return module._buffers.get("running_mean") is not None


@contextlib.contextmanager
def statistics_set_aside(modules: Sequence[nn.Module], *, and_any_met: bool) -> Iterator[None]:
    """Within the block, train-mode BatchNorm layers update copies of their buffers, which are then thrown away.

    The forward has counted the batch; the run in backward must not count it again:
    https://github.com/pytorch/pytorch/issues/96136. The buffers are exchanged and not written back, because an
    in-place write would spoil them for other graphs that saved them.

    Args:
        modules: The layers are looked for in these.
        and_any_met: And in whatever module is called in the block, by this thread.
    """
    aside: dict[nn.Module, dict[str, torch.Tensor | None]] = {}
    for module in modules:
        for inner in module.modules():
            _set_aside(aside, inner)
    hook = _hook_for_this_thread(functools.partial(_set_aside, aside)) if and_any_met else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for module, buffers in aside.items():
            module._buffers.update(buffers)


def _set_aside(aside: dict[nn.Module, dict[str, torch.Tensor | None]], module: nn.Module) -> None:
    if module.training and module not in aside and has_running_statistics(module):
        buffers = aside[module] = dict(module._buffers)
        module._buffers.update({name: None if kept is None else kept.clone() for name, kept in buffers.items()})


def _hook_for_this_thread(visit: Callable[[nn.Module], None]) -> Any:
    owner = threading.get_ident()

    def before_forward(module: nn.Module, _args: Any) -> None:
        if threading.get_ident() == owner:
            visit(module)

    return nn.modules.module.register_module_forward_pre_hook(before_forward)


def check_own_parameters(modules: Sequence[nn.Module]) -> None:
    """Raise if a module of these is called with parameters that were put in for this call only.

    Raises:
        RecomputeError: Names the module and the parameter.
    """
    for module in modules:
        for path, owner in module.named_modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and not isinstance(parameter, nn.Parameter):
                    raise RecomputeError(
                        f"{type(module).__name__} is called with other parameters than its own (functional_call put in "
                        f"{_joined(path, name)!r}). Backward would run it again with its own, and the "
                        f"gradient would be another one. Recompute a function that calls functional_call instead: "
                        f"bb.recompute(lambda p, x: functional_call(module, p, x))(parameters, x)."
                    )


@contextlib.contextmanager
def no_other_changes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Raise if a module of these changes a buffer in the block, other than running statistics.

    Spectral norm is the known one: each run takes a step of power iteration. Run again, it would start from other
    values than the forward did, and nobody would notice.

    Raises:
        RecomputeError: Names the module and the buffer.
    """
    before = [
        (module, path, owner, name, buffer, buffer._version)
        for module in modules
        for path, owner in module.named_modules()
        if not has_running_statistics(owner)
        for name, buffer in owner._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    yield
    for module, path, owner, name, buffer, version in before:
        found = owner._buffers.get(name)
        # One that is replaced by another of a new shape is a table that grew, not a state.
        is_replaced = found is not None and found is not buffer and found.shape == buffer.shape
        if buffer._version != version or is_replaced:
            raise RecomputeError(
                f"{type(module).__name__} changes its buffer {_joined(path, name)!r} "
                f"(shape {tuple(buffer.shape)}) when it runs. Run again in backward it would start from other values "
                f"and change it twice, so it cannot be recomputed: leave this module out, or recompute a part of it "
                f"that does not do that."
            )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
