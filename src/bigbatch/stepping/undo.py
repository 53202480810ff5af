"""What a step touches beside parameters and gradients, so that a failed one leaves it as it was."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import torch

_SMALL_BYTES = 64 * 1024


@dataclass
class _Buffer:
    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    changes: bool = False
    copy: torch.Tensor | None = None

    def look(self) -> None:
        """Note whether it changed since the last look."""
        now = self.owner._buffers.get(self.name)
        if now is None or self.changes:
            return
        # By value where there is a copy, because the kernel of BatchNorm leaves no new version.
        same = now is self.tensor and _version_of(now) == self.version
        self.changes = not same or (self.copy is not None and not torch.equal(self.copy, now))
        self.tensor, self.version = now, _version_of(now)

    def keep(self) -> None:
        """Copy it as it is now."""
        now = self.owner._buffers.get(self.name)
        if now is not None:
            self.tensor, self.copy = now, now.detach().clone()


class Undo:
    """Copies of the buffers that forwards change, and of the random number generators.

    The first step copies all buffers. Later ones copy the small ones, and those that were seen to change: a causal mask
    of a few MiB is not copied each time.

    Args:
        model: Whose buffers are kept.
        left_out: Ids of buffers that somebody else puts back.
    """

    def __init__(self, model: torch.nn.Module, left_out: frozenset[int] = frozenset()):
        self._buffers = [
            _Buffer(module, name, tensor, _version_of(tensor))
            for module in model.modules()
            for name, tensor in module._buffers.items()
            if tensor is not None and id(tensor) not in left_out
        ]
        self._first = True
        self.rng = Generators(torch.device("cpu"))

    def take(self, device: torch.device, *, everywhere: bool = False) -> None:
        """Remember how everything is now; ``everywhere``: the random numbers of Python and NumPy too."""
        self.rng = Generators(device, everywhere=everywhere)
        for buffer in self._buffers:
            buffer.look()
            if self._first or buffer.changes or buffer.tensor.nbytes <= _SMALL_BYTES:
                buffer.keep()
        self._first = False

    def let_go(self) -> None:
        """The step has succeeded: free the copies, and learn from them what changes."""
        for buffer in self._buffers:
            buffer.look()
            buffer.copy = None

    def restore(self, *, random_numbers: bool = True) -> None:
        """Put it back; ``random_numbers=False`` leaves the generators where they are."""
        with torch.no_grad():
            for buffer in self._buffers:
                if buffer.copy is not None:
                    buffer.owner._buffers[buffer.name] = buffer.tensor
                    # What is the same is left alone: an expanded tensor cannot be written to.
                    if not torch.equal(buffer.tensor, buffer.copy):
                        buffer.tensor.copy_(buffer.copy)
        if random_numbers:
            self.rng.restore()


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


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
