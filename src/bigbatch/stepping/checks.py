"""What can be told about the arguments of a step before anything runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bigbatch.batch.logical import Pieces
from bigbatch.batch.weighing import for_term
from bigbatch.errors import ArgumentError, GradientError, LossError, OptionError
from bigbatch.stepping.exactness import EXACT_WITH_WHOLE_BATCH_LOSS
from bigbatch.units import format_names
from bigbatch.values import StepOptions

_A_LOSS_FN = "loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"


def check_model(model: Any) -> None:
    """Raise ``ArgumentError`` unless it is a module."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model is {_described(model)}; it is one torch.nn.Module. Several go into one: "
            f"nn.ModuleDict(dict(generator=..., discriminator=...))."
        )


def check_loss_fn(loss_fn: Any) -> None:
    """Raise ``ArgumentError`` unless it can be called as ``loss_fn(model, micro_batch)``."""
    inner = loss_fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if call := _call_of_plain_loss(inner):
        what = f"the class {inner.__name__}" if isinstance(inner, type) else call
        raise ArgumentError(
            f"loss_fn is {what}, which takes predictions and targets; it is a function of the model and a micro-batch. "
            f"Write: loss_fn=lambda model, batch: {call}(model(batch[0]), batch[1])"
        )
    if not callable(loss_fn):
        raise ArgumentError(
            f"loss_fn is {_described(loss_fn)}; it is a function of the model and a micro-batch: {_A_LOSS_FN}"
        )
    if why := why_not_called(loss_fn, 2):
        raise ArgumentError(
            f"loss_fn{inspect.signature(loss_fn)} cannot be called with the model and a micro-batch ({why}). "
            f"For example: {_A_LOSS_FN}"
        )


def why_not_called(function: Any, num_arguments: int) -> str:
    """Why it cannot be called with so many arguments, as Python says it; empty when it can."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin without a signature: the call will tell
        pass
    return ""


def _call_of_plain_loss(loss_fn: Any) -> str | None:
    """How one would write a loss of torch, or a module; None for anything else."""
    kind = loss_fn if isinstance(loss_fn, type) else type(loss_fn)
    if issubclass(kind, nn.Module):
        return f"nn.{kind.__name__}()" if kind.__module__.startswith("torch.nn.") else f"{kind.__name__}()"
    return f"F.{loss_fn.__name__}" if getattr(loss_fn, "__module__", None) == "torch.nn.functional" else None


def optimizers_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a step as a tuple.

    Raises:
        ArgumentError: One is no optimizer.
        OptionError: One needs a closure.
    """
    found = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    if not found:
        raise ArgumentError("optimizer is an empty list; give at least one: torch.optim.AdamW(model.parameters()).")
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            hint = " Call it: AdamW(model.parameters())." if isinstance(one, type) else ""
            raise ArgumentError(
                f"optimizer is {_described(one)}; it is a torch.optim.Optimizer, or a list of them.{hint}"
            )
        if isinstance(one, torch.optim.LBFGS):
            raise OptionError(
                "LBFGS evaluates the loss several times in one step, which a step here does not do. Call bb.accumulate "
                "in its closure, or take another optimizer."
            )
    seen: dict[int, int] = {}
    for i, one in enumerate(found):
        for p in parameters_of((one,)):
            if seen.setdefault(id(p), i) != i:
                raise OptionError(
                    f"A parameter of shape {tuple(p.shape)} is in two optimizers; give it to one of them."
                )
    return found


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """All parameters of the optimizers, in order."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def update_is_lean(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether ``fused=True`` or ``foreach=False`` would not make the update of any of them need less.

    They are set already, the optimizer knows none of them, or it is an SGD that moves each parameter by its gradient.
    """

    def is_lean(group: dict[str, Any]) -> bool:
        set_already = bool(group.get("fused")) or group.get("foreach") is False
        knows_none = "fused" not in group and "foreach" not in group
        is_plain = group.get("momentum") == 0 and "alpha" not in group and not group.get("weight_decay")
        return set_already or knows_none or is_plain

    return all(is_lean(group) for optimizer in optimizers for group in optimizer.param_groups)


def schedulers_of(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[LRScheduler, ...]:
    """The schedulers of a step as a tuple.

    Raises:
        OptionError: One is no scheduler, needs a metric, or moves another optimizer.
    """
    found = () if scheduler is None else tuple(scheduler) if isinstance(scheduler, Sequence) else (scheduler,)
    for one in found:
        if isinstance(one, ReduceLROnPlateau):
            raise OptionError(
                "ReduceLROnPlateau needs a metric, which a step does not have. Leave it out of the options and call "
                "scheduler.step(metric) yourself after each evaluation."
            )
        if not callable(getattr(one, "step", None)) or isinstance(one, torch.optim.Optimizer | type):
            raise OptionError(f"scheduler is {_described(one)}; it is a torch.optim.lr_scheduler, or a list of them.")
        if why_not_called(one.step, 0):
            raise OptionError(
                f"{type(one).__name__}.step{inspect.signature(one.step)} needs an argument, such as a metric, which "
                f"a step does not have. Leave it out of the options and step it yourself."
            )
        if all(getattr(one, "optimizer", own) is not own for own in optimizers):
            raise OptionError(
                f"{type(one).__name__} moves the learning rate of an optimizer that is not one of this step's; "
                f"make it from the optimizer that Step gets."
            )
    return found


_is_by_itself: ContextVar[bool] = ContextVar("_is_by_itself", default=False)


@contextmanager
def by_itself() -> Iterator[None]:
    """Within the block this process is one alone, whatever process group it is in: to try what others need not see."""
    token = _is_by_itself.set(True)
    try:
        yield
    finally:
        _is_by_itself.reset(token)


def num_ranks() -> int:
    """Of the process group that this process is in, unless it is ``by_itself``."""
    distributed = torch.distributed
    is_grouped = distributed.is_available() and distributed.is_initialized() and not _is_by_itself.get()
    return distributed.get_world_size() if is_grouped else 1


def check_parameters(parameters: Any) -> list[torch.Tensor]:
    """The ``parameters=`` of ``accumulate`` as a list.

    Raises:
        ArgumentError: They are no leaf tensors that need a gradient.
    """
    if isinstance(parameters, torch.Tensor | nn.Module) or not isinstance(parameters, Iterable):
        raise ArgumentError(f"parameters is {_described(parameters)}; write parameters=discriminator.parameters().")
    found = list(parameters)
    for i, p in enumerate(found):
        if not isinstance(p, torch.Tensor) or not p.is_leaf:
            what = "a tensor that was computed" if isinstance(p, torch.Tensor) else _described(p)
            raise ArgumentError(
                f"parameters[{i}] is {what}; gradients are added to leaves: discriminator.parameters()."
            )
    found = [p for p in found if p.requires_grad]
    if not found:
        raise ArgumentError(
            "parameters holds nothing that needs a gradient; call requires_grad_() on what is to be trained."
        )
    return found


def check_no_gradients(named: dict[str, torch.Tensor], of_optimizers: Sequence[torch.Tensor] = ()) -> None:
    """Raise ``GradientError`` when a gradient lies there before a step, also of a parameter that was frozen since."""
    found = [name for name, p in named.items() if p.grad is not None]
    if not found:
        # An optimizer goes on moving a frozen parameter as long as it has a gradient.
        found = [f"optimizer parameter {i} (frozen)" for i, p in enumerate(of_optimizers) if p.grad is not None]
    if found:
        raise GradientError(
            f".grad of {format_names(found)} is set before the step, which would add to it. Call optimizer.zero_grad() "
            f"first; to add to a gradient on purpose, use bb.accumulate."
        )


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_goes_with_whole_batch_loss(options: StepOptions) -> None:
    """Raise ``OptionError`` for what a ``WholeBatchLoss`` cannot have."""
    if options.batch_norm == "exact":
        raise OptionError(
            'A WholeBatchLoss and batch_norm="exact" do not go together: both need the forwards of all micro-batches, '
            f"each in another way. {EXACT_WITH_WHOLE_BATCH_LOSS}"
        )


def check_may_be_grouped(options: StepOptions, sees_batch_statistics: bool, has_whole_batch_loss: bool) -> None:
    """Raise ``OptionError`` where it matters which samples are in a micro-batch, or where they stand in the batch."""
    if has_whole_batch_loss:
        raise OptionError(
            "A WholeBatchLoss sees the outputs of all samples in the order of the batch, and length= moves samples to "
            "other places. Leave length= out."
        )
    if options.dropout == "per-sample":
        raise OptionError(
            'dropout="per-sample" draws the mask of a sample from its place in the batch, and length= moves samples '
            'to other places. Give dropout="native", or leave length= out.'
        )
    if options.noise_scale:
        raise OptionError(
            "noise_scale=True compares micro-batches as random parts of the batch, and length= makes them of samples "
            "of like length, which are none. Leave one of them out."
        )
    if sees_batch_statistics and options.batch_norm != "frozen":
        wrong = "with their own mean and variance, which differ from those of the batch"
        if options.batch_norm == "exact":
            wrong = "with the mean and variance of a batch of less padding, which it sees too"
        raise OptionError(
            f"length= puts samples of like length into one micro-batch, and BatchNorm in train mode would normalise "
            f'them {wrong}. Use batch_norm="frozen", GroupNorm or LayerNorm, or leave length= out.'
        )


def check_something_counts(pieces: Pieces) -> None:
    """Raise ``LossError`` where the weight of the whole batch is known to be 0."""
    for term, total in (pieces.totals or {}).items():
        if total == 0:
            raise LossError(
                f"The weight{for_term(term)} is 0 over the whole batch: nothing in it counts (for example, every token "
                f"is padding), so its mean loss is 0 / 0. Leave such a batch out."
            )


def nothing_needs_a_gradient() -> LossError:
    """The error of a loss that reaches no parameter."""
    return LossError(
        "The loss does not depend on any parameter that needs a gradient. Something between the parameters and the "
        "loss runs under torch.no_grad(), calls .detach() or .item(), or all parameters are frozen "
        "(requires_grad=False)."
    )


def nothing_counts(pieces: Pieces) -> bool:
    """Whether every micro-batch has the weight 0; they must be at hand."""
    return not any(any(piece.weights.values()) for piece in pieces.pieces)
