"""Which modules FSDP2 gathers by themselves, when nobody has said it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def blocks_to_shard(model: nn.Module) -> list[nn.Module]:
    """The outermost blocks of lists that have weights of their own; a weight that is tied to another place has not."""
    num_owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            num_owners[id(p)] = num_owners.get(id(p), 0) + 1
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and module is not model:
            inside = {id(inner) for block in found for inner in block.modules()}
            found += [block for block in module if id(block) not in inside and _has_own(block, num_owners)]
    return found


def _has_own(block: nn.Module, num_owners: Mapping[int, int]) -> bool:
    parameters = list(block.parameters())
    return bool(parameters) and all(num_owners[id(p)] == 1 for p in parameters)
