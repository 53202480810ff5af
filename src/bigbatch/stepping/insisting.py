"""What must be done although memory is short: to put things back, or to finish what cannot be undone any more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from bigbatch.errors import StateLostError
from bigbatch.memory.out_of_memory import is_out_of_memory

_TRIES = 8


def insist(action: Callable[[], Any], undo: Callable[[], Any] | None = None) -> None:
    """Do what must be done although memory is short, until it succeeds.

    Args:
        action: May be begun again.
        undo: What comes before another try, for an action that may not.
    """
    for tries_left in range(_TRIES, 0, -1):
        try:
            action()
            return
        except Exception as error:
            if tries_left == 1 or isinstance(error, StateLostError) or not is_out_of_memory(error):
                raise
        gc.collect()
        if undo is not None:
            insist(undo)
