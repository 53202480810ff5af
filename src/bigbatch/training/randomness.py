"""The random number generators of a run: of torch, Python and NumPy, as values that can be saved, and from a seed."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from bigbatch.stepping.generators import seed_host


def state(device: torch.device) -> dict[str, Any]:
    """How the generators are now, in tensors and plain values."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": _plain(numpy.random.get_state(legacy=False)) if numpy is not None else None,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators back; that of a device which this run does not use is left alone."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    # Not loaded for this: a dataset or model that draws from it has loaded it when it was built.
    numpy = sys.modules.get("numpy")
    if state["numpy"] is not None and numpy is not None:
        key = numpy.asarray(state["numpy"]["state"]["key"], dtype=numpy.uint32)
        numpy.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})


def begin(*seed: str | int) -> None:
    """Set the generators of this process to where a stream of that name begins."""
    number = seed_of(*seed)
    torch.manual_seed(number)  # of all devices
    seed_host(number)


def seed_of(*names: str | int) -> int:
    """A seed of its own for each name."""
    # torch's generator for the host takes 32 bits of a seed, so numbers cannot be packed side by side into it.
    return random.Random(" ".join(map(str, names))).getrandbits(32)


def _plain(value: Any) -> Any:
    """Without arrays, which a safe reader of pickles refuses."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
