"""Several ranks on this machine, each a real process, forked from one that has loaded torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from bigbatch.training.group import Group, joined
from bigbatch.training.rank import Rank

_SECONDS = 90.0


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(group, *args)`` returns on each rank, in their order.

    Raises:
        AssertionError: It raised on one of them, or one ended without a word.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "bigbatch.training.resuming", "bigbatch.training.loop", "torch._dynamo"])
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, world_size, port, theirs, function, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_result(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def free_port() -> int:
    """A port that nobody listens to."""
    with closing(socket.create_server(("localhost", 0))) as server:
        return server.getsockname()[1]


def _result(rank: int, pipe: Any) -> Any:
    assert pipe.poll(_SECONDS), f"rank {rank} says nothing for {_SECONDS} seconds"
    try:
        returned, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a word") from None
    assert returned, f"rank {rank}: {result}"
    return result


def _run(rank: int, world_size: int, port: int, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update(
        {name: str(value) for name, value in place.items()}, MASTER_ADDR="localhost", MASTER_PORT=f"{port}"
    )
    try:
        with joined(Rank.of(), torch.device("cpu")) as group:
            assert isinstance(group, Group)
            result = function(group, *args)
        # As plain bytes: the other way tensors go through shared memory, which ends with this process.
        pipe.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
