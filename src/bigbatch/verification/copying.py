"""A private copy of a model that runs in this process alone, whatever ranks the model itself is shared with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import DistributedError
from bigbatch.memory.naming import unwrapped
from bigbatch.stepping.gradients import is_sharded


class OfOneRank(nn.Module):
    """Takes the place of a ``DistributedDataParallel`` in a copy: calls what is inside, and talks to nobody."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What is inside."""
        return self.module(*args, **kwargs)


class _BatchNormOfOneRank(nn.SyncBatchNorm):
    forward = _BatchNorm.forward


def private_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in ``dtype``, as it is on this rank; no forward or backward of it waits for another one.

    Raises:
        DistributedError: Its weights are spread over the ranks.
    """
    if any(is_sharded(p) for p in model.parameters()):
        raise DistributedError(
            "bb.verify runs a private copy of the model on each rank by itself, and the weights of this one are spread "
            "over the ranks by fully_shard. Verify the model before fully_shard, or in a process without torchrun."
        )
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is not None:
            memo[id(module.process_group)] = module.process_group  # which cannot be copied
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            memo[id(module)] = OfOneRank(copy.deepcopy(module.module, memo))
    found = copy.deepcopy(model, memo).to(dtype)
    for module in found.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = _BatchNormOfOneRank
    return found


def inside(model: nn.Module) -> nn.Module:
    """The module that such a copy is wrapped around."""
    model = unwrapped(model)
    return inside(model.module) if isinstance(model, OfOneRank) else model
