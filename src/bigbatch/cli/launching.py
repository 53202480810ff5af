"""Start a run on several processes of this host, as torchrun does, and say which of them failed. This loads torch."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bigbatch.cli.speaking import tell

_SECONDS_AT_ONCE = 3
_STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT}


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run ``bigbatch`` with these arguments on so many ranks, and wait for them.

    A rank that ends before the others with anything but 0 ends all of them. SIGTERM and Ctrl-C are passed on.

    Returns:
        The code to exit with: 0, that of a run that was stopped and saved, or 1.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    _silence()
    try:
        with _threads_for(num_ranks):
            elastic_launch(config, sys.executable)("-m", "bigbatch", *arguments)
    except ChildFailedError as error:
        return _told(error.failures, num_ranks)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _silence() -> None:
    """What torch's launcher would tell of a failure, in forty lines, is told here in one."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _threads_for(num_ranks: int) -> Iterator[None]:
    """Share the cores: with all of them for each rank, their threads would wait for one another."""
    name = "OMP_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        yield
    finally:
        del os.environ[name]


def _told(failures: Mapping[int, Any], num_ranks: int) -> int:
    """Say which rank ended the others; those are in ``failures`` too, after it."""
    first = next(iter(failures.values()))
    at_once = {rank: one for rank, one in failures.items() if one.timestamp - first.timestamp <= _SECONDS_AT_ONCE}
    # The others notice at once that one was killed, and fail with errors of their own.
    killed = {rank: one for rank, one in at_once.items() if one.exitcode < 0 and one.exitcode != -signal.SIGTERM}
    if not killed and any(one.exitcode in _STOPPED for one in at_once.values()):
        return max(one.exitcode for one in at_once.values() if one.exitcode in _STOPPED)
    rank, failure = next(iter((killed or failures).items()))
    if rank == 0 and failure.exitcode == 1:
        return 1  # it has said why, and it speaks for all
    if failure.exitcode < 0:
        number = -failure.exitcode
        how = f"was ended by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
    else:
        how = f"ended with exit code {failure.exitcode}"
    tell(f"rank {rank} of {num_ranks} (process {failure.pid}) {how}, and the others were ended with it.")
    return 1
