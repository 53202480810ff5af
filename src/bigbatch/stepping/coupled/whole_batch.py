r"""Losses that look across samples: contrastive, pairwise, Dice, correlation, balance of a mixture.

Such a loss is no sum over micro-batches, but the *outputs* $o_i$ that it looks at are made sample by sample. With
$g_i = \partial L / \partial o_i$ from the outputs of the whole batch,

$$ \nabla_\theta L = \sum_k \nabla_\theta \sum_{i \in B_k} \langle o_i(\theta), g_i \rangle, $$

so two passes give the exact gradient: outputs without graph, the loss and $g$ once, and then the outputs again, each
micro-batch with its graph and the backward from its rows of $g$. The second pass draws the random numbers of the first
(Gao et al., 2021, https://arxiv.org/abs/2101.06983, who name it GradCache).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.batch.logical import LogicalBatch, Piece, Pieces
from bigbatch.batch.moving import on_device
from bigbatch.errors import ArgumentError, LossError
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.stepping.checks import check_one_process, why_not_called
from bigbatch.stepping.coupled.outputs import (
    can_vary,
    check_leaf,
    joined_leaves,
    named_leaves,
    num_rows,
    opened,
    with_leaves,
)
from bigbatch.stepping.gradients import graph_of, leaves_of
from bigbatch.stepping.losses import Sum, terms_of
from bigbatch.stepping.placing import say_where
from bigbatch.stepping.precision import Precision, at_least_float32
from bigbatch.stepping.undo import Generators, Undo
from bigbatch.values import StepOptions

if TYPE_CHECKING:
    from bigbatch.stepping.micro_batch_loop import Accumulator
    from bigbatch.stepping.normalization.batchnorm import MergedStatistics


@dataclass(frozen=True)
class WholeBatchLoss:
    """A loss of the outputs of all samples: the ``loss_fn`` of a loss that is no mean over samples.

    The gradient is that of the one big batch, whatever the cut: the forward runs twice, and the loss once. A batch in
    one micro-batch runs once.

    >>> import bigbatch as bb
    >>> model = torch.nn.Linear(4, 3)
    >>> forward = lambda model, batch: (model(batch[0]), model(batch[1]))
    >>> loss = lambda outputs, batch: (outputs[0].T @ outputs[1]).square().mean()
    >>> batch = torch.randn(10, 4), torch.randn(10, 4)
    >>> bb.verify(model, WholeBatchLoss(forward, loss), batch).equal
    True

    Attributes:
        forward: Called as ``forward(model, micro_batch)``. Returns what the loss looks at, in any nesting of dicts,
            tuples, lists and dataclasses: tensors with the samples in dimension 0, which are put together in order,
            and ``Sum(tensor)`` of any shape, which are added up.
        loss: Called as ``loss(outputs, batch)`` with the outputs of the whole batch, a ``Sum`` as its tensor, and the
            batch as the step got it, on the device (with ``collate``, all samples collated; of a ``LogicalBatch``,
            its ``whole``). Returns a 0-d tensor, or a dict or tuple of them that are added up. Parameters in it, such
            as a temperature, get their gradient once.

    Raises:
        ArgumentError: One of them is no function of two arguments.
    """

    forward: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        for name, given, line in (
            ("forward", self.forward, "forward=lambda model, micro_batch: model(micro_batch[0])"),
            ("loss", self.loss, "loss=lambda outputs, batch: bb.sup_con(outputs, batch[1])"),
        ):
            if why := why_not_called(given.forward if isinstance(given, torch.nn.Module) else given, 2):
                raise ArgumentError(
                    f"{name} of WholeBatchLoss is a {type(given).__name__} that cannot be called with two arguments "
                    f"({why}). Write {line}."
                )

    def __call__(self, model: Any, batch: Any) -> dict[str, Sum]:
        """The loss of a whole batch at once, by term."""
        return self.at_once(model, batch, batch)

    def at_once(self, model: Any, micro_batch: Any, batch: Any) -> dict[str, Sum]:
        """The loss of a batch in one micro-batch, by term."""
        outputs = self.forward(model, micro_batch)
        found = list(named_leaves(outputs))
        for path, leaf in found:
            check_leaf(path, leaf)
        terms = _terms(self.loss(with_leaves(outputs, [opened(leaf) for _, leaf in found]), batch))
        return {name: Sum(value) for name, value in terms.items()}


@dataclass(frozen=True)
class _Numbered:
    """A micro-batch, and the how manyth it is."""

    micro_batch: Any
    number: int


@dataclass
class _Between:
    """What the second pass needs of the first.

    Attributes:
        paths: Of the leaves of the outputs.
        sizes: By micro-batch, the rows of each leaf; None for one that is added up or no tensor.
        terms: The loss of the whole batch.
        gradients: At each leaf; None where there is none.
        inside: Parameters in the loss, with their gradients.
        unit: What the gradients were begun with: the loss scale.
        before: Random numbers before each micro-batch.
        after: Those after the loss.
    """

    paths: list[str]
    sizes: list[list[int | None]]
    terms: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]
    inside: list[tuple[torch.Tensor, torch.Tensor]]
    unit: torch.Tensor | None
    before: list[Generators]
    after: Generators

    def rows(self, number: int) -> Iterator[torch.Tensor | None]:
        """The gradients at the leaves of a micro-batch."""
        for i, gradient in enumerate(self.gradients):
            size = self.sizes[number][i]
            if gradient is None or size is None:
                yield gradient
            else:
                start = sum(sizes[i] or 0 for sizes in self.sizes[:number])
                yield gradient[start : start + size]


class TwoPasses:
    """Runs a ``WholeBatchLoss`` for a step: the first pass and the loss, then its part in the loop over micro-batches.

    Args:
        given: The loss.
        precision: Of the step.
    """

    def __init__(self, given: WholeBatchLoss, precision: Precision):
        self._given = given
        self._precision = precision
        self._whole: Any = None
        self._between: _Between | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a batch is kept."""
        return self._whole is None and self._between is None

    @contextmanager
    def prepared(
        self,
        of: Accumulator,
        batch: Any,
        pieces: Pieces,
        undo: Undo,
        statistics: MergedStatistics | None,
    ) -> Iterator[Pieces]:
        """Make the first pass; within the block, ``second`` is the ``loss_fn`` of the pieces that are given.

        Args:
            of: Whose step it is.
            batch: What the step got.
            pieces: Its micro-batches.
            undo, statistics: With which buffers are put back after the first pass, so that they are updated once.
        """
        check_one_process("bb.WholeBatchLoss", "it sees the outputs of its own rank alone")
        listed = list(pieces.pieces)
        numbered = [piece._replace(micro_batch=_Numbered(piece.micro_batch, k)) for k, piece in enumerate(listed)]
        pieces = Pieces(numbered, len(listed), pieces.totals)
        self._whole = whole_of(batch, listed, of.options)
        try:
            if len(listed) > 1:
                self._between = self._first(of, pieces)
                undo.restore(random_numbers=False)
                if statistics:
                    statistics.restore()
                    statistics.start()
            yield pieces
        finally:
            self._whole = self._between = None

    def second(self, model: Any, numbered: _Numbered) -> dict[str, Sum]:
        """What a micro-batch adds to the loss, with the gradient of the loss of the whole batch."""
        between = self._between
        if between is None:
            return self._given.at_once(model, numbered.micro_batch, self._whole)
        number = numbered.number
        between.before[number].restore()
        found = list(named_leaves(self._given.forward(model, numbered.micro_batch)))
        if number == len(between.before) - 1:
            between.after.restore()
        _check_same_again(found, between, number)
        pairs = [
            (opened(leaf), gradient)
            for (_, leaf), gradient in zip(found, between.rows(number), strict=True)
            if gradient is not None
        ]
        is_first = number == 0
        terms = {name: term if is_first else torch.zeros_like(term) for name, term in between.terms.items()}
        carrier = next(iter(terms))
        terms[carrier] = _with_gradients(terms[carrier], [*pairs, *(between.inside if is_first else [])], between.unit)
        return {name: Sum(term) for name, term in terms.items()}

    def _first(self, of: Accumulator, pieces: Pieces) -> _Between:
        outputs, before, done = [], [], []
        device = of.device
        with torch.no_grad():
            for piece in on_device(pieces.pieces, device):
                done.append(piece.num_samples)
                masks = of.dropout.forward(piece.num_samples, first=sum(done[:-1]))
                try:
                    with self._precision.forward(device.type), masks:
                        # Inside, because that is where masks of samples keep the number of their call.
                        before.append(Generators(device, everywhere=True))
                        outputs.append(self._given.forward(of.model, piece.micro_batch.micro_batch))
                    for path, leaf in named_leaves(outputs[-1]):
                        check_leaf(path, leaf, piece.num_samples)
                except Exception as error:
                    say_where(error, done, pieces)
                    raise
                del piece
            nesting, parts = outputs[0], [list(named_leaves(one)) for one in outputs]
            del outputs
            paths, sizes = [path for path, _ in parts[0]], [[num_rows(leaf) for _, leaf in part] for part in parts]
            leaves = list(joined_leaves(parts))
        whole = next(iter(on_device([Piece(self._whole, 0, {})], device))).micro_batch
        terms, gradients, inside, unit = self._differentiated(nesting, leaves, whole, device)
        return _Between(paths, sizes, terms, gradients, inside, unit, before, Generators(device, everywhere=True))

    def _differentiated(self, nesting: Any, leaves: list[Any], batch: Any, device: torch.device) -> Any:
        """The loss of the whole batch, its gradients at the leaves and at what is in it, and what these began with."""
        varying = [leaf for leaf in leaves if can_vary(leaf)]
        for leaf in varying:
            leaf.requires_grad_()
        with torch.enable_grad(), self._precision.forward(device.type):
            try:
                returned = self._given.loss(with_leaves(nesting, leaves), batch)
            except Exception as error:
                hints = [_LESS_MEMORY] * is_out_of_memory(error) + [_NO_WHOLE] * (batch is None)
                error.add_note(" ".join(["In the loss over the outputs of the whole batch.", *hints]))
                raise
        terms = _terms(returned)
        reaching = [value for value in terms.values() if value.requires_grad]
        if not reaching:
            raise LossError(
                "The loss of WholeBatchLoss does not depend on outputs or parameters in a way that has a gradient. "
                "Something in loss runs under torch.no_grad(), or calls .detach(), .item() or argmax."
            )
        scaler = self._precision.scaler
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
        return {name: value.detach() for name, value in terms.items()}, gradients, pairs, unit


_LESS_MEMORY = (
    "Smaller micro-batches do not make it need less memory; computing it in chunks of rows does, as bb.info_nce, "
    "bb.siglip and bb.sup_con do."
)
_NO_WHOLE = "It was given None as the batch, because the LogicalBatch has none: LogicalBatch(micro_batches, whole=...)."


class _WithGradients(torch.autograd.Function):
    """A number whose gradients at some tensors are known: a chain rule that begins there."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, unit: Any, gradients: Sequence[Any], *tensors: torch.Tensor) -> Any:
        ctx.unit, ctx.gradients = unit, gradients
        return number.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, start: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # With a loss scale the gradients have it already, or 16 bits would have lost them; and so has the start.
        factor = start if ctx.unit is None else start / ctx.unit
        wanted = zip(ctx.gradients, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(g * factor.to(g) if needed else None for g, needed in wanted)


def _with_gradients(number: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], unit: Any) -> Any:
    return _WithGradients.apply(number, unit, [g for _, g in pairs], *(tensor for tensor, _ in pairs))


def whole_of(batch: Any, pieces: Sequence[Piece], options: StepOptions) -> Any:
    """What the loss gets as the batch."""
    if isinstance(batch, LogicalBatch):
        return pieces[0].micro_batch if batch.whole is None and len(pieces) == 1 else batch.whole
    if options.collate is None:
        return batch
    return pieces[0].micro_batch if len(pieces) == 1 else options.collate(list(batch))


def _check_same_again(found: Sequence[tuple[str, Any]], between: _Between, number: int) -> None:
    """Raise ``LossError`` when the second forward of a micro-batch gives other outputs than the first one."""
    now = [(path, num_rows(leaf)) for path, leaf in found]
    before = list(zip(between.paths, between.sizes[number], strict=True))
    if now != before:
        raise LossError(
            f"forward returned outputs {now} (path, rows), but {before} for the same micro-batch the first time. It "
            f"depends on more than the model and the micro-batch: a counter, a cache, a generator of its own."
        )


def _terms(returned: Any) -> dict[str, torch.Tensor]:
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
