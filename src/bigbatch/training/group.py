"""The ranks of a run: who they are, and what they do together beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from bigbatch.batch.looking import Sharing
from bigbatch.errors import BigBatchError, DistributedError, RunStopped
from bigbatch.stepping.distributed.leaving import Farewell
from bigbatch.training.notices import Notices
from bigbatch.training.rank import Rank
from bigbatch.training.sharding import shard

Parallel = Literal["ddp", "fsdp2"]
_T = TypeVar("_T")


class Group:
    """The ranks of a run. Every method with a result is called on all of them.

    Args:
        rank: This one.
        store: What the ranks share beside their collectives; None: there are no others.
        parallel: ``"ddp"``: each rank has all weights; ``"fsdp2"``: they are spread over the ranks.
    """

    def __init__(self, rank: Rank | None = None, store: Store | None = None, *, parallel: Parallel = "ddp"):
        rank = rank or Rank()
        self.rank = rank.number
        self.world_size = rank.world_size
        self.store = store
        self.is_sharded = parallel == "fsdp2" and self.world_size > 1
        self._num_notices = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints, and writes files."""
        return self.rank == 0

    @property
    def sharing(self) -> Sharing:
        """The same ranks, as those that share the data."""
        return Sharing(self.rank, self.world_size)

    def notices(self) -> Notices:
        """Notices of a run of its own, with none in them."""
        self._num_notices += 1
        return Notices(self.store and PrefixStore(f"notices {self._num_notices}", self.store))

    def gathered(self, value: _T) -> list[_T]:
        """The values of all ranks, in their order."""
        return self.sharing.gathered(value)

    def from_first(self, make: Callable[[], _T]) -> _T:
        """What ``make`` gives on rank 0, for all; the others wait for it, and get its error too when it is ours."""
        if self.world_size == 1:
            return make()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = make()
            except BigBatchError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def agree(self, problem: BigBatchError | None) -> None:
        """Raise the problem of this rank, or of the first that has one: all of them go on, or none.

        Raises:
            BigBatchError: Of the same kind, and says which rank's it is.
        """
        found = {rank: each for rank, each in enumerate(self.gathered(problem)) if each is not None}
        if problem is not None:
            raise problem
        for rank, other in found.items():
            raise type(other)(f"Rank {rank} of {self.world_size}: {other}") from other

    def wrapped(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model as a step gets it, with the weights of rank 0, when there are others: in DDP, or itself sharded."""
        if self.world_size == 1:
            return model
        if self.is_sharded:
            shard(model)
            return model
        ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)


ALONE = Group()
"""One process."""


def device_of(rank: Rank, name: torch.device | str) -> torch.device:
    """The device of a rank: of several cards, the one with its number on its host.

    Raises:
        DistributedError: There are fewer cards on this host than ranks.
    """
    device = torch.device(name)
    if device.type != "cuda" or rank.world_size == 1:
        return device
    count = torch.cuda.device_count()
    if rank.local >= count:
        raise DistributedError(
            f"Rank {rank.number} is number {rank.local} on its host and needs a card of its own, but torch finds "
            f"{count} there. Start as many ranks as there are cards: --nproc-per-node {count}."
        )
    return torch.device("cuda", rank.local)


@contextmanager
def joined(rank: Rank, device: torch.device, *, parallel: Parallel = "ddp") -> Iterator[Group]:
    """The process group of a run: gloo on CPU, NCCL between cards, for as long as the block runs.

    A rank that leaves with an error says it to the others, which may wait for it in a collective; and when its process
    has ended, torchrun ends theirs.
    """
    if rank.world_size == 1:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous("env://", rank.number, rank.world_size))
    dist.init_process_group(
        store=PrefixStore("process group", store),
        rank=rank.number,
        world_size=rank.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Group(rank, PrefixStore("run", store), parallel=parallel)
    except BaseException as error:
        if not isinstance(error, RunStopped):
            words = str(error).partition("\n")[0]
            Farewell.of(dist.group.WORLD).leave(f"Rank {rank.number} failed: {type(error).__name__}: {words}")
            if device.type == "cuda":
                raise  # leaving would wait for what the card has begun with the others
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()
