"""Processes that wait for cases: starting one costs seconds, a case milliseconds."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# The server imports torch once, and every worker is a fork of it.
_CONTEXT = multiprocessing.get_context("forkserver")
# "torch._dynamo" is what every optimizer imports when it is made.
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "bigbatch", "tests.stepping.rank_models"])
_SECONDS = 60.0


class WorkerError(AssertionError):
    """A case raised in a worker; the message is its traceback."""


class Workers:
    """Processes of one gloo group that run functions together.

    Args:
        size: How many processes there are. A case may use the first few of them.
    """

    def __init__(self, size: int):
        self._folder = tempfile.TemporaryDirectory()
        ends = [_CONTEXT.Pipe() for _ in range(size)]
        self.processes = [
            _CONTEXT.Process(target=_serve, args=(rank, size, self._folder.name, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(self.processes, ends, strict=True):
            process.start()
            theirs.close()
        self._connections = [ours for ours, _ in ends]

    def run(self, size: int, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """``function(group, *args)`` on the first ``size`` ranks, and what it returned on each of them.

        Raises:
            WorkerError: It raised on some rank, or took too long.
        """
        answers = self.answers(size, function, *args, **keywords)
        if failed := {rank: said for rank, (well, said) in answers.items() if not well}:
            raise WorkerError("\n".join(f"rank {rank}: {said}" for rank, said in failed.items()))
        return [answers[rank][1] for rank in range(size)]

    def answers(
        self, size: int, function: Callable[..., Any], *args: Any, then_end: bool = False, **keywords: Any
    ) -> dict[int, tuple[bool, Any]]:
        """The same with what went wrong: for each rank whether it is well, and what it returned or its traceback.

        ``then_end``: each process ends when it has answered, as a program does that an error has gone through.
        """
        for connection in self._connections[:size]:
            connection.send((size, function, args, keywords, then_end))
        found: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + _SECONDS
        while len(found) < size:
            left = [c for rank, c in enumerate(self._connections[:size]) if rank not in found]
            ready = wait(left, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                self.stop()
                raise WorkerError(f"Ranks {sorted(set(range(size)) - set(found))} hang. The others: {found}")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    found[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    found[rank] = False, "the process is gone"
        return found

    def stop(self) -> None:
        """End all of them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is", DeprecationWarning)  # as in pyproject.toml
    logging.getLogger("bigbatch").setLevel(logging.ERROR)  # what a step warns of is what the case has done
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    groups = {n: dist.new_group(list(range(n))) if n < size else dist.group.WORLD for n in range(1, size + 1)}
    while True:
        try:
            count, function, args, keywords, then_end = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, function(groups[count], *args, **keywords)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
        if then_end:
            os._exit(0)


@contextlib.contextmanager
def workers(size: int) -> Iterator[Workers]:
    """Some of them, for as long as the block runs."""
    found = Workers(size)
    try:
        yield found
    finally:
        found.stop()
