"""What a step touches beside parameters and gradients, so that a failed one leaves it as it was."""

from __future__ import annotations

import torch

from bigbatch.stepping.generators import Generators

_SMALL_BYTES = 64 * 1024


class _Buffer:
    """One buffer of a module: as it was, and whether it is known to change."""

    def __init__(self, owner: torch.nn.Module, name: str):
        self.owner = owner
        self.name = name
        self.changes = False
        self._tensor = owner._buffers[name]
        self._version = _version_of(self._tensor)
        self._copy: torch.Tensor | None = None
        self._is_kept = False

    @property
    def is_small(self) -> bool:
        """Whether a copy costs nothing to speak of."""
        return self._tensor is None or self._tensor.nbytes <= _SMALL_BYTES

    def look(self) -> None:
        """Note whether it changed since the last look."""
        now = self.owner._buffers.get(self.name)
        same = now is self._tensor and _version_of(now) == self._version
        if same and now is not None and self._copy is not None and not self.changes and not self.is_small:
            # By value, because the kernel of BatchNorm leaves no new version. It waits for the device in the first step
            # only; small buffers are copied in each step in any case.
            same = torch.equal(self._copy, now)
        self.changes = self.changes or not same
        self._tensor, self._version = now, _version_of(now)

    def is_as_it_was(self) -> bool:
        """Whether it is as at the last look, as far as that can be seen."""
        now = self.owner._buffers.get(self.name)
        same = now is self._tensor and _version_of(now) == self._version
        return same and (now is None or self._copy is None or torch.equal(self._copy, now))

    def keep(self) -> None:
        """Remember it as it is now."""
        self._is_kept = True
        self._copy = None if self._tensor is None else self._tensor.detach().clone()

    def let_go(self) -> None:
        """Free the copy."""
        self._is_kept, self._copy = False, None

    def restore(self) -> None:
        """Put back what was kept: the same tensor with the same numbers."""
        if not self._is_kept:
            return
        self.owner._buffers[self.name] = self._tensor
        # What is the same is left alone: an expanded tensor cannot be written to.
        if self._tensor is not None and self._copy is not None and not torch.equal(self._tensor, self._copy):
            self._tensor.copy_(self._copy)


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
            _Buffer(module, name)
            for module in model.modules()
            for name, tensor in module._buffers.items()
            if id(tensor) not in left_out
        ]
        self._first = True
        self.rng = Generators(torch.device("cpu"))

    def take(self, device: torch.device, *, everywhere: bool = False) -> None:
        """Remember how everything is now; ``everywhere``: the random numbers of Python and NumPy too."""
        self.rng = Generators(device, everywhere=everywhere)
        for buffer in self._buffers:
            buffer.look()
            if self._first or buffer.changes or buffer.is_small:
                buffer.keep()
        self._first = False

    def is_needed(self) -> bool:
        """Whether something has changed since ``take``."""
        return self.rng.were_used() or self.have_moved

    @property
    def have_moved(self) -> bool:
        """Whether a buffer is another than before the step."""
        return not all(buffer.is_as_it_was() for buffer in self._buffers)

    def let_go(self) -> None:
        """The step has succeeded: free the copies, and learn from them what changes."""
        for buffer in self._buffers:
            buffer.look()
            buffer.let_go()

    def restore(self, *, random_numbers: bool = True) -> None:
        """Put it back; ``random_numbers=False`` leaves the generators where they are."""
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.restore()
        if random_numbers:
            self.rng.restore()


def _version_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version
