"""Messages as PyTorch and the libraries under it write them, and messages that only look like these."""

from __future__ import annotations

import errno

import pytest
import torch

import bigbatch as bb
from bigbatch.memory.out_of_memory import is_out_of_memory

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4096 bytes. Error code 12 (Cannot allocate memory)"
)
IN_REPLICA = "Caught RuntimeError in replica 1 on device 1.\nOriginal Traceback (most recent call last):\n  ...\n"

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB."),
    torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory. (out of memory)"),
    torch.AcceleratorError("CUDA error: out of memory"),
    MemoryError(),
    MemoryError("std::bad_alloc"),
    MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    *map(
        RuntimeError,
        [
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.6 GiB allocated)",
            IN_REPLICA + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
            "HIP out of memory. Tried to allocate 20.00 MiB",
            "XPU out of memory. Tried to allocate 20.00 MiB",
            "NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.97 GiB total capacity)",
            "MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1.2 GB, max allowed: 18.1 GB).",
            "Invalid buffer size: 19.38 GiB",
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call.",
            "HIP error: out of memory\nHIP kernel errors might be asynchronously reported at some other API call.",
            "CUDA driver error: out of memory",
            "HIP driver error: out of memory",
            "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated : 1.2 GiB",
            "Triton Error [CUDA]: out of memory",
            "Error in cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
            "rocBLAS error: rocblas_status_memory_error",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
            "Unable to find a valid cuDNN algorithm to run convolution",
            "miopenStatusAllocFailed",
            "cusparse error: CUSPARSE_STATUS_ALLOC_FAILED",
            "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED",
            "CURAND error: CURAND_STATUS_ALLOCATION_FAILED",
            "cuFFT error: CUFFT_ALLOC_FAILED",
            "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
            "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
            "NCCL Error 1: unhandled cuda error: Failed to CUDA calloc 67108864 bytes",
            "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error\nLast error:\nFailed to CUDA calloc async 4",
            "NCCL error: unhandled cuda error\nLast error:\nCuda failure 'out of memory'",
            "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
            CPU,
            IN_REPLICA + "RuntimeError: " + CPU,
            "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1",
            "C10 Out of Memory. Trying to allocate 4096 bytes.",
            "unable to mmap 4096 bytes from file </torch_7_1_0>: Cannot allocate memory (12)",
            "MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory to allocate",
            "could not create a primitive",
            "could not create a memory object",
            IN_REPLICA + "RuntimeError: could not create a primitive",
            "std::bad_alloc",
        ],
    ),
]

OTHERS = [
    None,
    KeyboardInterrupt(),
    ValueError("CUDA out of memory is what I call this, but it is a ValueError"),
    ValueError("memory must be 'pinned' or 'pageable'"),
    KeyError("out of memory"),
    AttributeError("module 'torch' has no attribute 'memory'"),
    TypeError("memory_format must be torch.memory_format"),
    AssertionError("CUDA out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
    bb.BudgetError("No micro-batch fits in 1.00 GiB", smallest_bytes=2, budget_bytes=1),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    *map(
        RuntimeError,
        [
            "CUDA error: an illegal memory access was encountered",
            "CUDA error: device-side assert triggered",
            "CUDA error: misaligned address",
            "CUDA error: unspecified launch failure",
            "CUDA error: too many resources requested for launch",
            "CUDA error: no kernel image is available for execution on the device",
            "HIP error: an illegal memory access was encountered",
            "CUDA error: uncorrectable ECC error encountered",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
            "out of resource: shared memory, Required: 131072, Hardware limit: 101376",
            "Triton Error [CUDA]: an illegal memory access was encountered",
            "Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
            "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
            "could not create a primitive descriptor for a convolution forward propagation primitive",
            "could not create a memory descriptor from blob",
            "could not execute a primitive",
            "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)",
            "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
            "shape '[4, 5]' is invalid for input of size 12",
            "index out of range in self",
            "Placeholder storage has not been allocated on MPS device!",
            "[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0",
            "DataLoader worker (pid 7) is killed by signal: Killed.",
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit.",
            "unable to write to file </torch_7_1_0>: No space left on device (28)",
            "unable to mmap 4096 bytes from file </torch_7_1_0>: No such file or directory (2)",
            "unable to allocate shared memory(shm) for file </torch_7_1_0>: Success (0)",
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned in memory",
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
            "memory location.",
            "expected memory_format to be contiguous",
            "NCCL communicator was aborted",
            "Trying to backward through the graph a second time",
            "My cache of 12 entries ran out of memory slots",
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


def test_the_list_is_long_and_half_of_it_looks_alike():
    assert len(OUT_OF_MEMORY) + len(OTHERS) >= 60
    assert len(OTHERS) >= 30


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
