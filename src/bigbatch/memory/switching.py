"""Recompute on and off at one module, leaving its class, its state dict and its hooks as they were.

A module that is recomputed gets an instance attribute ``forward``: a method, bound to it, of a function that knows no
module. ``copy.deepcopy`` binds the method of a copy to the copy; a closure over the module would go on computing with
the parameters of the original (``AveragedModel`` copies its model). What must be remembered lies in the module's own
``__dict__`` for the same reason. The functions are the same each time, or torch.compile would compile each time.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bigbatch.errors import RecomputeError
from bigbatch.memory.arguments import loaded_types
from bigbatch.memory.checkpointing import run_recomputed
from bigbatch.memory.segments import Place, call_in_segment

# Attributes of a module that is recomputed: what of it is ours ("forward", "_call_impl" or "switch"), what it had there
# itself, its place in a group, how it is recomputed, and that our forward is under somebody's wrapper.
_ON = "_bigbatch_on"
_BEFORE = {"forward": "_bigbatch_before_forward", "_call_impl": "_bigbatch_before_call"}
_SWITCH_BEFORE = "_bigbatch_before_switch"
_PLACE = "_bigbatch_place"
_HOW = "_bigbatch_how"
_UNDER = "_bigbatch_under"
# Marks our functions.
_OURS = "_bigbatch_is_ours"
# The names that transformers uses, in modeling_layers.py.
_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


def put_on(module: nn.Module, *, keep: str | None = None, offload: bool = False) -> str:
    """Recompute this module; returns by which mechanism: ``"bigbatch"`` or ``"transformers"``.

    Args:
        keep: As in ``run_recomputed``, and so is ``offload``.
    """
    how = dict(keep=keep, offload=offload)
    if is_transformers_layer(module):
        _switch(module, {_FLAG: True, _FUNCTION: functools.partial(_checkpoint_layer, how)})
        return "transformers"
    _replace(module, "forward", _recomputed_forward(type(module)))
    module.__dict__[_HOW] = how
    return "bigbatch"


def put_on_segment(members: tuple[nn.Module, ...], names: tuple[str, ...], *, offload: bool = False) -> None:
    """Recompute these neighbours as one segment; its input lies on the host if ``offload``."""
    for position, module in enumerate(members):
        _replace(module, "_call_impl", _call_impl)
        module.__dict__[_PLACE] = (members, names, position)
        module.__dict__[_HOW] = dict(offload=offload)


def put_off_own_switch(module: nn.Module) -> bool:
    """Switch off the checkpointing that a model of transformers was told to do; returns whether it was on."""
    if getattr(module, _FLAG, None) is not True or _ON in module.__dict__:
        return False
    _switch(module, {_FLAG: False})
    return True


def take_off(module: nn.Module) -> None:
    """Undo whatever of the above was done to this module."""
    attributes = module.__dict__
    name = attributes.pop(_ON, None) or attributes.pop(_UNDER, None)
    if name is None:
        return
    attributes.pop(_PLACE, None)
    attributes.pop(_HOW, None)
    for switch, (was_there, before) in attributes.pop(_SWITCH_BEFORE, {}).items():
        del attributes[switch]
        if was_there:
            attributes[switch] = before
    if _is_ours(module, name):
        del attributes[name]
        if _BEFORE[name] in attributes:
            attributes[name] = attributes.pop(_BEFORE[name])
    elif name in attributes:
        # Somebody has wrapped our function meanwhile (accelerate's hooks do). It stays under theirs and does nothing.
        attributes[_UNDER] = name


def is_transformers_layer(module: nn.Module) -> bool:
    """Whether it has a switch of its own that can be used for this layer alone."""
    return isinstance(module, loaded_types("transformers.modeling_layers", "GradientCheckpointingLayer"))


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether somebody has replaced the ``forward`` of this instance; recompute does not count."""
    return _BEFORE["forward"] in module.__dict__ or ("forward" in module.__dict__ and not _is_ours(module, "forward"))


@contextlib.contextmanager
def computing(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Within the block the module computes ``function(module, ...)``, beneath its hooks and its recompute.

    Args:
        module: One that has no forward of its own.
    """
    name = _BEFORE["forward"] if module.__dict__.get(_ON) == "forward" else "forward"
    before = module.__dict__.get(name)
    module.__dict__[name] = types.MethodType(function, module)
    try:
        yield
    finally:
        del module.__dict__[name]
        if before is not None:
            module.__dict__[name] = before


def check_can_be_put_on(module: nn.Module, name: str, *, in_group: bool) -> None:
    """Raise ``RecomputeError`` if calls of this module cannot be caught."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        what = f"is a {type(module).__name__}, which is never called itself; name the modules in it"
    elif isinstance(module, torch.jit.ScriptModule):
        what = "is a TorchScript module, which runs outside of Python; load the model without TorchScript"
    elif in_group and module._compiled_call_impl is not None:
        what = "was compiled in place (module.compile()) and cannot be in a group; name it alone"
    else:
        return
    raise RecomputeError(f"{name!r} {what}.")


@functools.lru_cache(maxsize=256)
def _recomputed_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """The ``forward`` of a recomputed module of this class; it says the same of itself as the class's own."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = _plain(self, "forward")
        if self.__dict__.get(_ON) != "forward":
            return plain(*args, **kwargs)
        return run_recomputed(plain, args, kwargs, modules=(self,), **self.__dict__[_HOW])

    # pickle stores a method by its name, and finds the class's own again when it loads.
    forward.__name__ = "forward"
    forward.__dict__[_OURS] = True
    return forward


def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The call of a module in a segment, hooks included: ``Module.__call__`` calls this method of the instance."""
    plain = _plain(self, "_call_impl")
    if self.__dict__.get(_ON) != "_call_impl" or not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    if torch.compiler.is_compiling():
        # The compiler cannot follow outputs that travel on tensors.
        return run_recomputed(plain, args, kwargs, modules=(self,))
    place = Place(*self.__dict__[_PLACE], **self.__dict__[_HOW])
    return call_in_segment(place, functools.partial(_plain, name="_call_impl"), args, kwargs)


_call_impl.__dict__[_OURS] = True


def _plain(module: nn.Module, name: str) -> Callable[..., Any]:
    """What ``module.forward`` or ``module._call_impl`` would be without us: somebody's wrapper, or the class's."""
    before = module.__dict__.get(_BEFORE[name])
    # Not types.MethodType, which torch.compile does not know.
    return functools.partial(getattr(type(module), name), module) if before is None else before


def _is_ours(module: nn.Module, name: str) -> bool:
    function = getattr(module.__dict__.get(name), "__func__", None)
    # A module that was pickled comes back with the class's own method in the place of ours.
    return function is not None and (getattr(function, _OURS, False) or function is getattr(type(module), name))


def _replace(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    attributes = module.__dict__
    if attributes.get(_UNDER) == name:
        del attributes[_UNDER]  # Ours is still there, and works again.
    else:
        if name in attributes:
            attributes[_BEFORE[name]] = attributes[name]
        attributes[name] = types.MethodType(function, module)
    attributes[_ON] = name


def _switch(module: nn.Module, values: dict[str, Any]) -> None:
    attributes = module.__dict__
    attributes[_SWITCH_BEFORE] = {name: (name in attributes, attributes.get(name)) for name in values}
    attributes.update(values)
    attributes[_ON] = "switch"


def _checkpoint_layer(how: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    """What a layer of transformers calls in place of ``torch.utils.checkpoint.checkpoint``, ``how`` put before it.

    The layer has taken caches out of its named arguments: in a second run they would grow again. Some models give them
    by position (GPT-2, unless the whole model is checkpointed), so here they are taken out of these too.
    """
    kwargs: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        # The tensors among the named arguments must be seen, to be saved and freed.
        kwargs, function = function.keywords, functools.partial(function.func, *function.args)
    caches = loaded_types("transformers.cache_utils", "Cache")
    return run_recomputed(function, [None if isinstance(value, caches) else value for value in args], kwargs, **how)
