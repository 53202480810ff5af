"""What ``optimizer.step()`` touches, so that running out of memory inside it can be undone exactly.

The storage for it is allocated beforehand: at the time of trouble there is none to be had. A fused optimizer has no
temporaries, so beside its step counters nothing has moved when an allocation fails; of others all that they move is
copied, as long as that is little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigbatch.stepping.checks import parameters_of

_MOST_BYTES = 64 * 2**20
"""Copies of more than this, in each step, would cost more than they are worth."""


class OptimizerUndo:
    """Copies of parameters and optimizer state, or of the step counters alone.

    Args:
        optimizers: Those of a step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
        self._key: Any = None
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._before: list[dict[Any, dict[str, Any]]] = []
        self.is_exact = False

    def take(self) -> None:
        """Remember how everything is now."""
        key = [(len(optimizer.state), _num_values(optimizer)) for optimizer in self._optimizers]
        if key != self._key:
            self._allocate()
            self._key = key
        if self._tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._tensors)  # pyright: ignore[reportPrivateImportUsage]

    def _allocate(self) -> None:
        """Find what is to be copied, and make room for it."""
        self._key = None
        values = [list(optimizer.state.values()) for optimizer in self._optimizers]
        state = [v for states in values for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        moved = [*parameters_of(self._optimizers), *state]
        counters = [tensor for tensor in state if tensor.numel() == 1]
        fused = all(_is_fused_alone(optimizer) for optimizer in self._optimizers) and len(self._optimizers) == 1
        little = sum(tensor.nbytes for tensor in moved) <= _MOST_BYTES
        self.is_exact = (fused and bool(state)) or little
        self._tensors = counters if fused and state else moved if little else []
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        self._before = [{p: dict(s) for p, s in optimizer.state.items()} for optimizer in self._optimizers]

    def restore(self) -> None:
        """Put it back; state that was created since is taken away."""
        for optimizer, before in zip(self._optimizers, self._before, strict=True):
            for p in [p for p in optimizer.state if p not in before]:
                del optimizer.state[p]
            for p, values in before.items():
                optimizer.state[p] = dict(values)
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(copy)


def _num_values(optimizer: torch.optim.Optimizer) -> int:
    return len(next(iter(optimizer.state.values()), ()))


def _is_fused_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it runs in one kernel: several groups are several, and the first may have run when the second fails."""
    groups = optimizer.param_groups
    kinds = {(p.device, p.dtype) for group in groups for p in group["params"]}
    return len(groups) == 1 and bool(groups[0].get("fused")) and len(kinds) == 1
