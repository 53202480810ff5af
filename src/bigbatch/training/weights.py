"""The state of a module as a safetensors file; tied weights are written once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_ALIASES = "aliases"


def split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a safetensors file can hold, and the rest (such as what ``get_extra_state`` gives)."""
    tensors = {name: value for name, value in state.items() if _is_plain(value)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_complex()
        and not value.is_meta
    )


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all of them; tied ones count once."""
    kept, _ = _without_aliases(tensors)
    return sum(tensor.nbytes for tensor in kept.values())


def write(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write them; the other names of tied ones go into the header."""
    from safetensors.torch import save_file

    kept, aliases = _without_aliases(tensors)
    save_file(kept, str(path), metadata={_ALIASES: json.dumps(aliases)})


def read(path: Path) -> dict[str, torch.Tensor]:
    """What ``write`` wrote, on the host; tied ones are one tensor under all their names."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        aliases = json.loads((file.metadata() or {}).get(_ALIASES, "{}"))
    return tensors | {name: tensors[kept] for name, kept in aliases.items()}


def _without_aliases(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors with memory of their own, each under its first name, and the other names."""
    first: dict[tuple[Any, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        storage = tensor.untyped_storage().data_ptr()
        whole = tensor.detach().contiguous()
        # Parts of one storage, which safetensors refuses.
        kept[name] = whole.clone() if storage in storages else whole
        storages.add(storage)
    return kept, aliases
