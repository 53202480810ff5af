"""Which of several processes this one is: the one place that reads it from the environment. This loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from bigbatch.errors import DistributedError, OptionError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Rank:
    """One process of a run.

    Attributes:
        number: From 0, over all hosts.
        world_size: How many there are.
        local: From 0, on this host; also the number of its card.
        local_world_size: How many there are on this host.
    """

    number: int = 0
    world_size: int = 1
    local: int = 0
    local_world_size: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None) -> Rank:
        """What torchrun has set; a process by itself when it has set nothing.

        Where the ranks meet (``MASTER_ADDR`` and ``MASTER_PORT``) is read by torch.

        Raises:
            DistributedError: A part of it is missing, or is no number.
        """
        environment = os.environ if environment is None else environment
        if environment.get("RANK", "0") == "0" and environment.get("WORLD_SIZE", "1") == "1":
            return cls()  # also where a library has set these two for a process by itself
        try:
            rank = cls(*(int(environment[name]) for name in _NAMES))
        except (KeyError, ValueError):
            rank = None
        if rank is None or not (0 <= rank.number < rank.world_size and 0 <= rank.local < rank.local_world_size):
            found = ", ".join(f"{name}={environment.get(name, 'nothing')}" for name in _NAMES)
            raise DistributedError(
                f"The environment has {found}, which is no rank. Start the run with --nproc-per-node or torchrun, "
                f"which set all four, or unset them."
            )
        return rank

    def to_start(self, wanted: int | None) -> int:
        """Ranks that this process is to start; 0 when it is to run by itself, or is one of them.

        Args:
            wanted: Ranks on this host, or None.

        Raises:
            OptionError: It is one of another number of ranks.
        """
        if self.world_size == 1:
            return wanted if wanted is not None and wanted > 1 else 0
        if wanted not in (None, self.local_world_size):
            raise OptionError(
                f"--nproc-per-node {wanted}, but this is {self}, with {self.local_world_size} on this host. Say it "
                f"once: to torchrun or to bigbatch."
            )
        return 0

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world_size}"
