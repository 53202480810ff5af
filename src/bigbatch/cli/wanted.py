"""What the command line says of a task that is trained, verified or benched. This loads torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from bigbatch.cli.devices import device_named
from bigbatch.tasks.finding import find_task
from bigbatch.training.group import Parallel, device_of
from bigbatch.training.rank import Rank
from bigbatch.training.task import Task


@dataclass(frozen=True)
class Wanted:
    """What the command line says, beside what to do with it.

    Attributes:
        task: Name of the task.
        variant: Arguments of its function.
        changes: Fields of the task that are replaced, where they are not None.
        memory_budget, micro_batch_size, device, threads, parallel, switches: As on the command line.
    """

    task: str
    variant: dict[str, Any]
    changes: dict[str, Any]
    memory_budget: str | None = None
    micro_batch_size: int | None = None
    device: str | None = None
    threads: int | None = None
    parallel: Parallel = "ddp"
    switches: dict[str, bool] = field(default_factory=dict)

    def found(self, **variant: Any) -> Task:
        """The task, with what was changed."""
        changes = {name: value for name, value in self.changes.items() if value is not None}
        # The panel and the log show the norm, so a run from here asks for it.
        return dataclasses.replace(find_task(self.task, **{**self.variant, **variant}), grad_norm=True, **changes)

    def prepare(self, rank: Rank) -> torch.device:
        """Set the threads, and choose the device of this rank.

        Raises:
            DeviceError: There is no such device.
            DistributedError: There are more ranks than cards.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        name = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return device_of(rank, device_named(name))
