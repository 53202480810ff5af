"""Autocast and loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from bigbatch.errors import OptionError

_DTYPES: dict[Any, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    torch.float32: None,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}
_PEERS_WORDS: dict[Any, str] = {
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "32-true": "fp32",
    "no": "fp32",
    "amp_bf16": "bf16",
    "amp_fp16": "fp16",
}


@cache  # asked for each micro-batch, where a dictionary is faster than torch
def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in: float32 for 16 bits, the same for wider ones."""
    return torch.promote_types(dtype, torch.float32)


class Precision:
    """What the option ``precision`` says, on a device.

    Attributes:
        autocast_dtype: Of the forward; None when nothing is cast.
        scaler: Of the loss, for fp16; None when nothing is scaled.

    Raises:
        OptionError: It is no precision.
    """

    def __init__(self, precision: Any, device_type: str):
        self.scaler: GradScaler | None = None
        if isinstance(precision, GradScaler):
            self.autocast_dtype: torch.dtype | None = torch.float16
            self.scaler = precision if precision.is_enabled() else None
            return
        if not isinstance(precision, str | torch.dtype) or precision not in _DTYPES:
            named = isinstance(precision, str) and precision in _PEERS_WORDS
            meant = f' Did you mean "{_PEERS_WORDS[precision]}"?' if named else ""
            raise OptionError(
                f'precision={precision!r}; it is "fp32", "bf16", "fp16", the torch dtype, or your GradScaler.{meant} '
                f"The parameters keep their dtype: cast the model yourself to train in float64 or in pure bfloat16."
            )
        self.autocast_dtype = _DTYPES[precision]
        if self.autocast_dtype == torch.float16:
            self.scaler = GradScaler(device_type)

    @property
    def scale(self) -> Callable[[Any], Any] | None:
        """What multiplies by the scale of the loss; None when nothing is scaled."""
        return None if self.scaler is None else self._scaled

    def _scaled(self, value: Any) -> Any:
        scaler = self.scaler
        assert scaler is not None
        try:
            return scaler.scale(value)
        except Exception:
            # Torch makes two tensors at the first use, and cannot go on with the first of them alone.
            if scaler._growth_tracker is None:
                scaler._scale = None
            raise

    def begin(self, device: torch.device) -> None:
        """Let gradients be unscaled on a rank that has scaled no loss, for want of samples.

        Torch makes the scale at the first use.
        """
        if self.scaler is not None and self.scaler._scale is None:
            self._scaled(torch.ones((), device=device))

    def forward(self, device_type: str) -> AbstractContextManager[Any]:
        """The context of a forward. Backward runs outside it, as torch recommends."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)


def forget_unscaled(scaler: GradScaler) -> None:
    """Let ``unscale_`` be called again, with the scale as it was: a failed step has called it and not ``update``."""
    before = scaler.state_dict()
    if any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values()):
        scaler.update()
        scaler.load_state_dict(before)
