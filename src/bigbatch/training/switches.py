"""Switches that make a run faster and belong to no model: each can be seen in the log of the run."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import nn

from bigbatch.errors import OptionError, warn


@dataclass(frozen=True)
class Switches:
    """What is switched on.

    Attributes:
        compile: ``model.compile()``: the first steps take longer.
        channels_last: Weights of convolutions lie channels last; the first of them turns its input.
        cudnn_benchmark: cuDNN tries its algorithms at each new shape; good where shapes repeat. For the whole process.
        tf32: Matrix products and convolutions in float32 round their inputs to 10 bits on CUDA. For the whole process.
    """

    compile: bool = False
    channels_last: bool = False
    cudnn_benchmark: bool = False
    tf32: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are on, as on the command line."""
        return tuple(spec.name.replace("_", "-") for spec in fields(self) if getattr(self, spec.name))

    def apply(self, model: nn.Module, device: torch.device, *, is_sharded: bool = False) -> None:
        """Switch them on. The model stays the same module, with the same names in its state.

        Args:
            model: On its device, and not wrapped yet.
            device: Of the run.
            is_sharded: Its weights will be spread over ranks.

        Raises:
            OptionError: One does not go with weights that are spread over ranks.

        Warns:
            BigBatchWarning: One has no effect on this device.
        """
        if self.channels_last and is_sharded:
            raise OptionError(
                "--channels-last with --parallel fsdp2: FSDP2 spreads only weights that are contiguous in memory. Use "
                "--parallel ddp, or leave --channels-last out."
            )
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if self.compile:
            model.compile()
        if device.type != "cuda" and (self.cudnn_benchmark or self.tf32):
            on = " and ".join(f"--{name}" for name in self.names if name in ("cudnn-benchmark", "tf32"))
            warn(f"On {device.type} there is no effect of {on}: it is for CUDA. Leave it out.")
        if self.cudnn_benchmark:
            torch.backends.cudnn.benchmark = True
        if self.tf32:
            # Not allow_tf32: torch refuses to read one of the two ways where the other was used.
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.cudnn.conv.fp32_precision = "tf32"  # pyright: ignore[reportAttributeAccessIssue]
