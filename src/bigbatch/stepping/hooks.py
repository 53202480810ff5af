"""Find an optimizer that is fused into backward: it would step once per micro-batch, on part of the gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bigbatch.errors import GradientError


class HookWatch:
    """Watches the parameters that have gradient hooks during the backwards of one step.

    A hook may read and change the gradient. One that changes the parameter, or clears ``.grad``, is an optimizer
    fused into backward, as in https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html.

    Args:
        named: The parameters by name.
        keep_copies: Copy the watched parameters, so that what a hook did can be undone.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], *, keep_copies: bool):
        self._watched = {name: p for name, p in named.items() if p._post_accumulate_grad_hooks or p._backward_hooks}  # pyright: ignore[reportAttributeAccessIssue]
        self._versions = {name: p._version for name, p in self._watched.items()}
        self._copies = {name: p.detach().clone() for name, p in self._watched.items()} if keep_copies else {}
        self._cleared: list[str] = []
        # Hooks run in the order of their registration, so ours sees what theirs have left.
        self._handles = [
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._note(name, p))
            for name, p in self._watched.items()
            if p._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
        ]

    def _note(self, name: str, p: torch.Tensor) -> None:
        if p.grad is None:
            self._cleared.append(name)

    def check(self) -> None:
        """Raise ``GradientError`` if a hook has changed a parameter or cleared a gradient."""
        changed = [name for name, p in self._watched.items() if self._has_changed(name, p)]
        if changed or self._cleared:
            did = f"changed {sorted(changed)}" if changed else f"cleared .grad of {sorted(set(self._cleared))}"
            raise GradientError(
                f"During backward a gradient hook {did}. An optimizer that runs inside backward steps once per "
                "micro-batch, on a part of the gradient. Remove its hooks and give the optimizer to Step, or train "
                f"with one micro-batch and without bigbatch."
            )

    def _has_changed(self, name: str, p: torch.Tensor) -> bool:
        if p._version != self._versions[name]:
            return True
        # Writing to .data leaves no version behind.
        return name in self._copies and not torch.equal(p.detach(), self._copies[name])

    def undo(self) -> None:
        """Put the parameters back, as far as there are copies."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                if self._has_changed(name, self._watched[name]):
                    self._watched[name].copy_(copy)

    def stop(self) -> None:
        """Take our own hooks off."""
        for handle in self._handles:
            handle.remove()
