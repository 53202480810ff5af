"""Messages as PyTorch and the libraries under it write them, and messages that only look like these."""

from __future__ import annotations

import pytest
import torch

import bigbatch as bb
from bigbatch.memory.out_of_memory import is_out_of_memory

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB."),
    MemoryError(),
    MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    *map(
        RuntimeError,
        [
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.6 GiB allocated)",
            "HIP out of memory. Tried to allocate 20.00 MiB",
            "XPU out of memory. Tried to allocate 20.00 MiB",
            "MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1.2 GB, max allowed: 18.1 GB).",
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call.",
            "CUDA driver error: out of memory",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
            "cusparse error: CUSPARSE_STATUS_ALLOC_FAILED",
            "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED",
            "cuFFT error: CUFFT_ALLOC_FAILED",
            "NCCL Error 1: unhandled cuda error: Failed to CUDA calloc 67108864 bytes",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4096 bytes. Error code 12 (Cannot allocate memory)",
            "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1",
            "could not create a primitive",
            "std::bad_alloc",
        ],
    ),
]

OTHERS = [
    None,
    KeyboardInterrupt(),
    ValueError("CUDA out of memory is what I call this, but it is a ValueError"),
    KeyError("out of memory"),
    OSError(28, "No space left on device"),
    bb.BudgetError("No micro-batch fits in 1.00 GiB", smallest_bytes=2, budget_bytes=1),
    *map(
        RuntimeError,
        [
            "CUDA error: an illegal memory access was encountered",
            "CUDA error: device-side assert triggered",
            "CUDA error: misaligned address",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
            "out of resource: shared memory, Required: 131072, Hardware limit: 101376",
            "could not create a primitive descriptor for a convolution forward propagation primitive",
            "could not execute a primitive",
            "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)",
            "index out of range in self",
            "DataLoader worker (pid 7) is killed by signal: Killed.",
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
            "memory location.",
            "NCCL communicator was aborted",
            "Trying to backward through the graph a second time",
        ],
    ),
]


def name(error: BaseException | None) -> str:
    return f"{type(error).__name__}-{str(error)[:40]}"


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=name)
def test_out_of_memory_is_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=name)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def test_a_real_one():
    with pytest.raises(RuntimeError, match="allocate") as caught:
        torch.empty(2**60, dtype=torch.uint8)

    assert is_out_of_memory(caught.value)


def raised(*, cause: BaseException | None = None, hide: bool = False) -> BaseException:
    """A ``ValueError`` raised while a real out-of-memory is handled."""
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except RuntimeError as error:
            if hide:
                raise ValueError("wrapped") from None
            if cause is not None:
                raise ValueError("wrapped") from error
            raise ValueError("wrapped")  # noqa: B904
    except ValueError as error:
        return error


def test_errors_that_it_was_raised_from_are_looked_at():
    assert is_out_of_memory(raised())
    assert is_out_of_memory(raised(cause=ValueError()))
    assert not is_out_of_memory(raised(hide=True))


def test_an_error_that_is_its_own_cause_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert not is_out_of_memory(first)


def test_a_budget_error_raised_from_it_is_an_answer_and_not_out_of_memory():
    error = bb.BudgetError("Nothing fits", smallest_bytes=2, budget_bytes=1)
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")

    assert not is_out_of_memory(error)
