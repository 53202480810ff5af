"""Look at every sample once, for what must be known before its batch is made: its length and its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from bigbatch.batch.lengths import lengths_of
from bigbatch.batch.weighing import Weigher
from bigbatch.values import StepOptions

_AT_ONCE = 256


@dataclass(frozen=True)
class Sharing:
    """Who shares the data.

    Attributes:
        rank: This one, from 0.
        num_ranks: How many there are.
        group: The process group through which they talk; None: the default one.
    """

    rank: int = 0
    num_ranks: int = 1
    group: Any = None

    @classmethod
    def of(cls, group: Any = None) -> Sharing:
        """The ranks of a process group, or of the default one; a process by itself where there is none."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order. All of them call this."""
        if self.num_ranks == 1:
            return [value]
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, value, group=self.group)
        return found


ALONE = Sharing()
"""One process."""


@dataclass(frozen=True)
class Look:
    """What is looked for in the samples. It is a data set of its own: workers look where they would load.

    Attributes:
        data: Map-style.
        options: Of them ``collate``, and ``length`` where lengths are wanted.
        weigher: Where weights are wanted.
        wants_lengths: Whether they are.
    """

    data: Any
    options: StepOptions
    weigher: Weigher | None = None
    wants_lengths: bool = True

    def __getitems__(self, indices: list[int]) -> list[tuple[int | None, Any]]:
        """Length and weight of each of these samples; None for what is not wanted."""
        samples = samples_of(self.data, indices)
        nothing = [None] * len(samples)
        lengths = lengths_of(samples, self.options.length) if self.wants_lengths else nothing  # pyright: ignore
        alone = [(self.options.collate([sample]), 1) for sample in samples] if self.weigher else []  # pyright: ignore
        return list(zip(lengths, self.weigher.weigh(alone) if self.weigher else nothing, strict=True))

    def around(self, *, num_workers: int, seed: int, sharing: Sharing = ALONE) -> list[tuple[int | None, Any]]:
        """Length and weight of every sample, in order; of several ranks each looks at a part, and tells the others.

        Args:
            num_workers: Processes that look.
            seed: Of what they draw.
            sharing: Who knows the same afterwards.
        """
        count = len(self.data)
        first, end = (count * rank // sharing.num_ranks for rank in (sharing.rank, sharing.rank + 1))
        loader: DataLoader[Any] = DataLoader(
            self,  # pyright: ignore[reportArgumentType]
            batch_sampler=[list(range(i, min(i + _AT_ONCE, end))) for i in range(first, end, _AT_ONCE)],
            collate_fn=_as_it_is,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(seed),
        )
        mine = [one for some in loader for one in some]
        return [one for part in sharing.gathered(mine) for one in part]


def samples_of(data: Any, indices: Sequence[int]) -> list[Any]:
    """The samples at these indices, made at once where the data can."""
    return list(data.__getitems__(indices)) if hasattr(data, "__getitems__") else [data[i] for i in indices]


def _as_it_is(made: Any) -> Any:
    return made
