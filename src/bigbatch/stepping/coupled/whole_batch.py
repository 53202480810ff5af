r"""Losses that look across samples: contrastive, pairwise, Dice, correlation, balance of a mixture.

Such a loss is no sum over micro-batches, but the *outputs* $o_i$ that it looks at are made sample by sample. With
$g_i = \partial L / \partial o_i$ from the outputs of the whole batch,

$$ \nabla_\theta L = \sum_k \nabla_\theta \sum_{i \in B_k} \langle o_i(\theta), g_i \rangle, $$

so two passes give the exact gradient: outputs without graph, the loss and $g$ once, and then the outputs again, each
micro-batch with its graph and the backward from its rows of $g$. The second pass draws the random numbers of the first
(Gao et al., 2021, https://arxiv.org/abs/2101.06983, who name it GradCache). Of one micro-batch the graph is kept while
the loss is computed, so that of $K$ forwards $K - 1$ run twice; all of them where forwards write buffers or have
collectives. On a CPU the second forward takes the larger masks of dropout from the first (``masks``).

Over several ranks the outputs of all are put together between the two passes (``over_ranks``). A rank with a single
micro-batch keeps its graph until then, and runs its forward once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.batch.logical import LogicalBatch, Piece, Pieces
from bigbatch.batch.moving import on_device
from bigbatch.errors import ArgumentError
from bigbatch.memory.out_of_memory import is_out_of_memory, release
from bigbatch.stepping.checks import why_not_called
from bigbatch.stepping.compiled import is_compiled
from bigbatch.stepping.coupled.batch_of_ranks import layout_of
from bigbatch.stepping.coupled.between import Between, Numbered, check_same_again, with_gradients, with_numbers
from bigbatch.stepping.coupled.differentiating import differentiated, plain_terms
from bigbatch.stepping.coupled.first_pass import Leaves, Outputs, first_pass
from bigbatch.stepping.coupled.masks import standing_in
from bigbatch.stepping.coupled.outputs import (
    check_leaf,
    detached,
    joined_leaves,
    named_leaves,
    num_rows,
    opened,
    with_leaves,
)
from bigbatch.stepping.coupled.over_ranks import alike, check_inside, put_together, share_of
from bigbatch.stepping.generators import Generators
from bigbatch.stepping.insisting import insist
from bigbatch.stepping.losses import Sum
from bigbatch.stepping.precision import Precision
from bigbatch.stepping.undo import Undo
from bigbatch.values import StepOptions

if TYPE_CHECKING:
    from bigbatch.stepping.micro_batch_loop import Accumulator
    from bigbatch.stepping.normalization.batchnorm import MergedStatistics


@dataclass(frozen=True)
class WholeBatchLoss:
    """A loss of the outputs of all samples: the ``loss_fn`` of a loss that is no mean over samples.

    The gradient is that of the one big batch, whatever the cut: the loss runs once, and the forward twice for all
    micro-batches, or all but one.

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
            as a temperature, get their gradient once. Over several ranks it is called on each, with outputs and
            batch of all of them.

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
        terms = plain_terms(self.loss(with_leaves(outputs, [opened(leaf) for _, leaf in found]), batch))
        return {name: Sum(value) for name, value in terms.items()}


class TwoPasses:
    """Runs a ``WholeBatchLoss`` for a step: the first pass and the loss, then its part in the loop over micro-batches.

    Args:
        given: The loss.
        precision: Of the step.

    Attributes:
        keeps_first: Whether the graph of the first micro-batch may be kept from the first pass; no more when memory ran
            out in the loss beside it.
        has_kept: It was, in the last step.
        mask_entries: Of each mask of dropout that the last micro-batch of the last step might keep.
    """

    def __init__(self, given: WholeBatchLoss, precision: Precision):
        self.keeps_first, self.has_kept = True, False
        self.mask_entries: list[int] = []
        self._keeps_masks = True
        self._in_order = False  # because forwards write buffers
        self._given = given
        self._precision = precision
        self._whole: Any = None
        self._between: Between | None = None
        self._kept: Leaves | None = None  # outputs of the first micro-batch, with their graph
        self._meeting: tuple[Accumulator, Pieces] | None = None  # with the other ranks, when there are some

    @contextmanager
    def without_keeping(self) -> Iterator[None]:
        """Within the block the first micro-batch runs as the others do, forward and all, and no mask is kept."""
        before = self.keeps_first, self._keeps_masks
        self.keeps_first = self._keeps_masks = False
        try:
            yield
        finally:
            self.keeps_first, self._keeps_masks = before

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a batch is kept."""
        return self._whole is None and self._between is None and self._meeting is None

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
        listed = list(pieces.pieces)
        pieces = replace(pieces, pieces=list(with_numbers(listed)), count=len(listed))
        self._whole = whole_of(batch, [piece for piece in listed if not piece.idle], of.options)
        self._meeting = (of, pieces) if of.ranks.are_several else None
        self.has_kept = False
        try:
            # For all of a step, so that compiled code in it sees one function. What is called outside of steps too is
            # compiled once more.
            with standing_in() if self._may_keep_masks(of) else nullcontext():
                if len(listed) != 1 or not self._may_run_once(of, statistics):
                    finish = self._over_ranks if self._meeting else self._at_once
                    self._between = finish(self._outputs(of, listed, pieces, undo, statistics), of)
                yield pieces
        finally:
            self._whole = self._between = self._meeting = self._kept = None

    def _may_run_once(self, of: Accumulator, statistics: MergedStatistics | None) -> bool:
        """Whether the only micro-batch of this rank needs no forward before that with its graph."""
        if self._meeting is None:
            return True
        # Collectives inside the model must come in the same order on all ranks, and a forward that is run to count what
        # BatchNorm sees must come to no meeting.
        return not of.ranks.reducer.reduces_inside and not (statistics is not None and statistics.is_active)

    def _may_keep_masks(self, of: Accumulator) -> bool:
        """Whether masks may be kept: of torch's own dropout, on a CPU, in a model that is not compiled."""
        is_plain = of.device.type == "cpu" and of.options.dropout == "native"
        return self._keeps_masks and is_plain and not is_compiled(of.model)

    def _may_be_last(self, of: Accumulator, pieces: list[Piece], statistics: MergedStatistics | None) -> bool:
        """Whether the first micro-batch may come after all others: it writes nothing and meets nobody."""
        writes = self._in_order or of.sees_batch_statistics or (statistics is not None and statistics.is_active)
        is_alone = len(pieces) < 2 or pieces[0].idle
        return not (writes or is_alone or of.ranks.reducer.must_run_together)

    def second(self, model: Any, numbered: Numbered) -> dict[str, Sum]:
        """What a micro-batch adds to the loss, with the gradient of the loss of the whole batch."""
        if self._between is None and self._meeting is None:
            return self._given.at_once(model, numbered.micro_batch, self._whole)
        if self._between is None:
            found, self._between = self._once(model, numbered)
        else:
            found = self._again(self._between, model, numbered)
        between = self._between
        pairs = [
            (opened(leaf), torch.zeros_like(opened(leaf)) if numbered.idle else gradient)
            for (_, leaf), gradient in zip(found, between.rows(numbered), strict=True)
            if gradient is not None
        ]
        # At the end, because DDP reduces in the last backward and waits for all parameters there.
        inside = between.inside if numbered.is_last else []
        is_first = numbered.number == 0
        terms = {name: term if is_first else torch.zeros_like(term) for name, term in between.terms.items()}
        carrier = next(iter(terms))
        terms[carrier] = with_gradients(terms[carrier], [*pairs, *inside], between.unit)
        return {name: Sum(term) for name, term in terms.items()}

    def _again(self, between: Between, model: Any, numbered: Numbered) -> list[tuple[str, Any]]:
        """The outputs of a micro-batch whose forward has run before, now with their graph."""
        number = numbered.number
        if number == 0 and self._kept is not None:
            found, self._kept, self.has_kept = self._kept, None, True
            return found
        if not numbered.idle:
            between.before[number].restore()
        masks = between.masks.pop(number, None)
        with masks.again() if masks and not numbered.idle else nullcontext():
            found = list(named_leaves(self._given.forward(model, numbered.micro_batch)))
        if number == len(between.before) - 1:
            between.after.restore()
        if not numbered.idle:
            check_same_again(found, between, number)
        return found

    def _once(self, model: Any, numbered: Numbered) -> tuple[list[tuple[str, Any]], Between]:
        """The outputs of the only micro-batch of this rank, with their graph, and what the others make of them."""
        outputs = self._given.forward(model, numbered.micro_batch)
        found = list(named_leaves(outputs))
        for path, leaf in found:
            check_leaf(path, leaf, numbered.num_samples)
        assert self._meeting is not None
        parts = [[(path, detached(leaf)) for path, leaf in found]]
        return found, self._over_ranks(Outputs(outputs, parts, [], {}, None), self._meeting[0])

    def _outputs(
        self, of: Accumulator, listed: list[Piece], pieces: Pieces, undo: Undo, statistics: MergedStatistics | None
    ) -> Outputs:
        """Make the first pass. Buffers are as before it, and as the second pass and the loss find and leave them."""
        start = Generators(of.device, everywhere=True)
        run = partial(first_pass, of, self._given, pieces, keeps_masks=self._may_keep_masks(of))
        first_is_last = self._may_be_last(of, listed, statistics)
        found = run(keeps=first_is_last and self.keeps_first, first_is_last=first_is_last)
        if first_is_last and undo.have_moved:
            # Each forward may see what those before it have written, and they run again in another order.
            self.keeps_first, self._in_order = False, True
            del found
            undo.restore(random_numbers=False)
            start.restore()
            found = run(keeps=False, first_is_last=False)
        self.mask_entries = found.masks[max(found.masks)].num_entries if found.masks else []
        undo.restore(random_numbers=False)
        if statistics:
            statistics.restore()
            statistics.start()
        return found

    def _at_once(self, outputs: Outputs, of: Accumulator) -> Between:
        """The loss over the outputs of all micro-batches, in one process."""
        device = of.device
        nesting, parts, before, masks, self._kept = outputs
        del outputs  # nobody else may hold the graph
        paths, sizes = [path for path, _ in parts[0]], [[num_rows(leaf) for _, leaf in part] for part in parts]
        with torch.no_grad():
            leaves = list(joined_leaves(parts))
        parts.clear()
        whole = next(iter(on_device([Piece(self._whole, 0, {})], device))).micro_batch
        start, found = Generators(device, everywhere=True), None
        compute = partial(differentiated, self._given.loss, self._precision, nesting, leaves, whole, device)
        try:
            found = compute()
        except Exception as error:
            if self._kept is None or not is_out_of_memory(error):
                raise
        if found is None:  # out of the except block: the traceback holds what the loss has computed
            self._kept = None
            insist(release)
            start.restore()
            found = compute()
            self.keeps_first = False
        return Between(paths, sizes, *found, before, masks, Generators(device, everywhere=True))

    def _over_ranks(self, outputs: Outputs, of: Accumulator) -> Between:
        """The loss over the outputs of all ranks, of which those of this one are given."""
        nesting, parts, before, masks, self._kept = outputs
        del outputs  # nobody else may hold the graph
        sizes = [[num_rows(leaf) for _, leaf in part] for part in parts]
        share = share_of(nesting, parts, layout_of(self._whole, of.options)) if parts else None
        parts.clear()  # the rows are in the share, and soon in the whole
        whole = put_together(of.ranks, share, of.device)
        share = whole.share
        with alike(of.ranks, whole, of.device):
            try:
                found = differentiated(
                    self._given.loss, self._precision, share.nesting, whole.leaves, whole.batch, of.device
                )
            except Exception as error:
                self.keeps_first &= not is_out_of_memory(error)  # in the next attempt, which all ranks make together
                raise
        terms, gradients, inside, unit = found
        check_inside([p for p, _ in inside], of.model)
        assert self._meeting is not None
        if not self._meeting[1].part.has_constants:
            terms = {name: torch.zeros_like(term) for name, term in terms.items()}
            inside = [(p, torch.zeros_like(g)) for p, g in inside]
        after = Generators(of.device, everywhere=True)
        paths = [path for path, _ in share.leaves]
        return Between(paths, sizes, terms, whole.own_rows(gradients), inside, unit, before, masks, after)


def whole_of(batch: Any, pieces: Sequence[Piece], options: StepOptions) -> Any:
    """What the loss gets as the batch."""
    if isinstance(batch, LogicalBatch):
        return pieces[0].micro_batch if batch.whole is None and len(pieces) == 1 else batch.whole
    if options.collate is None:
        return batch
    if not pieces:
        return None  # a rank without samples
    return pieces[0].micro_batch if len(pieces) == 1 else options.collate(list(batch))
