"""Tell an error that means "out of memory" from all others.

Only CUDA's allocator has a class of its own for it. Everybody else raises a ``RuntimeError`` and says it in words,
so the words are what is looked at. They are the beginnings of messages in PyTorch's source, not any text with
"memory" in it: after an illegal memory access the device cannot go on, and trying again would hide that.
"""

from __future__ import annotations

import errno
import gc
import re
from collections.abc import Iterator

import torch

from bigbatch.errors import BudgetError

_TEXTS = re.compile(
    "|".join(
        (
            r"\b[A-Z]{3,6} out of memory\b",  # the caching allocators: CUDA, HIP, XPU, NPU, MLU, ...
            r"\b(CUDA|HIP|MUSA) error: out of memory\b",  # a call of the runtime; torch.AcceleratorError
            r"\b(CUDA|HIP) driver error: out of memory\b",  # expandable segments
            r"\bAllocation on device .*would exceed allowed memory\b",  # cudaMallocAsync
            r"\b(CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b",  # names of the codes
            r"\bTriton Error \[\w+\]: out of memory\b",  # a kernel is loaded; "out of resource" is something else
            r"\bMPS backend out of memory\b",
            r"^Invalid buffer size: [\d.]+ [KMGT]?i?B\b",  # MPS: one tensor larger than any buffer may be
            r"\b(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CURAND|HIPBLAS|HIPSPARSE|HIPSOLVER|MIOPEN)_STATUS_ALLOC(ATION)?_FAILED\b",
            r"\b(CUFFT|HIPFFT)_ALLOC_FAILED\b",
            r"\b(rocblas_status_memory_error|miopenStatusAllocFailed)\b",
            r"\bCUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED\b",
            # Each algorithm was tried, and none found room to work in: the convolutions of cuDNN say no more.
            r"\bUnable to find a valid cuDNN algorithm to run convolution\b",
            r"\b(UR|ZE)_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY\b",  # XPU; ..._OUT_OF_RESOURCES is a dead context
            r"\bFailed to CUDA (host )?[cm]alloc\b",  # NCCL
            r"\bCuda failure (\d+ )?'out of memory'",  # NCCL
            r"\bDefaultCPUAllocator: (can't allocate memory|not enough memory)\b",
            r"\bC10 Out of Memory\. Trying to allocate\b",
            r"\bunable to (mmap|allocate) .*Cannot allocate memory \(12\)",  # shared memory; a full one has code 28
            r"\bDFTI ERROR: Not enough memory\b",  # the Fourier transforms of MKL
            # oneDNN; "... a primitive descriptor ..." and "... a memory descriptor ..." are something else.
            r"\bcould not create a (primitive( for a gated mlp primitive)?|memory( object)?)$",
            r"\bstd::bad_alloc\b",
        )
    ),
    re.MULTILINE,
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


def release() -> None:
    """Free what a failed try has left: cycles of its traceback, and what CUDA's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _says_so(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # What was being handled counts too, unless the raiser said "from None".
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
