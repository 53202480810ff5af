"""Lay what a run keeps on a card aside in host memory, so that several runs take turns on it, one there at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bigbatch.training.building import Parts


class Parked:
    """Parameters, buffers, optimizer state and average of a run; they lie on the device within ``with``, and else not.

    Tensors stay the same objects, so nobody who holds one notices. On CPU nothing moves.
    """

    def __init__(self, parts: Parts, device: torch.device):
        self._parts = parts
        self._device = device
        self._moved: list[torch.Tensor] = []

    def park(self) -> None:
        """Move what is on the device to the host."""
        if self._device.type == "cpu":
            return
        self._moved = [tensor for tensor in _tensors(self._parts) if tensor.device.type == self._device.type]
        for tensor in self._moved:
            tensor.data = tensor.data.to("cpu")

    def __enter__(self) -> Parked:
        for tensor in self._moved:
            tensor.data = tensor.data.to(self._device)
        self._moved = []
        return self

    def __exit__(self, *_: object) -> None:
        self.park()


def num_bytes(parts: Parts) -> int:
    """Bytes of what is kept."""
    return sum(tensor.nbytes for tensor in _tensors(parts))


def _tensors(parts: Parts) -> Iterator[torch.Tensor]:
    """Each once: a tied weight, and a parameter that the average shares with the model, are the same tensor."""
    modules = [module for module in (parts.model, parts.options.ema) if isinstance(module, nn.Module)]
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    states = (state for optimizer in parts.optimizers for state in optimizer.state.values())
    found += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    yield from {id(tensor): tensor for tensor in found}.values()
