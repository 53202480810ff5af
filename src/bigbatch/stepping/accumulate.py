"""The gradient of a batch alone, for loops of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from bigbatch.batch.collating import warn_where_nothing_bounds
from bigbatch.errors import GradientError, OptionError
from bigbatch.stepping.checks import check_parameters
from bigbatch.stepping.gradients import graph_of, leaves_of
from bigbatch.stepping.insisting import insist
from bigbatch.stepping.losses import terms_of
from bigbatch.stepping.micro_batch_loop import Accumulator
from bigbatch.values import AFTER_THE_GRADIENT, StepOptions, StepResult, check_positive


def accumulate(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    micro_batch_size: int | None = None,
    parameters: Iterable[torch.Tensor] | None = None,
    **options: Any,
) -> StepResult:
    r"""Add to ``.grad`` the gradient of the loss over the whole batch, computed in micro-batches.

    With micro-batches $B_1, \dots, B_K$ of weights $w_1, \dots, w_K$ this computes

    $$ \sum_k \frac{w_k}{W} \nabla L(B_k), \qquad W = \sum_k w_k, $$

    where $L$ is the *mean* loss of a micro-batch. Weighing by $w_k / W$, and not by $1 / K$, is what keeps it equal to
    the one big batch when the micro-batches are not of one size or hold different numbers of valid tokens.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> batch = torch.randn(10, 3), torch.randn(10, 1)
    >>> result = accumulate(model, lambda m, b: (m(b[0]) - b[1]).square().mean(), batch, micro_batch_size=4)
    >>> result.micro_batch_sizes, result.exactness
    ((4, 4, 2), 'exact')

    Args:
        model: The model, as one module.
        loss_fn: Called as ``loss_fn(model, micro_batch)``. Returns the mean loss, shape ``()``, or a ``Ratio``, a
            ``Sum``, a ``Constant``, or a dict or tuple of these.
        batch: The whole batch: tensors with the samples in dimension 0, in any nesting of containers; a list of
            samples when ``collate`` is given; or a ``LogicalBatch``.
        micro_batch_size: Samples in each forward-backward; the last may hold fewer. None: all at once.
        parameters: Gradients of these alone are computed, as for one of the two networks of a GAN. None: of all
            parameters of the model.
        options: Of ``StepOptions``, those that concern the gradient.

    Returns:
        The loss of the whole batch and its terms. ``.grad`` is in the dtype of its parameter, and what was there before
        is in the sum; if anything fails, ``.grad``, buffers and the default random number generators of torch are as
        they were. Those of Python and NumPy are put back only with ``collate``, ``split`` or a function as ``weight``,
        which may draw from them.

    Raises:
        BatchError: The batch cannot be cut, or nothing in it counts.
        LossError: What ``loss_fn`` returned is no loss.
        OptionError: An option has no effect here, or a value that it cannot have.
        GradientError: An optimizer runs inside backward; or a loss whose denominator is known late reaches a parameter
            that is not in the model.
    """
    wanted = StepOptions.of(options)
    _check_concerns_the_gradient(wanted)
    if micro_batch_size is not None:
        check_positive("micro_batch_size", micro_batch_size)
    warn_where_nothing_bounds(batch, micro_batch_size, wanted)
    accumulator = Accumulator(model, loss_fn, wanted)
    named = _named_like(model, model.parameters() if parameters is None else check_parameters(parameters))
    outside = _Outside(accumulator, named) if parameters is None else None
    done = accumulator.run(batch, micro_batch_size, named, only_these=parameters is not None)
    try:
        done.shares.check_denominators()
        corrections = done.shares.corrections()
        if corrections and outside is not None:
            outside.refuse()
        done.gradients.correct(corrections)
        done.gradients.narrow()
        accumulator.precision.begin(accumulator.device)
        result = done.result()
        done.gradients.add_to_what_was_there()
    except BaseException:
        insist(lambda: accumulator.abandon(done))
        raise
    insist(accumulator.commit)
    return result


class _Outside:
    """Parameters beside the model that the first loss reaches: backward adds to them, and no correction finds them.

    Args:
        accumulator: Whose loss is looked at, where its denominator is known late.
        named: The parameters of the model.
    """

    def __init__(self, accumulator: Accumulator, named: dict[str, torch.Tensor]):
        self._known = {id(p) for p in named.values()}
        self._loss_fn = accumulator.loss_fn
        self._found: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] | None = None
        if accumulator.two_passes is None:
            accumulator.loss_fn = self._first_look

    def _first_look(self, model: Any, batch: Any) -> Any:
        returned = self._loss_fn(model, batch)
        if self._found is None:
            values = [term.value for term in terms_of(returned) if term.kind == "ratio"]
            found = [leaf for leaf in leaves_of(graph_of(values)) if isinstance(leaf, nn.Parameter)]
            beside = [p for p in found if id(p) not in self._known]
            self._found = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in beside]
        return returned

    def refuse(self) -> None:
        """Raise ``GradientError`` if there are some; their gradients are as before."""
        for p, before, copy in self._found or ():
            p.grad = before
            if before is not None and copy is not None:
                before.copy_(copy)  # backward adds in place
        if self._found:
            shapes = ", ".join(str(tuple(p.shape)) for p, *_ in self._found[:6])
            raise GradientError(
                f"The loss reaches {len(self._found)} parameters that are not in the model, of shape {shapes}, and its "
                f"denominator is known only at the end, when their gradients would have to be corrected. If they are "
                f"to be trained, give all: parameters=[*model.parameters(), other]. If not, give "
                f"parameters=model.parameters(), or detach what comes from them."
            )


def _check_concerns_the_gradient(options: StepOptions) -> None:
    plain = StepOptions()
    for name in sorted(AFTER_THE_GRADIENT):
        if getattr(options, name) != getattr(plain, name):
            raise OptionError(f"{name} is done after the gradient, by Step; accumulate only adds to .grad.")
    if options.precision in ("fp16", torch.float16):
        raise OptionError(
            'precision="fp16" scales the loss, and whoever steps must unscale it. Give the scaler that you step with: '
            "precision=scaler; the gradients are then scaled."
        )


def _named_like(model: nn.Module, parameters: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the parameters that need a gradient, by their names in the model, or by their place in the list."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names.get(id(p), f"parameter {i}"): p for i, p in enumerate(parameters) if p.requires_grad}
