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
    """What a function returns that runs in a gloo group of this process.

    The group ends after all that the function has made. If a DDP wrapper outlives it, ``~Reducer`` ends the group while
    it holds the interpreter's lock, and waits for gloo's threads; one of them may wait for that lock, to let go of what
    was set for the thread when the reduction began, such as hooks for saved tensors (seen in torch 2.13.0: one in a
    thousand hung so, where no signal and no time limit in Python reaches).
    """
    with tempfile.TemporaryDirectory() as folder:
        store = "file://" + os.path.join(folder, "store")
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            return function()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            gc.collect()
            dist.destroy_process_group()
