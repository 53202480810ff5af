"""Everything bigbatch raises or warns with.

Each error is ours (``BigBatchError``) and also the builtin that people already catch. A message says what was found
(with values and paths), what is needed, and what to do; the numbers in it are attributes too.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class BigBatchError(Exception):
    """Base of every error that bigbatch raises on purpose."""


class ArgumentError(BigBatchError, TypeError):
    """An argument is of the wrong kind; the message shows the line to write."""


class OptionError(BigBatchError, ValueError):
    """An option has a value that it cannot have, or does not go with another one."""


class DeviceError(OptionError):
    """A device was named that torch does not find on this machine.

    Attributes:
        available: Those that it finds.
    """

    def __init__(self, message: str, available: tuple[str, ...]):
        super().__init__(message)
        self.available = available


class BatchError(BigBatchError, ValueError):
    """The batch cannot be cut or weighed; the message names paths and lengths."""


class EmptyBatchError(BatchError):
    """The batch has no samples. On one of several ranks that is no error: the rank takes part with weight 0."""


class LengthError(BatchError):
    """A sample is longer than a micro-batch may be.

    Attributes:
        index: Of the sample in its batch.
        length: Its length, padded.
        max_tokens: The most tokens that a micro-batch may hold.
    """

    def __init__(self, message: str, *, index: int, length: int, max_tokens: int):
        super().__init__(message)
        self.index = index
        self.length = length
        self.max_tokens = max_tokens


class LossError(BigBatchError, ValueError):
    """The loss function returned something that is not a loss, or weights that do not add up."""


class GradientError(BigBatchError, RuntimeError):
    """Gradients are not in the state that a step needs: left over, or changed during backward."""


class NonFiniteError(BigBatchError, FloatingPointError):
    """A loss or a gradient is NaN or infinite. Nothing was moved.

    Attributes:
        names: The loss terms and the parameters that are not finite, the loss first.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()):
        super().__init__(message)
        self.names = names


class BudgetError(BigBatchError, MemoryError):
    """Nothing fits in the memory budget.

    Attributes:
        smallest_bytes: The smallest peak that was found, in bytes; None when even that ran out of memory.
        budget_bytes: The budget it was held against, in bytes; None when that was all the memory there is.
        what_else: What else would help, each a sentence: another ``batch_norm`` that would fit, then the most
            helpful first, with its bytes.
    """

    def __init__(
        self,
        message: str,
        smallest_bytes: int | None,
        budget_bytes: int | None,
        what_else: tuple[str, ...] = (),
    ):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.budget_bytes = budget_bytes
        self.what_else = what_else


class StateLostError(BigBatchError, RuntimeError):
    """The optimizer failed when it had moved a part of the parameters, and that could not be undone."""


class RecomputeError(BigBatchError, RuntimeError):
    """A module cannot be recomputed in the way that was asked for."""


class TraceError(BigBatchError, RuntimeError):
    """A model cannot be followed without numbers: what it does, and so its memory, may depend on them."""


class DistributedError(BigBatchError, RuntimeError):
    """The process group is in a state that a step cannot run in, or another rank has failed.

    Attributes:
        rank: The first rank that has failed, when one has.
    """

    def __init__(self, message: str, *, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class RankMemoryError(DistributedError, MemoryError):
    """Memory ran out on another rank; all ranks undid the step."""


class TaskError(BigBatchError, ValueError):
    """A task, a task file, or what one of its callables returned cannot be used."""


class CheckpointError(BigBatchError, OSError):
    """A checkpoint cannot be written, cannot be trusted, or belongs to another run.

    Attributes:
        path: The checkpoint, or the folder it should be in.
        why: What is wrong with it, without its name.
        needed_bytes: When the disk is full: what the checkpoint needs, at least.
        free_bytes: When the disk is full: what is free.
    """

    def __init__(
        self,
        message: str,
        *,
        path: Path | None = None,
        why: str = "",
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
    ):
        super().__init__(message)
        self.path = path
        self.why = why or message
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class RunStopped(BigBatchError, InterruptedError):
    """A run was told to stop by a signal; it finished its step and was saved.

    Attributes:
        signal_number: Of the signal: 15 is SIGTERM, 2 is Ctrl-C.
        path: The checkpoint to go on from.
    """

    def __init__(self, message: str, *, signal_number: int, path: Path):
        super().__init__(message)
        self.signal_number = signal_number
        self.path = path


class MissingExtraError(BigBatchError, ImportError):
    """A package of one of the extras is missing; the message names the extra to install."""


class BigBatchWarning(UserWarning):
    """Something the user set has no effect, or is likely not what was meant."""


def warn(message: str) -> None:
    """Warn with ``BigBatchWarning`` at the line that called us from outside, however deep the cause lies."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("bigbatch."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, BigBatchWarning, stacklevel=level)
