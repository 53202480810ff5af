"""Recompute instead of keep: ``recompute`` for a function, ``apply`` for the modules that a plan names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from torch import nn

from bigbatch.errors import ArgumentError, warn
from bigbatch.memory.checkpointing import run_recomputed
from bigbatch.memory.naming import is_compiled_as_a_whole, resolve, unwrapped
from bigbatch.memory.switching import put_off_own_switch, put_on, put_on_segment, take_off
from bigbatch.values import Plan

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The attribute of the model (inside DDP and torch.compile) that says which call of ``apply`` is in force.
_APPLIED = "_bigbatch_applied"
_tokens = itertools.count(1)


def recompute(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that what it saves for backward is dropped, and computed again in backward.

    It costs the function's forward a second time and keeps only its arguments. Results are the same: random numbers
    and autocast are restored for the second run, running statistics (BatchNorm) are updated once, a list or dict that
    the function changes is given to the second run as it was before the first. Any arguments and any results go. In a
    block without grad mode it is a plain call.

    >>> import torch
    >>> square = recompute(lambda x: (x * 3).square())
    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> square(x).backward()
    >>> x.grad
    tensor(36.)

    The function must do the same when it is called again. What it reads from outside (a global, an attribute) must be
    the same in backward, and what it changes outside is changed twice.

    Args:
        fn: Any callable; a module too, though ``apply`` keeps the module in its place.

    Raises:
        ArgumentError: It cannot be called.
    """
    if not callable(fn):
        raise ArgumentError(f"recompute() wraps a function, found {type(fn).__name__}. Write bb.recompute(block)(x).")

    def recomputed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return run_recomputed(fn, args, kwargs)

    # A module's attributes are not copied: they would go stale.
    return functools.update_wrapper(recomputed, fn, updated=() if isinstance(fn, nn.Module) else ("__dict__",))


class Recomputing:
    """What ``apply`` put on; a context manager that takes it off again.

    Attributes:
        mechanism: For each module by name: ``"bigbatch"``, or ``"transformers"`` where the layer's own switch is used.
    """

    def __init__(self, root: nn.Module, applied: _Applied, before: _Applied, mechanism: dict[str, str]):
        self.mechanism = mechanism
        self._root = root
        self._applied: _Applied | None = applied
        self._before = before

    def remove(self) -> None:
        """Put back what was on before. A second time, or when another ``apply`` came after, nothing happens."""
        if _applied(self._root) == self._applied:
            _take_off_all(self._root)
            _put_on_all(self._root, self._before, resolve(self._root, self._before.plan.recompute))
        self._applied = None

    def __enter__(self) -> Recomputing:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(plan: Plan | None, model: nn.Module) -> Recomputing:
    """Recompute in backward the modules that a plan names, and no others.

    The model keeps its class, its ``state_dict`` keys and its hooks. A copy of it recomputes with its own parameters;
    one that was pickled whole is loaded with recompute off.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> with apply(Plan(micro_batch_size=8, recompute=("0", ("1", "2"))), model) as recomputing:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> recomputing.mechanism
    {'0': 'bigbatch', '1': 'bigbatch', '2': 'bigbatch'}

    Args:
        plan: ``plan.recompute`` names modules as ``model.named_modules()`` does, without the prefixes of DDP and
            torch.compile. A tuple of names is a group of neighbours recomputed as one segment: children of one
            ``nn.Sequential``, or entries of one ``nn.ModuleList``, in order, each called with what the one before
            returned. ``plan.keep`` and ``plan.offload`` say of some of them what is kept, and that their input lies in
            host memory. None: recompute nothing.
        model: May be wrapped in DDP or compiled.

    Returns:
        A handle: ``handle.remove()``, or leaving ``with``, puts back what was on before.

    Raises:
        RecomputeError: A name is unknown, is inside another one, or cannot be recomputed. The model is as before.
    """
    if not (plan is None or isinstance(plan, Plan)) or not isinstance(model, nn.Module):
        raise ArgumentError(
            f"apply() takes a Plan (or None) and a model, found {type(plan).__name__} and {type(model).__name__}. "
            f'Write bb.apply(bb.Plan(micro_batch_size=8, recompute=("name",)), model).'
        )
    root = unwrapped(model)
    applied = _Applied() if plan is None else _Applied(next(_tokens), plan)
    entries = resolve(root, applied.plan.recompute)
    before = _applied(root)
    _take_off_all(root)
    mechanism, num_switched_off = _put_on_all(root, applied, entries)
    if num_switched_off:
        warn(
            f"Gradient checkpointing was switched on in {num_switched_off} modules of this model. While a plan is "
            f"applied, the plan alone says what is recomputed."
        )
    if plan is not None and (plan.keep or plan.offload) and is_compiled_as_a_whole(model):
        warn(
            "keep= and offload= have no effect in a compiled model: the compiler decides what it keeps of a recomputed "
            "module, and where. Leave them out, or do not compile."
        )
    return Recomputing(root, applied, before, mechanism)


_NO_PLAN = Plan(micro_batch_size=1)


class _Applied(NamedTuple):
    """Which call of ``apply`` is in force in a model (0: none), and the plan it was given."""

    token: int = 0
    plan: Plan = _NO_PLAN

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A model that was pickled comes back with recompute off, and says so.
        return tuple, ()

    def __deepcopy__(self, _: object) -> _Applied:
        return self


def _applied(root: nn.Module) -> _Applied:
    return _Applied(*root.__dict__.get(_APPLIED, ()))


def _put_on_all(root: nn.Module, applied: _Applied, entries: list[dict[str, nn.Module]]) -> tuple[dict[str, str], int]:
    """Put on what was applied.

    Returns:
        The mechanism by name, and how many of the model's own switches had to be put off for it.
    """
    mechanism: dict[str, str] = {}
    if applied.token == 0:
        return mechanism, 0
    keep, offload = dict(applied.plan.keep), applied.plan.offload
    for entry in entries:
        name, module = next(iter(entry.items()))
        if len(entry) > 1:
            put_on_segment(tuple(entry.values()), tuple(entry), offload=name in offload)
            mechanism.update(dict.fromkeys(entry, "bigbatch"))
        else:
            mechanism[name] = put_on(module, keep=keep.get(name), offload=name in offload)
    root.__dict__[_APPLIED] = applied
    return mechanism, sum(put_off_own_switch(module) for module in root.modules())


def _take_off_all(root: nn.Module) -> None:
    for module in root.modules():
        module.__dict__.pop(_APPLIED, None)  # Also where a part of this model was given to ``apply``.
        take_off(module)
