"""What a step says once of the losses and the batches that it gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bigbatch.batch.logical import Pieces
from bigbatch.batch.weighing import has_ignored_labels
from bigbatch.errors import warn

if TYPE_CHECKING:
    from bigbatch.stepping.after_backward import Accumulation

_log = logging.getLogger("bigbatch")


class Remarks:
    """Those of one step; each is made at the first batch that gives rise to it.

    Args:
        weight_is_default: No ``weight`` was given.
    """

    def __init__(self, *, weight_is_default: bool):
        self._weight_is_default = weight_is_default
        self._labels_were_seen = False
        self._backwards_were_told = False

    def make(self, pieces: Pieces, done: Accumulation) -> None:
        """After the last micro-batch."""
        if not self._backwards_were_told and done.shares.num_backwards > 1:
            self._backwards_were_told = True
            _tell_of_backwards(done.shares.num_backwards)
        if not self._labels_were_seen and pieces.count != 1:
            self._labels_were_seen = True
            if self._weight_is_default and done.shares.has_means:
                _warn_of_ignored_labels(pieces)


def _tell_of_backwards(number: int) -> None:
    """Log that a loss needs several backwards for each micro-batch."""
    _log.warning(
        "The loss has denominators that are known only after the forward: %d backwards and gradient buffers "
        "for each micro-batch. Means with weight={term: ...} need one.",
        number,
    )


def _warn_of_ignored_labels(pieces: Pieces) -> None:
    """Warn where labels hold -100 and micro-batches were weighed by samples."""
    if isinstance(pieces.pieces, list) and any(has_ignored_labels(piece.micro_batch) for piece in pieces.pieces):
        warn(
            "Labels hold -100, which a mean over tokens leaves out, but the micro-batches were weighed by samples. "
            'Write weight="tokens", or weight="next_tokens" for a model that shifts the labels inside (for a leaf that '
            'is named "labels"; a function otherwise: weight=lambda batch: (batch[1] != -100).sum()); weight="samples" '
            "if the loss is a mean over samples after all."
        )
