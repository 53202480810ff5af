"""The outputs of all ranks, each of which has run its own forwards: what the loss of the whole batch is computed of.

All ranks compute it, alike, and each goes on with the gradients at its own rows. The losses of all pairs share the rows
among them (``sharing``).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from bigbatch.batch.cutting import Layout
from bigbatch.errors import LossError
from bigbatch.stepping.coupled.batch_of_ranks import of_all_ranks, without_tensors
from bigbatch.stepping.coupled.outputs import (
    joined_leaves,
    num_rows,
    opened,
    shown,
    widened,
    with_leaves,
    with_zeros,
    without_samples,
)
from bigbatch.stepping.coupled.sharing import shared_by
from bigbatch.stepping.distributed.gathering import added_up, gathered
from bigbatch.stepping.distributed.ranks import Ranks
from bigbatch.stepping.generators import Generators, seed_host
from bigbatch.stepping.gradients import is_sharded
from bigbatch.stepping.losses import Sum

Leaves = list[tuple[str, Any]]


class Said(NamedTuple):
    """What a rank tells of its share.

    Attributes:
        leaves: Of its outputs, without their rows.
        counts: Rows of each; None of one that is added up or no tensor.
        others: Lists and arrays of the batch, which are few.
    """

    leaves: Leaves
    counts: list[int | None]
    others: list[Any]


@dataclass
class Share:
    """What a rank has of the whole batch.

    Attributes:
        nesting: The outputs of some micro-batch, for their nesting.
        leaves: Of the outputs of all its micro-batches, without graph; sums are a ``Sum``.
        layout: Of what its loss would get as the batch; None: that cannot be put together.
    """

    nesting: Any
    leaves: Leaves
    layout: Layout | None

    def said(self) -> Said:
        """What the others are told of it."""
        leaves = [(path, without_samples(leaf)) for path, leaf in self.leaves]
        return Said(leaves, [num_rows(leaf) for _, leaf in self.leaves], without_tensors(self.layout))

    def emptied(self) -> Share:
        """The same of no samples."""
        leaves = self.said().leaves
        nesting = with_leaves(self.nesting, [leaf for _, leaf in leaves])
        return Share(nesting, leaves, self.layout and self.layout.emptied())


def share_of(nesting: Any, parts: Sequence[Leaves], layout: Layout | None) -> Share:
    """The share of a rank, from the outputs of its micro-batches."""
    joined = zip(parts[0], joined_leaves(parts), strict=True)
    return Share(
        nesting, [(path, Sum(leaf) if isinstance(like, Sum) else leaf) for (path, like), leaf in joined], layout
    )


@dataclass(frozen=True)
class Whole:
    """What the shares of all ranks are together.

    Attributes:
        share: Of this rank.
        leaves: Of the outputs.
        starts: Where the rows of this rank begin in each.
        batch: What the loss gets as the batch.
        seed: The same on all ranks, and another one in each step.
    """

    share: Share
    leaves: list[Any]
    starts: list[int]
    batch: Any
    seed: int

    def own_rows(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of the gradients at the leaves, those at the rows of this rank; copies, so that the others may go."""
        found = []
        for gradient, start, (_, own) in zip(gradients, self.starts, self.share.leaves, strict=True):
            count = num_rows(own)
            found.append(gradient if gradient is None or count is None else gradient[start : start + count].clone())
        return found


@torch.no_grad()
def put_together(ranks: Ranks, share: Share | None, device: torch.device) -> Whole:
    """What all ranks have together. Collectives, which all ranks come to.

    Args:
        share: Of this rank; None: it has no samples.
        device: Of the model.

    Raises:
        LossError: The outputs of the ranks do not go together.
    """
    said = pickle.dumps(share and share.said())  # raises before the others wait for it, if it does
    seeds = ranks.meet("outputs are there", [float(zlib.crc32(torch.get_rng_state().numpy().tobytes()))])
    told = [pickle.loads(one) for one in ranks.tell_object(said)]
    if None in told:
        share, told = _lent(ranks, share, told, device)
    assert share is not None
    _check_go_together([one.leaves for one in told])
    counts = list(zip(*(one.counts for one in told), strict=True))
    leaves = _joined(ranks, [leaf for _, leaf in share.leaves], counts)
    starts = [sum(n or 0 for n in of_leaf[: ranks.rank]) for of_leaf in counts]
    batch = share.layout and of_all_ranks(share.layout, [one.others for one in told], ranks, device)
    return Whole(share, leaves, starts, batch, int(seeds[0][0]))


def _lent(ranks: Ranks, share: Share | None, told: list[Said | None], device: torch.device) -> tuple[Share, list[Said]]:
    """The same when some have no samples: they know from another rank what theirs would be like."""
    lender = next(rank for rank, said in enumerate(told) if said is not None)
    data = pickle.dumps(share.emptied()) if share is not None and ranks.rank == lender else None
    ranks.meet("shares are lent")
    empty: Share = pickle.loads(ranks.from_rank(lender, data))
    empty.leaves = [(path, with_zeros(leaf, device)) for path, leaf in empty.leaves]
    return share or empty, [said or empty.said() for said in told]


def _check_go_together(skeletons: Sequence[Leaves]) -> None:
    for _ in joined_leaves(skeletons, "ranks"):
        pass
    for same in zip(*skeletons, strict=True):
        dtypes = {opened(leaf).dtype: None for _, leaf in same if isinstance(opened(leaf), torch.Tensor)}
        if len(dtypes) > 1:
            raise LossError(f"{shown(same[0][0])} of forward has other dtypes on other ranks: {list(dtypes)}.")


def _joined(ranks: Ranks, own: Sequence[Any], counts: Sequence[Sequence[Any]]) -> list[Any]:
    """Each leaf of all ranks."""
    found = list(own)
    with_rows = [i for i, leaf in enumerate(own) if num_rows(leaf) is not None]
    for i, rows in zip(
        with_rows, gathered(ranks, [own[i] for i in with_rows], [counts[i] for i in with_rows]), strict=True
    ):
        found[i] = rows
    added = [i for i, leaf in enumerate(own) if isinstance(leaf, Sum)]
    sums = added_up(ranks, [widened(own[i].term) for i in added], "sums are added")
    for i, total in zip(added, sums, strict=True):
        found[i] = total.to(own[i].term.dtype)
    return found


def check_inside(parameters: Sequence[torch.Tensor], model: nn.Module) -> None:
    """Raise unless the gradients of these, which the loss itself uses, are reduced over ranks like all others.

    Raises:
        LossError: One is not in the model, or spread over the ranks.
    """
    known = {id(p) for p in model.parameters()}
    if strangers := [tuple(p.shape) for p in parameters if id(p) not in known]:
        raise LossError(
            f"The loss of WholeBatchLoss reaches parameters of shape {strangers} that are not in the model, so nothing "
            f"keeps them equal over the ranks. Put them into the model that DistributedDataParallel wraps."
        )
    if sharded := [tuple(p.shape) for p in parameters if is_sharded(p)]:
        raise LossError(
            f"The loss of WholeBatchLoss uses parameters of shape {sharded} that fully_shard has spread over the "
            f"ranks, outside of the forward that gathers them. Use them in forward: a temperature can multiply the "
            f"rows that it returns."
        )


@contextmanager
def alike(ranks: Ranks, whole: Whole, device: torch.device) -> Iterator[None]:
    """Within the block, all ranks run the loss: with the same random numbers, and sharing its rows.

    Afterwards each rank goes on with its own random numbers.
    """
    before = Generators(device, everywhere=True)
    with shared_by(ranks):
        _seed(whole.seed, device)
        begun = Generators(device)
        try:
            yield
        finally:
            drawn = begun.were_used()
            before.restore()
            if drawn:
                torch.rand(())  # so that the seed of the next step is another one


def _seed(seed: int, device: torch.device) -> None:
    seed_host(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
