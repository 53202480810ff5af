"""The micro-batches of a step side by side: all forwards, which meet at each BatchNorm, and one backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bigbatch.batch.logical import Piece, Pieces
from bigbatch.batch.moving import on_device
from bigbatch.batch.structure import leaves
from bigbatch.stepping.after_backward import Accumulation
from bigbatch.stepping.distributed.ranks import Ranks
from bigbatch.stepping.distributed.settling import digest_of, same_kinds
from bigbatch.stepping.losses import Term
from bigbatch.stepping.normalization.pooled_batchnorm import PooledBatchNorm
from bigbatch.stepping.placing import say_where
from bigbatch.stepping.shares import Share


def run_side_by_side(
    pooled: PooledBatchNorm,
    pieces: Pieces,
    done: Accumulation,
    device: torch.device,
    ranks: Ranks,
    terms_of: Callable[[Piece, Pieces, Accumulation], list[Term]],
    backward: Callable[[list[Share], Accumulation], None],
) -> bool:
    """Forwards of all micro-batches and their backward. Returns whether some loss needed a gradient.

    Args:
        pooled: What joins the statistics.
        pieces: The micro-batches, at hand.
        done: Gets what they leave.
        device: Where the model is.
        ranks: Who else has some.
        terms_of: Runs the forward of one of them.
        backward: Of all losses at once.
    """
    found = list(on_device(pieces.pieces, device))
    batch = [value for piece in found for value in leaves(piece.micro_batch) if isinstance(value, torch.Tensor)]
    is_idle = all(piece.idle for piece in found)
    with pooled.running(device, batch, meetings=ranks.meetings, is_idle=is_idle):
        try:
            run = torch.no_grad()(terms_of) if is_idle else terms_of
            terms = pooled.forwards([partial(run, piece, pieces, done) for piece in found])
        except Exception as error:
            if pooled.failed is not None:
                say_where(error, done.sizes[: pooled.failed + 1], pieces)
            raise
        parts = [(done.shares.idle if is_idle else done.shares.of)(*pair) for pair in zip(terms, found, strict=True)]
        shares = [share for part in parts for share in part if share.value.requires_grad]
        del terms, parts
        digests, first = pooled.end_forwards(digest_of(done.shares.kinds), done.shares.groups)
        if len(set(digests)) > 1:
            same_kinds(ranks, done, digests)
        if first and done.gradients.inputs is not None:
            # Else backward leaves out meetings from which no way leads to these: all, on a rank without samples.
            done.gradients.inputs = [*done.gradients.inputs, *pooled.roots]
        if shares or first:
            backward([*first, *shares], done)
    return bool(shares)
