"""Operations whose fakes return less than the real ones do."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_SAMPLES = (4, 8)
_RUN = 2**25
"""What the library keeps is known to the library alone, so it is really run: with all samples up to this many bytes,
and else with as few as this, which give a line."""

_MEANS_IN_LARGE_STORAGES = frozenset(
    {
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.binary_cross_entropy.default,
        torch.ops.aten.soft_margin_loss.default,
    }
)
"""Losses whose mean or sum lies in a storage as large as the values."""


def as_the_kernel_returns(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The result of an operation on fake tensors, with what its fake leaves out.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode():
    ...     x, h = torch.empty(16, 2, 8), torch.empty(2, 4)
    ...     weights = torch.empty(16, 8), torch.empty(16, 4), torch.empty(16), torch.empty(16)
    ...     args = (x, *weights, h, h, False, [], 2, 4, 1, True, False, False, True)
    ...     returned = torch.ops.aten.mkldnn_rnn_layer(*args)
    >>> returned[3].nbytes
    0
    >>> as_the_kernel_returns(torch.ops.aten.mkldnn_rnn_layer.default, args, returned)[3].nbytes > x.nbytes
    True
    """
    if func in _MEANS_IN_LARGE_STORAGES and result.dim() == 0:
        # They make room for one number a value, and shrink it in name only (resize_ in aten/src/ATen/native/Loss.cpp).
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return result.new_empty(shape).as_strided((), ())
    # Without grad mode, as in the first forward of what is recomputed, nothing is kept.
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or not torch.is_grad_enabled():
        return result
    # Its fake says that oneDNN keeps nothing for backward (meta function in torch/_meta_registrations.py, 2.13).
    output, hy, cy, _ = result
    return output, hy, cy, output.new_empty(_bytes_kept_by_lstm(args), dtype=torch.uint8)


def _bytes_kept_by_lstm(args: tuple[Any, ...]) -> int:
    *_, has_biases, bidirectional, _, train = args
    x, mode, hidden = args[0], args[9], args[10]
    # Whatever its argument batch_first says, it is given time steps first.
    length, num_samples, width = x.shape
    ask = functools.partial(_asked, length, width, hidden, x.dtype, mode, has_biases, bidirectional, train)
    small, large = _SAMPLES
    if num_samples <= large:
        return ask(num_samples)
    # Parts of it are rounded up to whole pages, so the line is a little off where there is little.
    expected = ask(large) + (ask(large) - ask(small)) * (num_samples - large) // (large - small)
    return expected if expected > _RUN else ask(num_samples)


@functools.cache
def _asked(
    length: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    mode: int,
    has_biases: bool,
    bidirectional: bool,
    train: bool,
    num_samples: int,
) -> int:
    """Bytes that one layer of oneDNN's LSTM keeps for backward, found by running it."""
    with unset_fake_temporarily(), torch.enable_grad():
        x = torch.zeros(length, num_samples, width, dtype=dtype)
        state = torch.zeros(num_samples, hidden, dtype=dtype)
        weights = [torch.zeros(4 * hidden, size, dtype=dtype) for size in (width, hidden)]
        weights += [torch.zeros(4 * hidden, dtype=dtype) for _ in range(2)]
        returned = torch.ops.aten.mkldnn_rnn_layer(
            x, *weights, state, state, False, [], mode, hidden, 1, has_biases, bidirectional, False, train
        )
    return returned[3].nbytes
