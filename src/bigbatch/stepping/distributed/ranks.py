r"""The ranks that make one step together: what they tell one another, and that they fail together.

A rank gets its share of the logical batch, of whatever length. Two exchanges of a few numbers make the step exact and
safe. Before the first forward each rank says how many micro-batches it has and how much they weigh, so that $W$ is
known: the weight of the batch over all ranks. After the last backward each says whether it has failed, and its part of
the loss. Nobody begins a collective of many bytes before all have said that they are well, so a rank that ran out of
memory is not waited for: all undo the step and make it again. Between the two, ranks that need the outputs of one
another meet as often as they send some; a rank that fails is heard at the next meeting, wherever that is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from bigbatch.batch.logical import Part, Piece, Pieces, read_to_the_end
from bigbatch.batch.structure import mapped
from bigbatch.errors import BigBatchError, DistributedError, EmptyBatchError, RankMemoryError
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.stepping.distributed.leaving import Farewell
from bigbatch.stepping.distributed.meetings import Meetings, OthersFailedError
from bigbatch.stepping.distributed.reducing import Reducer

_WELL, _OUT_OF_MEMORY, _FAILED = 0.0, 1.0, 2.0
_HALF = 2**32
"""A seed has 64 bits, and the numbers that are told are float64, which holds 53: it is told in two halves."""


class Ranks:
    """The ranks of a process group, as a step sees them.

    Args:
        reducer: What sums the gradients of the model over them.

    Attributes:
        size: How many there are.
        rank: Which of them this is.
        meetings: Inside forward and backward; None: there are none.
    """

    def __init__(self, reducer: Reducer):
        self.reducer = reducer
        self.group = reducer.group
        self.size = self.group.size() if self.group is not None else 1
        self.rank = self.group.rank() if self.group is not None else 0
        self.meetings: Meetings | None = None
        self._farewell: Farewell | None = None
        self._num_agreed = 0
        self.num_told = 0  # numbers in each exchange after the one before the first forward
        self.kinds: Any = []  # of the terms of the loss, for a rank that has not seen it

    @property
    def are_several(self) -> bool:
        """Whether there is anybody to talk to."""
        return self.size > 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let this rank run steps of its own, which the others do not see: to try a plan.

        With collectives inside the model that cannot be, and all ranks must run what is tried.
        """
        self.reducer.rebuild_buckets()  # while all are here
        size, rank = self.size, self.rank
        if not self.reducer.must_run_together:
            self.size, self.rank, self.reducer.is_quiet = 1, 0, True
        try:
            yield
        finally:
            self.size, self.rank, self.reducer.is_quiet = size, rank, False

    def tell(self, row: Sequence[float]) -> list[list[float]]:
        """The numbers of each rank, by rank; all give as many."""
        with self.named_failures() as device:
            rows = torch.zeros(self.size, len(row), dtype=torch.float64, device=device)
            rows[self.rank] = torch.tensor(row, dtype=torch.float64)
            dist.all_reduce(rows, group=self.group)  # each row is added to zeros, which is exact
            return rows.tolist()

    def tell_object(self, value: Any) -> list[Any]:
        """The value of each rank, by rank: anything that can be pickled. Only where something is unusual."""
        with self.named_failures():
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, value, group=self.group)
            return found

    def from_rank(self, rank: int, value: Any) -> Any:
        """The value of one rank, on all."""
        with self.named_failures():
            box = [value]
            dist.broadcast_object_list(box, group=self.group, group_src=rank)
            return box[0]

    @contextmanager
    def named_failures(self) -> Iterator[torch.device]:
        """Say which rank it was when a collective fails."""
        if self._farewell is None:
            self._farewell = Farewell.of(self.group)
        try:
            yield self.reducer.device_to_talk
            self._farewell.look_around()
        except RuntimeError as error:
            if isinstance(error, BigBatchError) or is_out_of_memory(error):
                raise
            raise self._farewell.explained(error) from error

    def agree(self, failure: Exception | None, row: Sequence[float], *, at: str = "") -> list[list[float]]:
        """The numbers of each rank, when all are well.

        Args:
            failure: Of this rank; None when it is well.
            row: As many numbers on each rank, also on one that failed.
            at: Where in the step this is, which must be the same on all ranks.

        Raises:
            RankMemoryError: Memory ran out on other ranks, and this one is to try again with them.
            DistributedError: Another rank failed in another way, or is elsewhere.
            Exception: ``failure``.
        """
        self._num_agreed += 1
        rows = self.tell([_state_of(failure), float(self._num_agreed), float(zlib.crc32(at.encode())), *row])
        if len({row[1] for row in rows}) > 1:
            raise DistributedError(
                f"The ranks are at different steps: they have talked {[int(row[1]) for row in rows]} times. Call the "
                f"step equally often on every rank; a rank without samples calls it with an empty batch."
            )
        states = [row[0] for row in rows]
        if any(states):
            self._raise_together(states, failure)
        if len({row[2] for row in rows}) > 1:
            places = {rank: place or "the end" for rank, place in enumerate(self.tell_object(at))}
            raise DistributedError(
                f"The ranks are at different places of the step: {places}. The loss of a WholeBatchLoss must do the "
                f"same on every rank; so must what it only looks at, such as a mean that one rank prints."
            )
        return [row[3:] for row in rows]

    def meet(self, at: str, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Hear from each rank in the middle of a step that it is well, before something large is sent.

        Whatever a rank allocates for what is sent must be there before: it cannot tell the others any more.

        Args:
            at: See ``agree``.
            numbers: A few that the others get.
        """
        assert len(numbers) <= self.num_told
        return self.agree(None, [*numbers, *[0.0] * (self.num_told - len(numbers))], at=at)

    def _raise_together(self, states: list[float], failure: Exception | None) -> NoReturn:
        said = self.tell_object(None if failure is None else _words(failure))
        failed = [rank for rank, state in enumerate(states) if state == _FAILED]
        if failure is not None and (_state_of(failure) == _FAILED or not failed):
            raise failure
        kind = DistributedError if failed else RankMemoryError
        ranks = failed or [rank for rank, state in enumerate(states) if state]
        names = ", ".join(map(str, ranks))
        raise kind(
            f"{'Rank' if len(ranks) == 1 else 'Ranks'} {names} failed: {said[ranks[0]]} All ranks undid the step.",
            rank=ranks[0],
        ) from None

    def cut(
        self,
        cut: Callable[[], Pieces],
        terms: Collection[str | None],
        next_seed: Callable[[], int] = lambda: 0,
        *,
        meets: bool = False,
    ) -> Pieces:
        """The micro-batches of this rank, with the weight of those of all ranks.

        Args:
            cut: Cuts the share of this rank. It may be empty.
            terms: What the weights are for.
            next_seed: Of dropout by sample, as this rank would take it; that of rank 0 holds for all.
            meets: The ranks will meet inside forward and backward.
        """
        self.meetings = None
        if not self.are_several:
            pieces = cut()
            if not self.reducer.reduces_inside or self.reducer.is_quiet:
                return pieces
            pieces = read_to_the_end(pieces)
            return replace(pieces, over_ranks=pieces.part._replace(scale=self.reducer.scale, summed_inside=True))
        failure, pieces = None, Pieces([], 0, dict.fromkeys(terms, 0.0))
        try:
            # The weight must be known before the first forward.
            pieces = read_to_the_end(cut())
        except EmptyBatchError:
            pass
        except Exception as error:
            failure = error
        weights = [(pieces.totals or {}).get(term, 0.0) for term in terms]
        rows = self.agree(failure, [pieces.count or 0, pieces.num_samples, *divmod(next_seed(), _HALF), *weights])
        counts = [int(row[0]) for row in rows]
        if not any(counts):
            raise EmptyBatchError("The batch is empty on every rank.")
        totals = {term: sum(row[4 + i] for row in rows) for i, term in enumerate(terms)}
        first = next(rank for rank, count in enumerate(counts) if count)
        part = Part(
            sum(counts),
            int(sum(row[1] for row in rows)),
            has_constants=first == self.rank,
            scale=self.reducer.scale,
            summed_inside=self.reducer.reduces_inside,
            is_joined=meets,
            first_sample=int(sum(row[1] for row in rows[: self.rank])),
            seed=int(rows[0][2]) * _HALF + int(rows[0][3]),
        )
        mine = [*pieces.pieces, *self._idle(pieces, counts, first, max(self.reducer.num_forwards(max(counts)), meets))]
        self.meetings = Meetings(self) if meets else None
        return replace(pieces, pieces=mine, totals=totals, over_ranks=part)

    def _idle(self, pieces: Pieces, counts: list[int], first: int, needed: int) -> list[Piece]:
        """Micro-batches that count nothing, for as many forwards as every rank needs."""
        example = next(iter(pieces.pieces), None)
        if needed and not all(counts):
            lent = mapped(_copied, example.micro_batch) if example and self.rank == first else None
            lent = self.from_rank(first, lent)
            example = example or Piece(lent, 0, dict.fromkeys(pieces.totals or {}, 0.0))
        if example is None:
            return []
        idle = Piece(example.micro_batch, 0, dict.fromkeys(example.weights, 0.0), idle=True)
        return [idle] * (needed - counts[self.rank])

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank failed after the first exchange. Returns when the error is to be raised.

        Raises:
            DistributedError: Another rank failed in a way that cannot be tried again; or others wait for this one in a
                collective inside the model, and cannot be told.
        """
        if not self.are_several:
            return
        if self.reducer.reduces_inside:
            raise self.left(error) from error
        if isinstance(error, DistributedError):
            return  # which all have been told
        if self.meetings is not None:
            self.meetings.leave()
        try:
            self.agree(None if isinstance(error, OthersFailedError) else error, [0.0] * self.num_told)
        except Exception as agreed:
            if agreed is not error:
                raise

    def left(self, error: BaseException) -> DistributedError:
        """The error of a rank that others wait for where nobody can be told: it ends all of them."""
        if isinstance(error, DistributedError):
            return error
        if self._farewell is None:
            self._farewell = Farewell.of(self.group)
        if _is_broken_connection(error):
            return self._farewell.explained(error)
        reason = f"Rank {dist.get_rank()} failed: {_words(error)}"
        self._farewell.leave(reason)
        return DistributedError(
            f"{reason} The other ranks are in the middle of the step and cannot undo it, so all have to stop: end "
            f'this process, and start all ranks again from the last checkpoint. With DDP, reduce="after" lets them '
            f"undo the step together.",
            rank=dist.get_rank(),
        )

    def together(self, names: list[str]) -> list[str]:
        """What is found on any rank: what all found as it is, the rest with its rank. A collective."""
        if not self.are_several:
            return names
        told = self.tell_object(names)
        where = {name: [rank for rank, own in enumerate(told) if name in own] for own in told for name in own}
        # Terms of the loss first, as on one rank: gradients follow from them.
        return [
            name if len(ranks) == self.size else f"{name} on rank {', '.join(map(str, ranks))}"
            for name, ranks in sorted(where.items(), key=lambda found: found[0].startswith("the gradient"))
        ]

    def largest(self, number: int) -> int:
        """The largest of the numbers of all ranks. A collective."""
        return number if not self.are_several else int(max(row[0] for row in self.tell([number])))


def _is_broken_connection(error: BaseException) -> bool:
    """Whether torch's collectives say that somebody is gone."""
    text = str(error)
    said = any(word in text for word in ("onnection closed by peer", "onnection reset", "gloo/transport", "NCCL"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and said)


def _state_of(failure: Exception | None) -> float:
    if failure is None:
        return _WELL
    return _OUT_OF_MEMORY if is_out_of_memory(failure) else _FAILED


def _words(error: BaseException) -> str:
    said = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {said if said.endswith('.') else said + '.'}"


def _copied(value: Any) -> Any:
    """Without the storage that a view is a part of."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
