"""The first pass of a loss of the whole batch: the outputs of all micro-batches, without graphs but one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bigbatch.batch.logical import Piece, Pieces
from bigbatch.batch.moving import on_device
from bigbatch.planning.costs import MOST_WITH_MASKS
from bigbatch.stepping.coupled.masks import Masks
from bigbatch.stepping.coupled.outputs import check_leaf, detached, named_leaves, with_leaves
from bigbatch.stepping.generators import Generators
from bigbatch.stepping.placing import say_where

if TYPE_CHECKING:
    from bigbatch.stepping.coupled.whole_batch import WholeBatchLoss
    from bigbatch.stepping.micro_batch_loop import Accumulator

Leaves = list[tuple[str, Any]]
"""Of the outputs of a micro-batch, with their paths."""


class Outputs(NamedTuple):
    """What the first pass leaves.

    Attributes:
        nesting: How the outputs are nested; None on a rank without samples.
        parts: By micro-batch, its leaves, without graph.
        before: By micro-batch, random numbers before its forward.
        masks: By micro-batch, those of dropout that its second forward need not draw.
        kept: The leaves of the first micro-batch with their graph, if that was to be kept.
    """

    nesting: Any
    parts: list[Leaves]
    before: list[Generators]
    masks: dict[int, Masks]
    kept: Leaves | None


def first_pass(
    of: Accumulator, given: WholeBatchLoss, pieces: Pieces, *, keeps: bool, keeps_masks: bool, first_is_last: bool
) -> Outputs:
    """Run the forward of each micro-batch.

    Args:
        of: Whose step it is.
        given: The loss.
        pieces: The micro-batches; they know their numbers.
        keeps: Keep the graph of the first one.
        keeps_masks: Keep masks of dropout of ``MOST_WITH_MASKS`` micro-batches that run again, at most.
        first_is_last: Run the first one after all others, so that no forward is beside its graph. So also where no
            graph is kept, because the order decides which random numbers each draws.

    Raises:
        LossError: An output is neither per sample nor a declared sum.
    """
    turns = list(pieces.pieces)
    sizes = [piece.num_samples for piece in turns if not piece.idle]
    outputs: list[Any] = [None] * len(sizes)
    before: list[Any] = [None] * len(sizes)
    twice = range(int(keeps), len(sizes))[:MOST_WITH_MASKS]
    kept_masks = {number: Masks() for number in twice} if keeps_masks else {}
    for piece in on_device([*turns[1:], turns[0]] if first_is_last else turns, of.device):
        if piece.idle:
            _run_idle(of, given, piece)
            continue
        number = piece.micro_batch.number
        dropout = of.dropout.forward(piece.num_samples, first=sum(sizes[:number]))
        drawing = kept_masks[number].drawing() if number in kept_masks else nullcontext()
        try:
            with torch.set_grad_enabled(keeps and number == 0), of.precision.forward(of.device.type), dropout, drawing:
                # Inside, because that is where masks of samples keep the number of their call.
                before[number] = Generators(of.device, everywhere=True)
                outputs[number] = given.forward(of.model, piece.micro_batch.micro_batch)
            for path, leaf in named_leaves(outputs[number]):
                check_leaf(path, leaf, piece.num_samples)
        except Exception as error:
            say_where(error, sizes[: number + 1], pieces)
            raise
        del piece
    nesting, parts = outputs[0] if outputs else None, [list(named_leaves(one)) for one in outputs]
    if not keeps:
        return Outputs(nesting, parts, before, kept_masks, None)
    kept, parts[0] = parts[0], [(path, detached(leaf)) for path, leaf in parts[0]]
    return Outputs(with_leaves(nesting, [leaf for _, leaf in parts[0]]), parts, before, kept_masks, kept)


def _run_idle(of: Accumulator, given: WholeBatchLoss, piece: Piece) -> None:
    """Where all ranks must run as many forwards, because there are collectives in them."""
    if of.ranks.reducer.must_run_together:
        with torch.no_grad(), of.precision.forward(of.device.type), of.dropout.forward(piece.num_samples):
            given.forward(of.model, piece.micro_batch.micro_batch)
