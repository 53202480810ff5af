"""Run somebody's code in a wider dtype than it was written for, and without dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from bigbatch.batch.structure import mapped
from bigbatch.stepping.fitting.recording import apply_quietly
from bigbatch.values import Plan

_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
# Called with a keyword ``training``.
_DROPOUTS = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.multi_head_attention_forward,
    }
)
_FLAGGED_DROPOUTS = frozenset({torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout})
_ATTENTION = F.scaled_dot_product_attention


class Widened(TorchFunctionMode):
    """Within it, tensors and casts of fewer bits than ``dtype`` become ``dtype``, and dropout drops nothing.

    With ``drops`` it does.

    Losses use tensors that belong neither to the model nor to the batch (class weights), and models cast in their
    forward (``RMSNorm`` of transformers computes in float32): casting the parameters alone would end in an error, or
    in float32.
    """

    def __init__(self, dtype: torch.dtype, *, drops: bool = False):
        self.dtype = dtype
        self._drops = drops
        self.switched_dropout_off = False
        # Not by promote_types in here: what is cached of it outside would be that of another dtype.
        self.narrow = {torch.float16, torch.bfloat16} | ({torch.float32} if dtype == torch.float64 else set())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.promote_types:
            return func(*args, **kwargs)
        if func in _CASTS:
            return args[0].to(self.dtype)
        args, kwargs = tree_map(self._wide, (args, kwargs))
        if self._drops:
            return func(*args, **kwargs)
        self.switched_dropout_off |= _drops(func, args, kwargs)
        return func(*_without_dropout(func, args, kwargs), **kwargs)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self.dtype if value in self.narrow else value
        if isinstance(value, torch.Tensor) and value.dtype in self.narrow:
            return value.to(self.dtype)
        return value


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call would drop something."""
    if func is F.multi_head_attention_forward:
        return bool(kwargs.get("training", True)) and args[10] > 0
    if func in _DROPOUTS:
        return bool(kwargs.get("training", True)) and kwargs.get("p", 0.5) > 0
    if func in _FLAGGED_DROPOUTS:
        return bool(args[2]) and args[1] > 0
    return func is _ATTENTION and (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments, changed so that a dropout drops nothing."""
    if func in _DROPOUTS:
        kwargs["training"] = False
    elif func in _FLAGGED_DROPOUTS:
        return (args[0], 0.0, False)
    elif func is _ATTENTION:
        if len(args) > 4:
            return (*args[:4], 0.0, *args[5:])
        kwargs["dropout_p"] = 0.0
    return args


@contextmanager
def widened(mode: Widened) -> Iterator[None]:
    """Run the block in the dtype of ``mode`` and without dropout; new tensors are made in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(mode.dtype)
    try:
        with mode:
            yield
    finally:
        torch.set_default_dtype(before)


def wide_batch(batch: Any, dtype: torch.dtype) -> Any:
    """A copy of a batch with its floating point tensors in ``dtype``."""

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(dtype=dtype if leaf.is_floating_point() else leaf.dtype, copy=True)

    return mapped(wide, batch)


def switch_dropout_off(model: nn.Module) -> list[str]:
    """Switch the layers off that drop something, and name them; ``Widened`` sees those that are functions."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            module.training = False  # seen by recomputation in backward too, which runs outside the mode on a card
            found.append(name)
        elif isinstance(module, nn.RNNBase) and module.training and module.dropout > 0:
            module.dropout = 0.0
            found.append(name)
    return found


def switch_recompute_off(model: nn.Module) -> None:
    """Keep what was recomputed: autograd recomputes outside of ``Widened``, where casts would be narrow again."""
    apply_quietly(Plan(micro_batch_size=1), model)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", None) is True:  # the switch of models of transformers
            module.__dict__["gradient_checkpointing"] = False
