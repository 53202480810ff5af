"""What a step touches beside parameters and gradients, so that a failed one leaves it as it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
        same = now is self.tensor and now._version == self.version
        self.changes = not same or (self.copy is not None and not torch.equal(self.copy, now))
        self.tensor, self.version = now, now._version

    def keep(self) -> None:
        """Copy it as it is now."""
        now = self.owner._buffers.get(self.name)
        if now is not None:
            self.tensor, self.copy = now, now.detach().clone()


class Undo:
    """Copies of the buffers that forwards change, and of the random number generators.

    The first step copies all buffers. Later ones copy those that were seen to change: a causal mask of a few MiB is
    not copied each time.

    Args:
        model: Whose buffers are kept.
        left_out: Ids of buffers that somebody else puts back.
    """

    def __init__(self, model: torch.nn.Module, left_out: frozenset[int] = frozenset()):
        self._buffers = [
            _Buffer(module, name, tensor, tensor._version)
            for module in model.modules()
            for name, tensor in module._buffers.items()
            if tensor is not None and id(tensor) not in left_out
        ]
        self._first = True
        self.rng = Generators(torch.device("cpu"))

    def take(self, device: torch.device) -> None:
        """Remember how everything is now."""
        self.rng = Generators(device)
        for buffer in self._buffers:
            buffer.look()
            if self._first or buffer.changes:
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
                    buffer.tensor.copy_(buffer.copy)
        if random_numbers:
            self.rng.restore()


class Generators:
    """State of the default random number generators of the host and of one device, when made."""

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None
        self._states = self._now()

    def _now(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device is not None:
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def were_used(self) -> bool:
        """Whether random numbers were drawn since."""
        return not all(torch.equal(before, now) for before, now in zip(self._states, self._now(), strict=True))

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self._states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(self._states[1], self._device)
