"""The loss of the outputs of a whole batch, and its gradients at the outputs and at what is in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bigbatch.errors import LossError
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.stepping.coupled.outputs import can_vary, with_leaves
from bigbatch.stepping.gradients import graph_of, leaves_of
from bigbatch.stepping.losses import terms_of
from bigbatch.stepping.precision import Precision, at_least_float32

_LESS_MEMORY = (
    "Smaller micro-batches do not make it need less memory; computing it in chunks of rows does, as bb.info_nce, "
    "bb.siglip and bb.sup_con do."
)
_NO_WHOLE = (
    "It was given None as the batch: a LogicalBatch has one only as LogicalBatch(micro_batches, whole=...), and on "
    "several ranks its samples must be found in it. Give whole= or batch_dims=, or let forward return what loss needs."
)


class Differentiated(NamedTuple):
    """A loss and its gradients.

    Attributes:
        terms: The loss, by term.
        gradients: At each leaf of the outputs; None where there is none.
        inside: Tensors that the loss depends on beside the outputs, such as a temperature, with their gradients.
        unit: What the gradients were begun with, the loss scale; None: 1.
    """

    terms: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]
    inside: list[tuple[torch.Tensor, torch.Tensor]]
    unit: torch.Tensor | None


def differentiated(
    loss: Callable[[Any, Any], Any],
    precision: Precision,
    nesting: Any,
    leaves: Sequence[Any],
    batch: Any,
    device: torch.device,
) -> Differentiated:
    """The loss of the whole batch, and its gradients.

    Args:
        loss: As given: of outputs and batch.
        precision: Of the step.
        nesting: Of the outputs.
        leaves: Of the whole batch, in the order of ``named_leaves``.
        batch: What the loss gets beside them.
        device: Of the model.

    Raises:
        LossError: It has no gradient, or is of a kind that needs micro-batches.
    """
    varying = [leaf for leaf in leaves if can_vary(leaf)]
    for leaf in varying:
        leaf.requires_grad_()
    with torch.enable_grad(), precision.forward(device.type):
        try:
            returned = loss(with_leaves(nesting, leaves), batch)
        except Exception as error:
            hints = [_LESS_MEMORY] * is_out_of_memory(error) + [_NO_WHOLE] * (batch is None)
            error.add_note(" ".join(["In the loss over the outputs of the whole batch.", *hints]))
            raise
    terms = plain_terms(returned)
    reaching = [value for value in terms.values() if value.requires_grad]
    if not reaching:
        raise LossError(
            "The loss of WholeBatchLoss does not depend on outputs or parameters in a way that has a gradient. "
            "Something in loss runs under torch.no_grad(), or calls .detach(), .item() or argmax."
        )
    scaler = precision.scaler
    unit = None if scaler is None else scaler.scale(torch.ones((), device=device))
    known = {id(leaf) for leaf in varying}
    inside = [leaf for leaf in _leaves_reached(reaching) if id(leaf) not in known]
    found = torch.autograd.grad(
        reaching,
        [*varying, *inside],
        [torch.ones_like(value) if unit is None else unit.to(value) for value in reaching],
        allow_unused=True,
    )
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(varying, found, strict=False)}
    gradients = [by_leaf.get(id(leaf)) for leaf in leaves]
    pairs = [(p, g) for p, g in zip(inside, found[len(varying) :], strict=True) if g is not None]
    return Differentiated({name: value.detach() for name, value in terms.items()}, gradients, pairs, unit)


def plain_terms(returned: Any) -> dict[str, torch.Tensor]:
    """The terms of the loss of the whole batch, which are plain numbers."""
    found = terms_of(returned)
    for term in found:
        if term.kind != "mean":
            raise LossError(
                f"The loss of WholeBatchLoss returned a bb.{term.kind.capitalize()} for the term {term.name!r}. It has "
                f"the whole batch, so there is nothing to put together: return a 0-d tensor."
            )
    # Those of 16 bits are widened here, because the loss scale may be more than they hold.
    return {term.name: term.value.to(at_least_float32(term.value.dtype)) for term in found}


def _leaves_reached(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves of the graph of these, such as a temperature."""
    found = [*(value for value in values if value.is_leaf), *leaves_of(graph_of(values))]
    return list({id(leaf): leaf for leaf in found}.values())
