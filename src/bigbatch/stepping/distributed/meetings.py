"""Meetings of ranks inside forward and backward: layers that normalise by the batch of all of them.

In forward a rank says at each meeting that it is well and where it is, and only then sends what it brings. So one that
has failed says so at the next meeting, and all stop there. In backward nothing is said: all ranks have been at the same
meetings and go through them in the same order, backwards; one that fails sends zeros for those that are left, and the
exchange after the last backward, where all must be well, tells the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bigbatch.errors import BigBatchError

if TYPE_CHECKING:
    from bigbatch.stepping.distributed.ranks import Ranks

END = -1
"""The place of a rank whose forward has ended."""

_WELL, _FAILED = 0.0, 1.0


class OthersFailedError(BigBatchError):
    """Another rank has failed; which, and how, is said when all have undone the step."""


class Meetings:
    """Those of one step.

    Args:
        ranks: Who meets.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._is_forward = True
        self._buffers: list[torch.Tensor] = []
        self._owed: list[torch.Tensor] = []  # what backward has still to sum up, in order

    def say(self, *numbers: float) -> list[list[float]]:
        """The numbers of each rank, by rank, when all are well.

        Raises:
            OthersFailedError: Some rank has failed.
        """
        rows = self._ranks.tell([_WELL, *numbers])
        if any(row[0] for row in rows):
            self.all_know()
            raise OthersFailedError("Another rank has failed.")
        return [row[1:] for row in rows]

    def all_know(self) -> None:
        """All ranks have seen what is about to be raised."""
        self._is_forward = False

    def gather(self, place: int, count: int, brought: torch.Tensor) -> tuple[list[list[float]], torch.Tensor]:
        """What each rank says and brings, by rank.

        Args:
            place: Number of the layer.
            count: Values per channel.
            brought: As large on all ranks; shape ``(2, C)``.

        Returns:
            For each rank its place and its count; and a tensor of shape ``(R, 2, C)``, the same bits on all ranks.
        """
        # Nothing that may fail stands between the two exchanges.
        rows = brought.new_zeros(self._ranks.size, *brought.shape)
        rows[self._ranks.rank] = brought
        buffer = torch.zeros_like(brought)
        said = self.say(place, count)
        if len({row[0] for row in said}) == 1:
            self._sum(rows)  # each row is added to zeros, which is exact
            self._buffers.append(buffer)
        return said, rows

    def end_forward(self, digest: int, num_backwards: int) -> tuple[list[int], list[int]]:
        """After the last meeting. Where each rank is, and its digest; backward comes next if they are the same.

        Args:
            digest: Of what all ranks must have the same.
            num_backwards: That go through all of the meetings.
        """
        said = self.say(END, digest)
        self.all_know()
        if len({tuple(row) for row in said}) == 1:
            self._owed = self._buffers[::-1] * num_backwards
        return [int(row[0]) for row in said], [int(row[1]) for row in said]

    def sum_up(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The sum over all ranks, in backward; None is a zero."""
        buffer = self._owed[0].zero_()
        for row, part in zip(buffer, parts, strict=True):
            if part is not None:
                row.copy_(part)
        self._sum_next()
        return buffer

    def _sum_next(self) -> None:
        self._sum(self._owed[0])
        del self._owed[0]

    def _sum(self, tensor: torch.Tensor) -> None:
        with self._ranks.named_failures():
            dist.all_reduce(tensor, group=self._ranks.group)

    def leave(self) -> None:
        """This rank has failed: take part in what the others still wait for."""
        if self._is_forward:
            self.all_know()
            self._ranks.tell([_FAILED, 0.0, 0.0])
        while self._owed:
            self._owed[0].zero_()
            self._sum_next()
