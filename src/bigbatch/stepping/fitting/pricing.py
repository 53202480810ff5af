"""What an operation takes on a device that is not at hand: its arithmetic or its memory traffic, whichever is longer.

This is the roofline model (Williams et al., 2009, https://doi.org/10.1145/1498765.1498785). It orders choices, and is
no promise of a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bigbatch.planning.cards import Card

# What well-tuned kernels reach of the peaks on a data sheet.
_SHARE_OF_FLOPS = 0.5
_SHARE_OF_BANDWIDTH = 0.8
_SECONDS_PER_CALL = 5e-6

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Roofline:
    """Prices operations for a card; called as ``price(func, args, kwargs, result)``.

    Args:
        card: What the device can do.
    """

    def __init__(self, card: Card):
        self._card = card

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        """Seconds of one operation; none of one that only looks at memory in another way."""
        if _is_view(func):
            return 0.0
        tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, torch.Tensor)]
        if not tensors:
            return 0.0
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        seconds = moved / (self._card.bytes_per_second * _SHARE_OF_BANDWIDTH)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            peak = self._card.flops_per_second(_NAMES.get(tensors[-1].dtype, "fp32"))
            seconds = max(seconds, count(*args, **kwargs, out_val=result) / (peak * _SHARE_OF_FLOPS))
        return seconds + _SECONDS_PER_CALL


@cache
def _is_view(func: Any) -> bool:
    """Whether it returns what it was given, seen in another way."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
