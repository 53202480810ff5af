"""Whether a forward normalises by its micro-batch in a function (``F.batch_norm``), where no layer shows it."""

from __future__ import annotations

from typing import Any

from torch import nn

from bigbatch.stepping.gradients import graph_of
from bigbatch.stepping.shares import Share


class FunctionalBatchNorm:
    """Looked up in the graph of one loss, and again when the model is switched between train and eval.

    The kernels of ``F.batch_norm`` (native, cuDNN, MIOpen) say in their node whether they took the statistics of what
    they got. What no gradient goes through has no node, and compiled code shows none: it is not seen.

    Args:
        model: Whose training flag tells train from eval.

    Attributes:
        is_due: The next loss is to be looked at.
    """

    def __init__(self, model: nn.Module):
        self.is_due = False
        self._model = model
        self._found: dict[bool, bool] = {}

    @property
    def is_used(self) -> bool:
        """Whether the forward does, as far as was seen."""
        return self._found.get(self._model.training, False)

    def begin(self, *, layers_show: bool) -> None:
        """Before the first micro-batch of a step.

        Args:
            layers_show: A layer takes statistics of micro-batches by the same kernels, so that nothing can be told.
        """
        self.is_due = not layers_show and self._model.training not in self._found

    def look(self, shares: list[Share]) -> None:
        """At the graph of these losses, of some micro-batch."""
        self.is_due = False
        nodes = graph_of(share.value for share in shares)
        norms = {node for node in nodes if "BatchNorm" in node.name() and getattr(node, "_saved_training", False)}
        self._found[self._model.training] = bool(norms - _of_instances(nodes, norms))


def _of_instances(nodes: set[Any], norms: set[Any]) -> set[Any]:
    """Those of InstanceNorm, which lays its N samples of C channels out as one of N * C, and views the result back."""
    found = set()
    for node in nodes:
        name = node.name()
        if not ("View" in name or "Reshape" in name):
            continue
        inner = node.next_functions[0][0]
        if inner in norms:
            (one, channels, *_), (n, *rest) = flat, back = _shape_of(inner), _shape_of(node)
            if one == 1 and (back == flat or (n > 1 and rest and n * rest[0] == channels)):
                found.add(inner)
    return found


def _shape_of(node: Any) -> tuple[int, ...]:
    """Of what a node has returned."""
    return tuple(node._input_metadata[0].shape)
