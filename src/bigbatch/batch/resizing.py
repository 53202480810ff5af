"""Batches of any length, made from one that is at hand by repeating its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bigbatch.batch.collating import check_list_of_samples, collated, samples_for
from bigbatch.batch.cutting import lay_out
from bigbatch.batch.logical import LogicalBatch
from bigbatch.batch.sizes import spans
from bigbatch.values import StepOptions


def micro_batch_of(batch: Any, num_samples: int, options: StepOptions) -> Any:
    """A micro-batch of so many samples, as the step would cut it from a batch that is large enough.

    Args:
        batch: What a step gets; its samples are repeated where it has too few, and with ``length`` the longest is.
        num_samples: Of the micro-batch.
        options: Of the step: ``collate`` and what goes with it, and ``batch_dims``.

    Raises:
        BatchError: The batch cannot be cut.
    """
    if options.collate is not None:
        check_list_of_samples(batch)
        return collated(samples_for(batch, num_samples, options), options)
    layout = lay_out(batch, options.batch_dims)
    times = math.ceil(num_samples / layout.num_samples)
    return layout.mapped(lambda value, dim: _repeated(value, dim, times, num_samples))


def cut_batch_of(batch: Any, sizes: Sequence[int], options: StepOptions) -> LogicalBatch:
    """Micro-batches of these sizes beside the whole batch that they are cut from, as ``micro_batch_of`` makes it."""
    whole = micro_batch_of(batch, sum(sizes), options)
    if len(sizes) == 1:
        return LogicalBatch([whole])
    if options.collate is not None:
        return LogicalBatch([micro_batch_of(batch, size, options) for size in sizes], whole=whole)
    layout = lay_out(whole, options.batch_dims)
    return LogicalBatch([layout.cut(start, length) for start, length in spans(list(sizes))], whole=whole)


def _repeated(value: Any, dim: int, times: int, num_samples: int) -> Any:
    if isinstance(value, torch.Tensor):
        shape = [1] * value.dim()
        shape[dim] = times
        # A clone, so that it has the memory of its own samples only.
        return value.repeat(shape).narrow(dim, 0, num_samples).clone(memory_format=torch.contiguous_format)
    if isinstance(value, list | tuple):
        return (value * times)[:num_samples]
    return value.take([index % value.shape[dim] for index in range(num_samples)], axis=dim)  # a NumPy array
