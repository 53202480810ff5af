"""What ``optimizer.step()`` touches, so that running out of memory inside it can be undone exactly.

Copies are made before the optimizer begins and freed when it has ended, so they lie beside no activations. A fused
optimizer has no temporaries: when an allocation fails, nothing but its step counters has moved. Of others all that they
move is copied, as long as that is little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from bigbatch.stepping.checks import parameters_of

_MOST_BYTES = 16 * 2**20
"""Copies of more than this, in each step, would cost more than they are worth."""
_FEW_BYTES = 2 * 2**20
"""Copies of no more than this are always made."""
_MOST_OF_A_STEP = 0.01
_DEAR_IN_A_ROW = 5


class Copies:
    """Copies of tensors while something moves them.

    Args:
        tensors: What will be moved.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = tensors
        self._copies = [tensor.detach().clone() for tensor in tensors]

    def restore(self) -> None:
        """Put them back; may be begun again."""
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(copy)


def are_little(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether to copy them in each step costs nothing to speak of."""
    return sum(tensor.nbytes for tensor in map(_here, tensors)) <= _MOST_BYTES


def _here(tensor: Any) -> torch.Tensor:
    """What this rank has of a tensor that is spread over several."""
    return getattr(tensor, "_local_tensor", tensor)


class OptimizerUndo:
    """Copies of parameters and optimizer state, or of the step counters alone.

    Args:
        optimizers: Those of a step.

    Attributes:
        is_exact: Whether ``restore`` puts everything back.
        may_give_up: Make no more copies when they take too much of a step. Off where steps are tried or traced, which
            take other times.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
        self._key: Any = None
        self._tensors: list[torch.Tensor] = []
        self._copies: Copies | None = None
        self._before: list[dict[Any, dict[str, Any]]] = []
        self._settings: list[dict[str, Any]] = []
        self._began = 0.0
        self._dear_in_a_row = 0
        self._may_be_dear = False
        self.is_exact = False
        self.may_give_up = True

    def take(self) -> None:
        """Remember how everything is now."""
        # By identity: load_state_dict puts other tensors there, and some optimizers count in plain numbers.
        key = [id(v) for optimizer in self._optimizers for s in optimizer.state.values() for v in s.values()]
        if key != self._key:
            self._find()
            self._key = key
        # Some optimizers count in their settings, or change the learning rate by themselves.
        self._settings = [dict(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        began = time.perf_counter()
        self._copies = Copies(self._tensors)
        if self._may_be_dear and self.may_give_up:
            self._weigh(began, time.perf_counter())

    def _weigh(self, began: float, ended: float) -> None:
        """Make no more copies when they take more than a hundredth of the time from step to step, several times."""
        is_dear = ended - began > _MOST_OF_A_STEP * (began - self._began)
        self._dear_in_a_row = self._dear_in_a_row + 1 if is_dear else 0
        self._began = began
        if self._dear_in_a_row == _DEAR_IN_A_ROW:
            self._tensors, self._may_be_dear, self.is_exact = [], False, False

    def let_go(self) -> None:
        """Free the copies."""
        self._copies = None

    def _find(self) -> None:
        """Find what is to be copied."""
        states = [s for optimizer in self._optimizers for s in optimizer.state.values()]
        state = [value for values in states for value in values.values() if isinstance(value, torch.Tensor)]
        moved = [*parameters_of(self._optimizers), *state]
        fused = bool(state) and len(self._optimizers) == 1 and _is_fused_alone(self._optimizers[0])
        little = are_little(moved)
        self.is_exact = fused or little
        self._tensors = [tensor for tensor in state if tensor.numel() == 1] if fused else moved if little else []
        self._may_be_dear = sum(tensor.nbytes for tensor in map(_here, self._tensors)) > _FEW_BYTES
        self._before = [{p: dict(s) for p, s in optimizer.state.items()} for optimizer in self._optimizers]

    def restore(self) -> None:
        """Put it back; state that was created since is taken away."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, settings in zip(groups, self._settings, strict=True):
            for name in [name for name in group if name not in settings]:
                del group[name]
            group.update(settings)
        for optimizer, before in zip(self._optimizers, self._before, strict=True):
            for p in [p for p in optimizer.state if p not in before]:
                del optimizer.state[p]
            for p, values in before.items():
                optimizer.state[p] = dict(values)
        if self._copies is not None:
            self._copies.restore()


def _is_fused_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it runs in one kernel: several groups are several, and the first may have run when the second fails."""
    groups = optimizer.param_groups
    kinds = {(p.device, p.dtype) for group in groups for p in group["params"]}
    return len(groups) == 1 and bool(groups[0].get("fused")) and len(kinds) == 1
