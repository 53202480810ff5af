"""Find an optimizer that is fused into backward: it would step once per micro-batch, on part of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bigbatch.errors import GradientError
from bigbatch.units import format_names


class HookWatch:
    """Watches the parameters during the backwards of one step.

    A hook may read and change the gradient. One that changes a parameter, or clears ``.grad``, is an optimizer fused
    into backward, as in https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html.

    Args:
        named: The parameters by name.
        modules: The modules of the model; their backward hooks may change parameters too.
        trusted: Hooks that earlier steps have found to be harmless. With others, parameters are copied, so that what
            they do can be undone.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], modules: Iterable[nn.Module], trusted: set[Any]):
        self._named = named
        self.hooks = set(_hooks_of_modules(modules))
        reach_all = not self.hooks <= trusted
        self._hooked = {name: p for name, p in named.items() if _hooks_of(p)}
        for p in self._hooked.values():
            self.hooks.update(_hooks_of(p))
        self._versions = {name: p._version for name, p in named.items()}
        watched: Mapping[str, torch.Tensor] = {} if self.hooks <= trusted else self._hooked
        if reach_all:
            watched = named
        self._copies = {name: p.detach().clone() for name, p in watched.items()}
        self._gradients: dict[str, torch.Tensor | None] = {}
        self._cleared: list[str] = []
        # Hooks run in the order of their registration, so ours sees what theirs have left.
        self._handles = [
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._note(name, p))
            for name, p in self._hooked.items()
            if p._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
        ]

    def _note(self, name: str, p: torch.Tensor) -> None:
        if p.grad is None:
            self._cleared.append(name)

    def check(self) -> None:
        """Raise ``GradientError`` if a hook has changed a parameter or cleared a gradient; after each backward."""
        now = [p._version for p in self._named.values()]
        if now == list(self._versions.values()) and not self._hooked and not self._copies:
            return
        changed = [name for name in self._named if self._has_changed(name)]
        cleared = sorted({*self._cleared, *self._replaced()})
        if changed or cleared:
            did = f"changed {format_names(changed)}" if changed else f"cleared .grad of {format_names(cleared)}"
            lost = [name for name in changed if name not in self._copies]
            raise GradientError(
                f"During backward a gradient hook {did}. An optimizer that runs inside backward steps once per "
                "micro-batch, on a part of the gradient. Remove its hooks and give the optimizer to Step, or train "
                f"with one micro-batch and without bigbatch."
                + (f" What the hook did to {format_names(lost)} could not be undone." if lost else "")
            )

    def _has_changed(self, name: str) -> bool:
        if self._named[name]._version != self._versions[name]:
            return True
        # Writing to .data leaves no version behind.
        return name in self._copies and not torch.equal(self._named[name].detach(), self._copies[name])

    def _replaced(self) -> list[str]:
        """Parameters whose gradient began again: backward adds in place, so the tensor stays the same."""
        found = []
        for name, p in self._hooked.items():
            before, now = self._gradients.get(name), p.grad
            if before is not None and now is not before and not before.is_sparse:
                found.append(name)
            self._gradients[name] = now
        return found

    def undo(self) -> None:
        """Put the parameters back, as far as there are copies."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                if self._has_changed(name):
                    self._named[name].copy_(copy)

    def stop(self) -> None:
        """Take our own hooks off."""
        for handle in self._handles:
            handle.remove()


def _hooks_of(p: Any) -> list[Any]:
    return [*(p._post_accumulate_grad_hooks or {}).values(), *(p._backward_hooks or {}).values()]


def _hooks_of_modules(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        if module._backward_hooks or module._backward_pre_hooks:
            yield from module._backward_hooks.values()
            yield from module._backward_pre_hooks.values()
