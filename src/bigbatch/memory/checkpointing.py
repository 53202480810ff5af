"""Run a function now, keep only what it was given, and run it again when backward needs what it saved."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from bigbatch.errors import warn
from bigbatch.memory.arguments import Arguments
from bigbatch.memory.buffers import check_own_parameters, no_other_changes, statistics_set_aside
from bigbatch.memory.offloading import inputs_on_host
from bigbatch.memory.selective import KEPT_OPERATIONS, KeptOutputs


def run_recomputed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Sequence[nn.Module] | None = None,
    *,
    keep: str | None = None,
    offload: bool = False,
) -> Any:
    """Return ``function(*args, **kwargs)``; what it saves for backward is dropped and computed again there.

    This is ``torch.utils.checkpoint`` (non-reentrant), which restores random numbers and autocast for the second run.
    Added to it: the second run sees lists and dicts as they were before the first one, random numbers of every device
    that a tensor argument lies on are restored (also those given by name), and running statistics are updated once.

    Without grad mode there is no backward and it is a plain call.

    Args:
        modules: All modules that ``function`` runs; None: not known.
        keep: A word of ``KEPT_OPERATIONS``: what these operations return is kept, and they do not run again.
        offload: Keep the inputs in host memory; see ``inputs_on_host``.

    Raises:
        RecomputeError: One of the modules changes a buffer in a way that a second run would repeat, or runs with
            parameters that it will not have in the second run.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(_run_or_trace, [], function, tuple(args), dict(kwargs), use_reentrant=False)
    call = _Call(function, args, kwargs, modules, None if keep is None else KeptOutputs(KEPT_OPERATIONS[keep]))
    tensors, call.arguments.tensors = call.arguments.tensors, []
    host = inputs_on_host(tensors) if offload else _NOTHING
    with host, set_checkpoint_early_stop(False) if _may_draw_late(function, args, modules) else _NOTHING:
        output = checkpoint(call, *tensors, use_reentrant=False)
    if call.kept is not None and not call.kept:
        _warn_nothing_kept(keep, _described(function, args))
    return output


def _run_or_trace(state: list[_Call], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What runs in the place of ``function`` inside torch.compile.

    The compiler traces the plain call and decides by itself what to recompute; changes of buffers happen once there.
    Where it cannot trace the function it runs us as ordinary code, and then the second run needs the same care.
    """
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    if not state:
        state.append(_Call(function, args, kwargs, None))
    return state[0](*state[0].arguments.tensors)


class _Call:
    """A call to be made twice: with what it was given, and with that as it was before."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modules: Sequence[nn.Module] | None,
        kept: KeptOutputs | None = None,
    ):
        self.arguments = Arguments(args, kwargs)
        self.kept = kept
        self._function = function
        self._modules = modules
        self._given: tuple[Sequence[Any], Mapping[str, Any]] | None = (args, kwargs)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._given is not None:
            # The first run changes what the caller gave. Afterwards nothing of that may stay alive in here.
            (args, kwargs), self._given = self._given, None
            check_own_parameters(self._modules or ())
            recording = _NOTHING if self.kept is None else self.kept.recording()
            with no_other_changes(self._modules or ()), recording:
                return self._function(*args, **kwargs)
        args, kwargs = self.arguments.rebuild(tensors)
        modules, are_all = self._modules, True
        if modules is None:
            modules, are_all = modules_of(self._function, args)
        replaying = _NOTHING if self.kept is None else self.kept.replaying()
        with statistics_set_aside(modules, and_any_met=not are_all), replaying:
            return self._function(*args, **kwargs)


_NOTHING = contextlib.nullcontext()


def modules_of(function: Callable[..., Any], args: Sequence[Any]) -> tuple[list[nn.Module], bool]:
    """The modules that a call is seen to run, and whether these are all (else look out for others while it runs)."""
    while isinstance(function, functools.partial):
        function, args = function.func, (*function.args, *args)
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [owner], True
    # Hooks are not called in compiled code, so there the modules must be found from outside.
    compiled = getattr(function, "_torchdynamo_orig_callable", None)
    reached = inspect.getclosurevars(compiled) if inspect.isfunction(compiled) else None
    named = (*reached.nonlocals.values(), *reached.globals.values()) if reached else ()
    found = [value for value in (*args, *named) if isinstance(value, nn.Module)]
    # And a compiled module warns about any global hook.
    return found, any("_orig_mod" in inner._modules for module in found for inner in module.modules())


def _may_draw_late(function: Callable[..., Any], args: Sequence[Any], modules: Sequence[nn.Module] | None) -> bool:
    """Whether a call is seen to run rrelu, which saves its noise for backward first and draws it afterwards.

    The second run stops as soon as all is saved again. Where the noise comes last it would not be drawn by then, and
    backward would read whatever lay in its memory.
    """
    while isinstance(function, functools.partial):
        function, args = function.func, (*function.args, *args)
    if modules is None:
        reached = [*modules_of(function, args)[0], *_read_by(function)]
        modules = [value for value in reached if isinstance(value, nn.Module)]
    forwards = (type(inner).forward for module in modules for inner in module.modules())
    return any(
        not {"rrelu", "rrelu_"}.isdisjoint(code.co_names)
        for code in (getattr(called, "__code__", None) for called in (function, *forwards))
        if code is not None
    )


def _read_by(function: Callable[..., Any]) -> list[Any]:
    """What a plain function reads from outside, by its names; ``inspect.getclosurevars`` is slow for each call."""
    if not inspect.isfunction(function):
        return []
    variables = [function.__globals__.get(name) for name in function.__code__.co_names]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            variables.append(cell.cell_contents)
    return variables


def _described(function: Callable[..., Any], args: Sequence[Any]) -> str:
    found, _ = modules_of(function, args)
    return type(found[0]).__name__ if found else getattr(function, "__name__", type(function).__name__)


@functools.cache
def _warn_nothing_kept(keep: str, what: str) -> None:
    """Once in a process: else a step would say it for each layer and micro-batch."""
    why = (
        "no fused attention kernel ran in it (on CPU there is none with dropout in the attention, nor where a model "
        'multiplies the matrices itself). Write "matmul", or leave it out'
        if keep == "attention"
        else "no matrix product or convolution ran in it. Leave it out"
    )
    warn(f"keep={keep!r} kept nothing of {what}, which is recomputed as a whole: {why}.")
