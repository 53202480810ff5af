"""The state of a module as a safetensors file; tied weights are written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
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


def write_in_turns(
    tensors: Mapping[str, torch.Tensor], values: Iterable[torch.Tensor], aliases: Mapping[str, str], path: Path
) -> None:
    """Write tensors of which one is there at a time.

    Args:
        tensors: Their shapes and dtypes, by name.
        values: Each of them on the host, in this order; wide numbers first, so that each begins at a multiple of
            its width.
        aliases: Other names of tied ones, each with the name that is written.
    """
    header: dict[str, Any] = {"__metadata__": {_ALIASES: json.dumps(dict(aliases))}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _name_of(tensor.dtype), "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned in memory
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _name_of(dtype: torch.dtype) -> str:
    """What safetensors calls it."""
    from safetensors.torch import save

    content = save({"": torch.empty(0, dtype=dtype)})
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])[""]["dtype"]


def read(
    path: Path, take: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor
) -> dict[str, torch.Tensor]:
    """What ``write`` wrote, on the host; tied ones are one tensor under all their names.

    Args:
        take: What to keep of a tensor, before the next one is read.
    """
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        tensors = {name: take(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (it is no dict)
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
