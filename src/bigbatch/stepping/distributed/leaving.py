"""Which rank has gone, and why: what the others tell their user instead of "connection closed by peer".

Every process holds a listening socket that nobody ever speaks to, and says where it is in the store of the process
group. When a collective fails, a connection to it tells whether the process is still there: the kernel of a living one
takes it, that of a killed one refuses. A rank that leaves by an error of its own leaves its reason in the store.
"""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from bigbatch.errors import DistributedError

_REASON = "bigbatch/reason"
_PATIENCE_SECONDS = 5.0
"""A killed process closes its connections one after another, and an error of another rank takes a moment to be said."""


class Farewell:
    """What a rank leaves behind, and what it finds of the others.

    Args:
        ranks: Of the group, by their number in the world.
    """

    def __init__(self, ranks: tuple[int, ...]):
        self._ranks = ranks
        self._addresses: dict[int, str] = {}
        _store().set(f"bigbatch/at/{dist.get_rank()}", _listening_at())

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Farewell:
        """That of a process group; made once, for it takes messages to the store."""
        ranks = tuple(dist.get_process_group_ranks(group))
        known = _KNOWN.setdefault(_store(), {})
        if ranks not in known:
            known[ranks] = cls(ranks)
        return known[ranks]

    def look_around(self) -> None:
        """Remember where the others are; after the first collective, when each has said it."""
        if not self._addresses:
            self._addresses = {rank: _store().get(f"bigbatch/at/{rank}").decode() for rank in self._ranks}

    def leave(self, reason: str) -> None:
        """Say why this rank goes; the first reason stays."""
        with suppress(RuntimeError):  # the rank that holds the store may be gone, and this is the lesser error
            _store().compare_set(_REASON, "", reason)

    def explained(self, error: BaseException) -> DistributedError:
        """The error of a collective, with the rank that is to blame for it."""
        said = str(error).partition("\n")[0]
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            gone = [rank for rank, address in self._addresses.items() if _is_gone(address)]
            if reason := self._reason():
                break
            if gone:
                names = f"Rank {gone[0]} is" if len(gone) == 1 else f"Ranks {', '.join(map(str, gone))} are"
                reason = f"{names} gone: the process has ended, killed or by an error of its own."
                self.leave(reason)
                break
            if time.monotonic() > until:
                reason = f"Rank {dist.get_rank()} cannot reach the others, though their processes are there."
                break
            time.sleep(0.1)
        named = re.match(r"Ranks? (\d+)", reason)
        return DistributedError(
            f"{reason} The step was not made, and the process group cannot be used any more: start all ranks again, "
            f"from the last checkpoint. Torch says: {said}",
            rank=int(named.group(1)) if named else None,
        )

    def _reason(self) -> str:
        try:
            return _store().get(_REASON).decode() if _store().check([_REASON]) else ""
        except RuntimeError:
            return ""


# By the store of the process group, which is another one after a new init_process_group.
_KNOWN: WeakKeyDictionary[Any, dict[tuple[int, ...], Farewell]] = WeakKeyDictionary()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@cache
def _listener() -> socket.socket:
    return socket.create_server(("", 0), backlog=128)


def _listening_at() -> str:
    return f"{_own_address()}:{_listener().getsockname()[1]}"


def _own_address() -> str:
    """The address that others on the network of the store reach this host by."""
    host, store = getattr(_store(), "host", None), getattr(_store(), "underlying_store", None)
    while host is None and store is not None:
        host, store = getattr(store, "host", None), getattr(store, "underlying_store", None)
    if host is None:  # a store in a file: all ranks are on this host
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing; it only chooses the way
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()


def _is_gone(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return True
    return False
