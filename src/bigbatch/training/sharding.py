"""FSDP2: a model whose weights are spread over the ranks, and its state as that of a model in one piece.

What is saved is whole, and by the names and numbers of the model in one piece, so a run may go on with FSDP2, with DDP,
or on one rank, whichever it was saved from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bigbatch.stepping.distributed.wrapping import blocks_to_shard


def shard(model: nn.Module) -> None:
    """Spread the weights of a model over all ranks, beginning with those of rank 0.

    Each block of a list of blocks (``nn.ModuleList``, ``nn.Sequential``) is gathered by itself when it runs, and what
    is beside them with the whole model.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)
    for block in blocks_to_shard(model):
        fully_shard(block)
    fully_shard(model)


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights: after a forward without a backward, the outermost module still has its own."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: Any) -> Any:
    """A state with its tensors in one piece, on the host. All ranks call this."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.full_tensor().cpu()
    if isinstance(value, Mapping):
        return {name: whole(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(whole, value))
    return value


def like(value: Any, wanted: Any) -> Any:
    """A tensor in one piece as ``wanted`` is: the part of this rank, when that is spread over them."""
    if isinstance(wanted, DTensor) and isinstance(value, torch.Tensor) and value.shape == wanted.shape:
        value = value.to(wanted.device)
        return distribute_tensor(value, wanted.device_mesh, wanted.placements, src_data_rank=None)
    return value


def like_model(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state of a model in one piece, as this model can load it."""
    now = model.state_dict()
    return {name: like(value, now[name]) for name, value in state.items()}


def like_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer of a model in one piece, as this optimizer can load it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=True))
    spread = {
        number: {name: like(value, of_number[number]) for name, value in one.items()} if number in of_number else one
        for number, one in state["state"].items()
    }
    return {**state, "state": spread}
