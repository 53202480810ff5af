"""The learning rate and the length of the schedule when the batch size changes."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from bigbatch.errors import ArgumentError, OptionError
from bigbatch.stepping.checks import optimizers_of
from bigbatch.values import check_positive


def total_steps(num_samples: int, batch_size: int, *, epochs: int = 1, drop_last: bool = False) -> int:
    """Optimizer steps of a run, for a schedule that needs to know its end.

    Each epoch ends with a smaller batch when ``batch_size`` does not divide the data, and that batch makes a step too.

    >>> total_steps(1797, 512, epochs=3)
    12

    Args:
        num_samples: Samples in an epoch.
        batch_size: Samples in one step, over all ranks.
        epochs: Times that the data is seen.
        drop_last: The smaller batch is left out.
    """
    for name, size in (("num_samples", num_samples), ("batch_size", batch_size), ("epochs", epochs)):
        check_positive(name, size)
    per_epoch = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    if per_epoch == 0:
        raise OptionError(f"drop_last leaves no step: {num_samples} samples are fewer than a batch of {batch_size}.")
    return per_epoch * epochs


def scale_learning_rate(
    optimizer: Optimizer | Any,
    *,
    from_batch_size: int,
    to_batch_size: int,
    rule: Literal["linear", "sqrt"] = "sqrt",
    warmup_steps: int = 0,
) -> LambdaLR | None:
    r"""Multiply the learning rate by what the batch grew by, or its square root.

    ``"linear"`` is for SGD (Goyal et al. 2017, https://arxiv.org/abs/1706.02677), ``"sqrt"`` for Adam and its kin
    (Malladi et al. 2022, https://arxiv.org/abs/2205.10287). Both are starting points: see docs/learning-rate.md.

    Args:
        optimizer: Its groups are changed in place: ``lr``, and ``initial_lr`` where a scheduler has set it. Make the
            scheduler of the run after this, from the new learning rate.
        from_batch_size: The batch size that the learning rate was tuned for.
        to_batch_size: The batch size to train with.
        rule: ``"linear"`` or ``"sqrt"``.
        warmup_steps: Optimizer steps over which the learning rate rises linearly to its new value.

    Returns:
        The scheduler of the warm-up, for ``Step(scheduler=...)``; None without one.

    Raises:
        OptionError: A size or the rule is not what it can be.
    """
    check_positive("from_batch_size", from_batch_size)
    check_positive("to_batch_size", to_batch_size)
    if rule not in ("linear", "sqrt"):
        raise OptionError(f'rule={rule!r}; it is "linear" (SGD) or "sqrt" (Adam).')
    if warmup_steps != 0:
        check_positive("warmup_steps", warmup_steps)
    (one, *others) = optimizers_of(optimizer)
    if others:
        raise ArgumentError(f"optimizer is a list of {1 + len(others)}; call scale_learning_rate for each of them.")
    growth = to_batch_size / from_batch_size
    for group in one.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * (growth if rule == "linear" else math.sqrt(growth))
    if warmup_steps == 0:
        return None
    return LambdaLR(one, lambda step: min(1.0, (step + 1) / warmup_steps))
