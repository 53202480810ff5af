"""After the last backward: ranks agree that all are well, put the loss together, and sum the gradients."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from bigbatch.errors import LossError
from bigbatch.stepping.distributed.ranks import Ranks
from bigbatch.stepping.distributed.reducing import num_words, packed
from bigbatch.stepping.normalization.batchnorm import MergedStatistics
from bigbatch.stepping.undo import Undo
from bigbatch.values import Exactness

if TYPE_CHECKING:
    from bigbatch.stepping.after_backward import Accumulation

_EXACTNESS: tuple[Exactness, ...] = get_args(Exactness)
_NUM_FACTS = 5
_ROOM_FOR_TERMS = 4


def settle(ranks: Ranks, done: Accumulation, undo: Undo, statistics: MergedStatistics | None) -> None:
    """Agree with the other ranks, and leave in ``.grad`` the corrected gradient of all.

    One exchange, the reduction of the gradients, and another exchange where statistics of BatchNorm are merged.

    Raises:
        RankMemoryError, DistributedError: Another rank failed. Nothing was reduced.
        LossError: The loss of the ranks has different terms.
    """
    found = statistics.statistics if statistics else []
    presence = packed(done.gradients.presence())
    facts = [
        float(digest_of(done.shares.kinds)),
        float(len(done.shares.kinds)),
        float(_EXACTNESS.index(done.exactness)),
        float(undo.have_moved),
        float(len(found)),
    ]
    sums = done.shares.sums()
    rows = ranks.agree(None, [*facts, *presence, *_fixed(sums, 2 * _ROOM_FOR_TERMS)])
    digests, counts, exactness, moved, lengths = zip(*(row[:_NUM_FACTS] for row in rows), strict=True)
    if max(counts) > _ROOM_FOR_TERMS:
        sums_of_all = ranks.tell(_fixed(sums, 2 * int(max(counts))))
    else:
        sums_of_all = [row[_NUM_FACTS + len(presence) :] for row in rows]
    kinds = same_kinds(ranks, done, digests)
    done.shares.settle(kinds, [sum(numbers) for numbers in zip(*sums_of_all, strict=True)])
    done.exactness = _EXACTNESS[int(max(exactness))]
    if statistics and max(lengths):
        statistics.merge(ranks.tell(_fixed(found, int(max(lengths)))))
    ranks.reducer.sum_up(done, [row[_NUM_FACTS : _NUM_FACTS + len(presence)] for row in rows])
    if any(moved):
        ranks.reducer.send_buffers()


def num_told(num_parameters: int) -> int:
    """How many numbers each rank tells in ``settle``, whatever its loss is."""
    return _NUM_FACTS + num_words(num_parameters) + 2 * _ROOM_FOR_TERMS


def same_kinds(ranks: Ranks, done: Accumulation, digests: Sequence[float]) -> Any:
    """The terms of the loss, also on a rank that had no sample to see them with."""
    known = [rank for rank, digest in enumerate(digests) if digest]
    if len({digests[rank] for rank in known}) > 1:
        told = dict(enumerate(ranks.tell_object(done.shares.kinds)))
        raise LossError(f"The ranks have different terms in their losses: {told}. Return the same terms on all ranks.")
    if len(known) == len(digests):
        return done.shares.kinds
    return ranks.from_rank(known[0], done.shares.kinds) if known else []


def digest_of(kinds: list[Any]) -> int:
    """A number that other terms of a loss do not have; 0 for none."""
    return zlib.crc32(repr(kinds).encode()) if kinds else 0


def _fixed(numbers: Sequence[float], length: int) -> list[float]:
    return [*numbers[:length], *([0.0] * (length - len(numbers)))]
