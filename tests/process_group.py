"""A process group of this process alone, for tests of what DDP and sharding need one for."""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def in_process_group_of_one(function: Callable[[], Result]) -> Result:
    """Run a function in a gloo group of this process alone, and return what it returns.

    Whatever the function makes is gone before the group ends. A DDP wrapper that outlives the group destroys it from
    ``~Reducer``, which holds the interpreter's lock while it waits for gloo's threads; one of these may wait for that
    lock, to let go of what was set for the thread when the reduction began, such as hooks for saved tensors
    (https://github.com/pytorch/pytorch/issues/56297). In torch 2.13.0 one run in about a thousand hung so, where no
    signal and no time limit in Python reaches.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = "file://" + os.path.join(folder, "store")
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            return function()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the wrapper; a failing test shows no values
            raise
        finally:
            gc.collect()
            dist.destroy_process_group()
