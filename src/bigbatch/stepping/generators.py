"""The random number generators of torch, Python and NumPy: as they are now, put back, and from a seed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Generators:
    """State of the default random number generators of the host and of one device, when made.

    Args:
        device: The device beside the host.
        everywhere: Those of Python and, where it is loaded, NumPy too.
    """

    def __init__(self, device: torch.device, *, everywhere: bool = False):
        self._device = device if device.type == "cuda" else None
        self._states = self._now()
        numpy = sys.modules.get("numpy") if everywhere else None
        self._of_python = random.getstate() if everywhere else None
        self._of_numpy = numpy.random.get_state(legacy=False) if numpy is not None else None

    def _now(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device is not None:
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def were_used(self) -> bool:
        """Whether torch has drawn random numbers since."""
        return not all(torch.equal(before, now) for before, now in zip(self._states, self._now(), strict=True))

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self._states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(self._states[1], self._device)
        if self._of_python is not None:
            random.setstate(self._of_python)
        if self._of_numpy is not None:
            sys.modules["numpy"].random.set_state(self._of_numpy)


@contextmanager
def host_generators_put_back() -> Iterator[None]:
    """Leave those of the host as they were before the block."""
    generators = Generators(torch.device("cpu"), everywhere=True)
    try:
        yield
    finally:
        generators.restore()


def seed_host(number: int) -> None:
    """Set those of the host alone: what a device draws from (dropout) goes on as it was."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)
