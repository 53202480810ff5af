"""Run a step for real and put everything back, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.stepping.checks import check_no_gradients, parameters_of
from bigbatch.stepping.generators import Generators

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step


@contextmanager
def put_back_afterwards(step: Step) -> Iterator[None]:
    """Keep parameters, buffers, optimizer and scaler state on the host, and restore them at the end.

    Copies lie on the host, so that a trial on a device needs no more of its memory than a step does.
    """
    named = step.named_parameters()
    check_no_gradients(named, parameters_of(step.optimizers))
    accumulator = step.accumulator
    modules = [module for module in (step.model, step.options.ema) if isinstance(module, torch.nn.Module)]
    tensors = [*named.values(), *(p for module in modules for p in module.parameters())]
    parameters = [_Kept(p) for p in {id(p): p for p in tensors}.values()]
    owners = [owner for module in modules for owner in module.modules()]
    buffers = [(owner._buffers, name, _Kept(t)) for owner in owners for name, t in owner._buffers.items()]
    optimizers = [_OptimizerState(optimizer) for optimizer in step.optimizers]
    scaler = accumulator.precision.scaler
    scaler_state = None if scaler is None else copy.deepcopy(scaler.__dict__)
    generators, listener = Generators(accumulator.device, everywhere=True), step.on_micro_batch
    step.on_micro_batch = None
    undo = step.optimizer_undo
    could_give_up = undo is not None and undo.may_give_up
    if undo is not None:
        undo.may_give_up = False
    for group in (group for optimizer in step.optimizers for group in optimizer.param_groups):
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * 0  # many steps of one micro-batch would lead the weights away, or to NaN
    try:
        yield
    finally:
        step.clear()
        for kept in parameters:
            kept.restore()
        for owner, name, kept in buffers:
            owner[name] = kept.restore()
        for state in optimizers:
            state.restore()
        if scaler is not None and scaler_state is not None:
            scaler.__dict__.update(scaler_state)
        generators.restore()
        step.on_micro_batch = listener
        if undo is not None:
            undo.may_give_up = could_give_up


class _Kept:
    """A value as it is now; a tensor comes back as the same tensor, of one that is spread over ranks its own part."""

    def __init__(self, value: Any):
        self._value = value
        is_tensor = isinstance(value, torch.Tensor)
        self._copy = _here(value).detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(value)

    def restore(self) -> Any:
        if not isinstance(self._value, torch.Tensor):
            return self._copy
        here = _here(self._value).detach()
        # Not by its version: fused kernels leave none. One that is the same is left alone, so that nobody who watches
        # versions takes it for changed.
        if not torch.equal(here.to("cpu"), self._copy):
            with torch.no_grad():
                here.copy_(self._copy)
        return self._value


def _here(tensor: torch.Tensor) -> torch.Tensor:
    # Operations on a DTensor may talk to all ranks, of which some may be elsewhere.
    return getattr(tensor, "_local_tensor", tensor)


class _OptimizerState:
    """State and settings of an optimizer as they are now."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._state = {p: _kept_values(state) for p, state in optimizer.state.items()}
        self._groups = [_kept_values(group, but="params") for group in optimizer.param_groups]

    def restore(self) -> None:
        self._optimizer.state.clear()
        for p, state in self._state.items():
            self._optimizer.state[p] = {name: kept.restore() for name, kept in state.items()}
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in [name for name in group if name != "params" and name not in kept]:
                del group[name]
            group.update({name: value.restore() for name, value in kept.items()})


def _kept_values(values: MutableMapping[str, Any], but: str | None = None) -> dict[str, _Kept]:
    return {name: _Kept(value) for name, value in values.items() if name != but}


def step_with_zeros(step: Step) -> None:
    """Let the optimizers step with gradients of zero, as the step of a skipped batch would."""
    for p in parameters_of(step.optimizers):
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    step.step_optimizers()
    step.clear()
