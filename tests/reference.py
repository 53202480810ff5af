"""The plain way, written out: what a step must equal. Imports nothing of bigbatch.

The truth is always the one big batch in float64 on a private copy of the model. The loops here are those that people
write by hand; the tests of bigbatch compare with the truth, and use the loops to show that a tolerance can fail.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor | None]
LossFunction = Callable[[Any, Any], Tensor]


def to_float64(value: Any) -> Any:
    """The same structure with every floating point tensor in float64; everything else is passed on."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return type(value)({name: to_float64(inner) for name, inner in value.items()})  # pyright: ignore[reportCallIssue]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_float64(inner) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(to_float64(inner) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {spec.name: to_float64(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
        return dataclasses.replace(value, **inner)
    return value


def gradients(model: nn.Module) -> Gradients:
    """A copy of every ``.grad`` by the parameter's name; None stays None. Tied parameters are there once."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def big_batch_gradients(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Gradients:
    """Gradients of the one true big batch, in float64, on a private copy of the model.

    Args:
        loss_fn: Called as ``loss_fn(model, batch)``; returns the plain loss of the whole batch, shape ``()``.
    """
    private = copy.deepcopy(model).double()
    private.zero_grad(set_to_none=True)
    loss_fn(private, to_float64(batch)).backward()
    return gradients(private)


def big_batch_loss(model: nn.Module, loss_fn: LossFunction, batch: Any) -> float:
    """The loss of the one true big batch, in float64, on a private copy of the model."""
    return float(loss_fn(copy.deepcopy(model).double(), to_float64(batch)).detach())


def gradient_errors(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> dict[str, float]:
    r"""How far each gradient is from the expected one, by the parameter's name.

    The error of parameter $p$ is

    $$ \frac{\lVert \Delta_p \rVert}{\max(\lVert g_p \rVert,\ 10^{-3} \lVert g \rVert / \sqrt{P})}, $$

    over $P$ parameters. The second term is there because some true gradients are zero (attention's key bias, a bias
    before BatchNorm) and only rounding is left of them. It is infinite where only one of the two is None, where a
    gradient is not finite, or where the names differ.
    """
    norms = {name: float(torch.linalg.vector_norm(g.double())) for name, g in expected.items() if g is not None}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    floor = 1e-3 * whole / max(len(norms), 1) ** 0.5
    errors = {}
    for name in [*expected, *(set(found) - set(expected))]:
        errors[name] = _error(found.get(name), expected.get(name), max(norms.get(name, 0.0), floor))
        if (name in found) != (name in expected):
            errors[name] = float("inf")
    return errors


def _error(found: Tensor | None, expected: Tensor | None, scale: float) -> float:
    if found is None and expected is None:
        return 0.0
    if found is None or expected is None or found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    distance = float(torch.linalg.vector_norm(found.double() - expected.double()))
    return distance / scale if scale > 0 else (0.0 if distance == 0 else float("inf"))


def gradient_error(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> float:
    """The largest of ``gradient_errors``."""
    return max(gradient_errors(found, expected).values(), default=0.0)


def assert_same_gradients(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], *, tolerance: float = 1e-12
) -> None:
    """Raise ``AssertionError`` naming the worst parameter unless every gradient error is at most ``tolerance``."""
    errors = gradient_errors(found, expected)
    worst = max(errors, key=lambda name: errors[name], default=None)
    if worst is None or errors[worst] <= tolerance:
        return
    missing = {
        side: "missing" if worst not in side_gradients else "None" if side_gradients[worst] is None else "a tensor"
        for side, side_gradients in (("found", found), ("expected", expected))
    }
    outside = sum(error > tolerance for error in errors.values())
    raise AssertionError(
        f"{worst}: gradient error {errors[worst]:.3g}, more than {tolerance:.3g} (found is {missing['found']}, "
        f"expected is {missing['expected']}); {outside} of {len(errors)} parameters are outside."
    )


def assert_same_weights(found: nn.Module, expected: nn.Module, *, tolerance: float) -> None:
    """Raise ``AssertionError`` naming the worst one unless all parameters and buffers agree.

    The error is measured like that of gradients: relative to each tensor, with a floor for those that are near zero.
    """
    states = [dict(model.state_dict()) for model in (found, expected)]
    assert_same_gradients(states[0], states[1], tolerance=tolerance)


def slice_batch(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Samples ``start`` to ``stop`` of a flat dict batch; 0-d tensors and other values are shared."""
    return {
        name: value[start:stop] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()
    }


def cut_batch(batch: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Micro-batches of these sizes, in order."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [slice_batch(batch, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def micro_batch_sizes(num_samples: int, micro_batch_size: int) -> list[int]:
    """Full micro-batches and a rest: 10 by 4 is 4, 4, 2."""
    return [min(micro_batch_size, num_samples - start) for start in range(0, num_samples, micro_batch_size)]


def accumulate_by_hand(
    model: nn.Module, loss_fn: LossFunction, micro_batches: Iterable[Any], shares: Sequence[float | Tensor]
) -> Tensor:
    """The careful hand-written loop: each mean loss times its share of the weight; returns the sum of these.

    Args:
        shares: Of each micro-batch, its weight over the weight of the whole batch. A share of 0 is not run,
            because a mean over nothing is NaN.
    """
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch, share in zip(micro_batches, shares, strict=True):
        if share == 0:
            continue
        loss = loss_fn(model, micro_batch) * share
        loss.backward()
        total += loss.detach().double()
    return total


class RecordingSGD(torch.optim.SGD):
    """SGD that keeps a copy of the gradients that each step was taken with, in the order of the parameters.

    Attributes:
        seen: One entry a step: the gradients by name, as ``gradients`` returns them.
    """

    def __init__(self, model: nn.Module, lr: float = 0.0, **options: Any):
        super().__init__(model.parameters(), lr=lr, **options)
        self._model = model
        self.seen: list[Gradients] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append(gradients(self._model))
        return super().step(closure)


@dataclasses.dataclass
class History:
    """What a loop saw, one entry for each step.

    Attributes:
        losses: Of the whole batch, before the step.
        norms: Of the gradient, before clipping.
        learning_rates: Of the first group of the first optimizer, that the step was taken with.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    learning_rates: list[float] = dataclasses.field(default_factory=list)


def train_with_big_batches(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    max_grad_norm: float | None = None,
    schedulers: Sequence[Any] = (),
    update_average: Callable[[], Any] = lambda: None,
) -> History:
    """The loop of a user who has the memory: one forward and backward of the whole batch for each step.

    Args:
        max_grad_norm: Clip to this with ``torch.nn.utils.clip_grad_norm_``, over all optimizers together.
        update_average: Called after each step.
    """
    history = History()
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    for batch in batches:
        history.learning_rates.append(optimizers[0].param_groups[0]["lr"])
        loss = loss_fn(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if max_grad_norm is None else max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        update_average()
        history.losses.append(float(loss.detach()))
        history.norms.append(float(norm))
    return history
