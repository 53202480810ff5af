"""Tell an error that means "out of memory" from all others.

Only CUDA's allocator has a class of its own for it. Everybody else raises a ``RuntimeError`` and says it in words,
so the words are what is looked at. They are the beginnings of messages in PyTorch's source, not any text with
"memory" in it: after an illegal memory access the device cannot go on, and trying again would hide that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from bigbatch.errors import BudgetError

_TEXTS = re.compile(
    "|".join(
        (
            r"\b(CUDA|HIP|XPU) out of memory\b",  # the caching allocators
            r"\b(CUDA|HIP) error: out of memory\b",  # a call of the runtime; torch.AcceleratorError
            r"\b(CUDA|HIP) driver error: out of memory\b",  # expandable segments
            r"\bMPS backend out of memory\b",
            r"\b(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED\b",
            r"\bCUFFT_ALLOC_FAILED\b",
            r"\bCUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED\b",
            r"\bFailed to CUDA (host )?[cm]alloc\b",  # NCCL
            r"\bDefaultCPUAllocator: (can't allocate memory|not enough memory)\b",
            r"^could not create a primitive$",  # oneDNN; "... a primitive descriptor ..." is something else
            r"^std::bad_alloc$",
        )
    )
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, says that memory ran out.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    if isinstance(error, BudgetError):
        return False  # Ours, and the answer to running out: trying again with less was what led to it.
    return any(_says_so(link) for link in _chain(error))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # What was being handled counts too, unless the raiser said "from None".
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
