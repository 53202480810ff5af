"""What the ranks of a run say, and which of them says it. Nothing here loads torch."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import typer

from bigbatch.errors import BigBatchError, BigBatchWarning, DistributedError, RunStopped
from bigbatch.training.rank import Rank

if TYPE_CHECKING:
    from bigbatch.training.group import Group

_SECONDS_TO_SPEAK = 30.0
_SECONDS_AFTER_ANOTHER = 0.5


print_now = partial(print, flush=True)


def tell(words: object) -> None:
    """Say on stderr what went wrong, and on which rank when there are several."""
    rank = Rank()
    with contextlib.suppress(DistributedError):  # the environment is what is wrong
        rank = Rank.of()
    whose = f", {rank}" if rank.world_size > 1 else ""
    print(f"bigbatch{whose}: {words}", file=sys.stderr, flush=True)


def sayer(group: Group) -> Callable[..., None]:
    """``print`` for rank 0. The others see what it sees, so warnings and the log are silenced there too."""
    if group.is_first:
        return print_now
    import logging  # torch has loaded it; --help does not wait for it

    logging.getLogger("bigbatch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", BigBatchWarning)
    return lambda *words: None


@contextmanager
def speaking(joined: AbstractContextManager[Group]) -> Iterator[Group]:
    """Join the ranks; tell once what ends the run on all of them, and exit: 1 for an error; 143 or 130 for a signal.

    torchrun ends all ranks as soon as one has ended so. The others wait until the one that speaks has spoken.
    """
    group = None
    try:
        with joined as group:
            yield group
    except RunStopped as stopped:
        if group is None or group.is_first:
            print(f"bigbatch: {stopped} To go on, give --run-dir {stopped.path.parents[1]} --resume auto.", flush=True)
        _wait_for_first(group)
        raise typer.Exit(128 + stopped.signal_number) from None
    except BigBatchError as error:
        if _is_said(group, str(error)):
            time.sleep(_SECONDS_AFTER_ANOTHER)
        else:
            tell(error)
        raise typer.Exit(1) from None
    except Exception as error:
        if group is not None and group.store is not None:  # the traceback that Python prints does not say whose it is
            tell(f"{type(error).__name__}, which is told below")
        raise


def _wait_for_first(group: Group | None) -> None:
    if group is None or group.store is None:
        return
    # When rank 0 is gone, so may be the store; then there is nothing to wait for.
    with contextlib.suppress(RuntimeError):
        if group.is_first:
            group.store.set("last words", "")
        else:
            group.store.wait(["last words"], timedelta(seconds=_SECONDS_TO_SPEAK))


def _is_said(group: Group | None, words: str) -> bool:
    """Whether another rank has said the same."""
    if group is None or group.store is None:
        return False
    with contextlib.suppress(RuntimeError):
        return group.store.add(f"said {words}", 1) > 1
    return False
