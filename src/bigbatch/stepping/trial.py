"""Run a step for real and put everything back, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.stepping.checks import check_no_gradients, parameters_of
from bigbatch.stepping.undo import Generators

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step


@contextmanager
def put_back_afterwards(step: Step) -> Iterator[None]:
    """Keep parameters, buffers, optimizer and scaler state on the host, and restore them at the end.

    Copies lie on the host, so that a trial on a device needs no more of its memory than a step does.
    """
    check_no_gradients(step.named_parameters())
    tensors = [(t, _copy(t)) for t in _tensors_of(step)]
    optimizers = [(optimizer, _OptimizerState(optimizer)) for optimizer in step.optimizers]
    scaler = step.accumulator.precision.scaler
    scaler_state = None if scaler is None else copy.deepcopy(scaler.__dict__)
    generators = Generators(step.accumulator.device)
    try:
        yield
    finally:
        step.clear()
        with torch.no_grad():
            for tensor, kept in tensors:
                tensor.copy_(kept)
        for optimizer, state in optimizers:
            state.restore(optimizer)
        if scaler is not None and scaler_state is not None:
            scaler.__dict__.update(scaler_state)
        generators.restore()


def _tensors_of(step: Step) -> list[torch.Tensor]:
    buffers = list(step.model.buffers())
    return [*step.model.parameters(), *step.named_parameters().values(), *buffers]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


class _OptimizerState:
    """State of an optimizer as it was; tensors that were there keep their identity."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._state = {p: {k: (v, self._kept(v)) for k, v in state.items()} for p, state in optimizer.state.items()}
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    @staticmethod
    def _kept(value: Any) -> Any:
        return _copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.clear()
        for p, state in self._state.items():
            restored = optimizer.state[p] = {}
            for name, (value, kept) in state.items():
                if isinstance(value, torch.Tensor):
                    with torch.no_grad():
                        value.copy_(kept)
                restored[name] = value if isinstance(value, torch.Tensor) else kept
        for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
            for name in [name for name in group if name != "params" and name not in kept]:
                del group[name]
            group.update(kept)


def materialise_state(step: Step) -> None:
    """Let the optimizers create their state, which they do at their first step: a step with zero gradients."""
    for p in parameters_of(step.optimizers):
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    for optimizer in step.optimizers:
        optimizer.step()
    step.clear()
