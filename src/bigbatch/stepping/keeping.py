"""Finished micro-batches outlive an attempt that runs out of memory, where that is exact; the rest is cut smaller.

The backward that failed has added to some ``.grad`` and not to others. Autograd adds to each ``.grad`` once in a
backward, when all uses of the parameter are summed (``AccumulateGrad``): a new tensor there, or a new version of it,
is the whole gradient of the micro-batch. The others get theirs from smaller pieces by ``backward(inputs=others)``.
A node that runs a backward of its own, as ``checkpoint(use_reentrant=True)`` does, breaks both: it adds parts of a
gradient, to parameters that the graph outside does not show. Then the step begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from bigbatch.batch.logical import Piece, Pieces
from bigbatch.batch.sizes import micro_batch_sizes, spans
from bigbatch.errors import GradientError
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.stepping.gradients import Gradients, Stamps, Sum
from bigbatch.stepping.shares import Shares

if TYPE_CHECKING:
    from bigbatch.stepping.after_backward import Accumulation

_log = logging.getLogger("bigbatch")


class Part(NamedTuple):
    """Samples ``start`` to ``stop`` of the batch, and the parameters whose gradient they concern; None: all."""

    start: int
    stop: int
    parameters: tuple[torch.Tensor, ...] | None


class _Mark(NamedTuple):
    """Where an attempt is between two micro-batches."""

    num_finished: int
    accounts: list[tuple[int, ...]]
    stamps: Stamps


class _Kept(NamedTuple):
    """What the next attempt begins with."""

    gradients: Sum
    shares: Shares
    sizes: list[int]
    parts: list[Part]  # what is missing


class Keeping:
    """What the attempts of one step hand on to each other. It holds nothing while an attempt has it in ``.grad``.

    Attributes:
        landed: The gradients that failed micro-batches have left, which were not cut smaller for these parameters.
        is_in_doubt: The attempt adds to some parameters only. Any error in it may be due to that, as with
            ``checkpoint(use_reentrant=True)``, which refuses; then the step begins anew.
    """

    def __init__(self) -> None:
        self.landed: list[Part] = []
        self.is_in_doubt = False
        self._kept: _Kept | None = None
        self._parts: list[Part] = []  # one for each micro-batch that is not finished
        self._mark: _Mark | None = None

    def begin(
        self,
        done: Accumulation,
        pieces: Pieces,
        micro_batch_size: int | None,
        cut: Callable[[Iterable[tuple[int, int]]], list[Piece]],
    ) -> Pieces:
        """The micro-batches of an attempt: all, or what the one before has not finished.

        Args:
            done: Of the attempt; it gets what is finished.
            pieces: Those of the whole batch.
            micro_batch_size: Samples in a micro-batch, at most.
            cut: Makes the micro-batches with these starts and lengths.
        """
        kept, self._kept, self._mark = self._kept, None, None
        if kept is None:
            self.landed, self.is_in_doubt = [], False
            sizes = [piece.num_samples for piece in pieces.pieces]
            self._parts = [Part(start, start + length, None) for start, length in spans(sizes)]
            return pieces
        parts = _cut_smaller(kept.parts, micro_batch_size)
        self.is_in_doubt = any(part.parameters is not None for part in parts)
        rest = cut((part.start, part.stop - part.start) for part in parts)
        done.shares, done.sizes = kept.shares, list(kept.sizes)
        done.gradients.put_in(kept.gradients)
        self._note(done, parts)
        return Pieces(rest, len(kept.sizes) + len(rest), pieces.totals)

    def finished_one(self, done: Accumulation) -> None:
        """A micro-batch has been added.

        Raises:
            GradientError: Also to a parameter that was not to get it, so a backward adds more than once to one.
        """
        part, *rest = self._parts
        left_in = part.parameters
        if left_in and self._mark and not _are_among(done.gradients.changed(self._mark.stamps), left_in):
            raise GradientError("A backward inside the backward adds to parameters that were left out.")
        self._note(done, rest)

    def end(self) -> None:
        """All micro-batches are finished."""
        self._mark, self.is_in_doubt = None, False

    def _note(self, done: Accumulation, parts: list[Part]) -> None:
        if not parts:  # what comes after the last micro-batch is not worth the time
            self._mark = None
            return
        stamps = done.gradients.stamps(self._mark and self._mark.stamps)
        done.gradients.inputs = parts[0].parameters
        self._mark, self._parts = _Mark(len(done.sizes), done.shares.mark(), stamps), parts

    def keep(self, done: Accumulation, error: BaseException, left_no_trace: Callable[[], bool]) -> None:
        """Take what is finished out of an attempt that has failed; nothing where that may not be exact.

        Args:
            done: Of the attempt, as it was left.
            error: Why it failed.
            left_no_trace: Whether forwards have changed nothing (buffers, random numbers), so that it does not matter
                whether one runs again.
        """
        mark, self._mark = self._mark, None
        if mark is None or not is_out_of_memory(error):
            return
        try:
            parts = self._missing(done.gradients.changed(mark.stamps), done) if left_no_trace() else None
        except Exception:
            return  # it cannot be told, or memory is short for the comparisons too
        if parts is not None:
            done.shares.go_back(mark.accounts)
            self._kept = _Kept(done.gradients.take_out(), done.shares, done.sizes[: mark.num_finished], parts)
            _log.info("%d finished micro-batches of the step are kept.", mark.num_finished)

    def _missing(self, landed: list[torch.Tensor], done: Accumulation) -> list[Part] | None:
        """What is not finished, where ``landed`` already have the gradient of the micro-batch that failed."""
        if not landed:
            return self._parts
        failed, *rest = self._parts
        has_it = {id(p) for p in landed}
        lacking = tuple(p for p in failed.parameters or done.gradients.parameters if id(p) not in has_it)
        if not lacking or not _are_among(landed, failed.parameters) or _may_be_nested(done.gradients, landed):
            return None
        self.landed.append(failed._replace(parameters=tuple(landed)))
        return [failed._replace(parameters=lacking), *rest]


def _may_be_nested(gradients: Gradients, landed: list[torch.Tensor]) -> bool:
    """Whether backwards inside the one that failed may have added, or would have, to what is not in its graph."""
    reach = gradients.reach
    if reach is None or not {id(p) for p in landed} <= reach.leaves:
        return True
    # A parameter that is not reached is one that the micro-batch does not use, or is used inside such a node.
    hidden = any(id(p) not in reach.leaves for p in gradients.parameters)
    return (hidden and bool(reach.functions)) or any(name.startswith("Checkpoint") for name in reach.functions)


def _are_among(some: list[torch.Tensor], parameters: tuple[torch.Tensor, ...] | None) -> bool:
    return parameters is None or {id(p) for p in some} <= {id(p) for p in parameters}


def _cut_smaller(parts: list[Part], size: int | None) -> list[Part]:
    """The same samples in micro-batches of this size; neighbours that concern the same parameters are cut as one."""
    found = []
    for _, same in groupby(parts, key=lambda part: id(part.parameters)):
        first, *others = same
        length = (others or [first])[-1].stop - first.start
        starts = spans(micro_batch_sizes(length, size or length))
        found += [Part(first.start + start, first.start + start + n, first.parameters) for start, n in starts]
    return found
