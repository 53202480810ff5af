"""FSDP2: a model whose weights are spread over the ranks, and its state beside that of a model in one piece.

Both have the names, numbers and shapes of the model in one piece, so a run may go on with FSDP2, with DDP, or on one
rank, whichever it was saved from. No rank holds more than its part and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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


def mapped(value: Any, change: Callable[[str, torch.Tensor], Any], name: str = "") -> Any:
    """A state with each tensor in it replaced; its name is the way to it, with dots."""
    if isinstance(value, torch.Tensor):
        return change(name, value)
    inside = f"{name}." if name else ""
    if isinstance(value, Mapping):
        return {key: mapped(inner, change, f"{inside}{key}") for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(inner, change, f"{inside}{i}") for i, inner in enumerate(value))
    return value


def flat(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state, by name."""
    found: dict[str, torch.Tensor] = {}
    mapped(state, found.setdefault)
    return found


def hollow(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with a tensor without numbers (on ``meta``) in the place of each that is spread over the ranks."""

    def without_numbers(_: str, value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, DTensor) else value

    return mapped(state, without_numbers)


def tied(model: nn.Module) -> dict[str, str]:
    """The other names of weights that are in several places, each with the first one."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: kept for name, kept in names.items() if name != kept}


def once(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model's state, tied ones under their first name, as safetensors can hold them."""
    others = tied(model)
    state = {name: value for name, value in model.state_dict().items() if name not in others}
    held = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not value.is_complex()}
    # Wide numbers first, as safetensors does it: in a file, each begins at a multiple of its width.
    return dict(sorted(held.items(), key=lambda item: -item[1].element_size()))


def one_by_one(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each tensor in one piece and on the host, when its turn comes. All ranks go through all of them."""
    for tensor in tensors:
        with torch.no_grad():
            yield (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def take_part(model: nn.Module) -> None:
    """Give the parts of this rank while another one writes ``one_by_one`` what a model has ``once``."""
    for _ in one_by_one(once(model).values()):
        pass


def like(value: torch.Tensor, wanted: Any) -> torch.Tensor:
    """A tensor in one piece as ``wanted`` is: the part of this rank, when that is spread over them.

    For a tensor without numbers: one that has room for them.
    """
    if not isinstance(wanted, DTensor) or isinstance(value, DTensor):
        return _room(value) if value.is_meta else value
    if value.shape == wanted.shape:
        return _part(value, wanted)
    return _room(value) if value.is_meta else value.clone()  # it may be mapped from a file


def _room(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype)


def _part(value: torch.Tensor, wanted: DTensor) -> DTensor:
    part = cast(DTensor, torch.empty_like(wanted, dtype=value.dtype, requires_grad=False))
    if not value.is_meta:
        # Not distribute_tensor, which copies all of it to the device, and leaves a part that is a view of all of it.
        sizes, starts = compute_local_shape_and_global_offset(wanted.shape, wanted.device_mesh, wanted.placements)
        place = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        part.to_local().copy_(value[place])
    return part


def like_model(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state of a model in one piece, as this model can load it."""
    now = model.state_dict()
    return {name: mapped(value, lambda _, tensor, n=name: like(tensor, now[n])) for name, value in state.items()}


def like_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer of a model in one piece, as this optimizer can load it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=True))
    spread = {
        number: mapped(one, lambda _, value, n=number: like(value, of_number.get(n)))
        for number, one in state["state"].items()
    }
    return {**state, "state": spread}
