"""The devices that a command line may name. This loads torch."""

from __future__ import annotations

import torch

from bigbatch.errors import DeviceError


def device_named(name: str, option: str = "--device") -> torch.device:
    """The device of that name, which torch finds on this machine.

    Raises:
        DeviceError: It finds none; the message says which there are.
    """
    known = ("cpu", *_accelerators())
    try:
        device = torch.device(name)
    except RuntimeError:  # no name of a device anywhere
        device = None
    if device is None or not (device.type == "cpu" or str(device) in known or f"{device}:0" in known):
        raise DeviceError(
            f"{option} {name}: torch {torch.__version__} finds no such device here, but {', '.join(known)}. Give one "
            f"of these.",
            known,
        )
    return device


def _accelerators() -> list[str]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [] if kind is None else [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]
