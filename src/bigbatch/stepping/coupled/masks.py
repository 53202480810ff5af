"""Masks of dropout that are drawn in the first of two forwards, kept as bits, and not drawn again in the second.

On a CPU random numbers take longer than all else in dropout: about 4 ns for an entry, a quarter of the time of a small
transformer. A card draws them while it reads, so nothing is kept there.

The masks, and the random numbers of everything else, are those that torch draws: where a mask is not drawn again, the
generator is set to where drawing it has left it. So whatever draws beside ``nn.Dropout`` (the dropout inside of
attention, noise of the user's) finds the same in both forwards, and so does what runs a part of the second one again.

A mask is a bit for each entry of which the graph of a micro-batch holds four bytes of noise. As they are kept for 15
micro-batches at most (``MOST_WITH_MASKS``), they take less than half of the noise of one, however large the batch is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor

from bigbatch.stepping.compiled import is_compiled

_TO_BITS = 0x0102_0408_1020_4080
_TO_BYTES = 0x0101_0101_0101_0101
_EACH_ITS_BIT = 0x8040_2010_0804_0201 - 2**64
_CARRY = 0x7F7F_7F7F_7F7F_7F7F


class _Mask(NamedTuple):
    """Which entries are kept, as bits, and the state of the generator afterwards."""

    bits: Tensor
    after: Tensor


class Masks:
    """Those of one micro-batch.

    Args:
        layers: Which draw them; see ``layers_of``.
    """

    def __init__(self, layers: Sequence[nn.Dropout]):
        self._layers = layers
        self._drawn: deque[_Mask] = deque()

    @property
    def num_bytes(self) -> int:
        """Of the bits that are kept."""
        return sum(mask.bits.nbytes for mask in self._drawn)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the block, the first forward: the layers draw, and what they draw is kept."""
        with _instead(self._layers, self._draw):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the block, the second forward: the layers take what is kept, which is let go of."""
        with _instead(self._layers, self._take):
            yield
        self._drawn.clear()

    def _draw(self, layer: nn.Dropout, x: Tensor) -> Tensor:
        if not _can_be_kept(layer, x):
            return F.dropout(x, layer.p, layer.training)
        noise = torch.empty_like(x).bernoulli_(1 - layer.p)
        self._drawn.append(_Mask(_packed(noise), torch.get_rng_state()))
        return x * noise.div_(1 - layer.p)

    def _take(self, layer: nn.Dropout, x: Tensor) -> Tensor:
        # A forward that is not the same again draws, as it would without us.
        if not _can_be_kept(layer, x) or not self._drawn or 8 * self._drawn[0].bits.numel() != x.numel():
            return F.dropout(x, layer.p, layer.training)
        mask = self._drawn.popleft()
        torch.set_rng_state(mask.after)
        return x * _unpacked(mask.bits, x).div_(1 - layer.p)


def layers_of(model: nn.Module) -> list[nn.Dropout]:
    """Layers on a CPU that draw masks which may be kept; none in compiled code, which is made for the layers it saw."""
    found = [m for m in model.modules() if isinstance(m, nn.Dropout) and type(m).forward is nn.Dropout.forward]
    drawing = [m for m in found if m.training and m.p > 0 and not m.inplace and "forward" not in vars(m)]
    return [] if not drawing or is_compiled(model) else drawing


@contextmanager
def _instead(layers: Sequence[nn.Dropout], function: Callable[[nn.Dropout, Tensor], Tensor]) -> Iterator[None]:
    """Within the block, what the layers do is this; their hooks are called as ever."""
    try:
        for layer in layers:
            vars(layer)["forward"] = partial(function, layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _can_be_kept(layer: nn.Dropout, x: Tensor) -> bool:
    """Whether torch draws the mask as one tensor like the input, and eight of its entries fill a byte."""
    return (
        layer.training
        and 0 < layer.p < 1
        and (type(x) is Tensor or isinstance(x, FakeTensor))
        and x.device.type == "cpu"
        and x.is_contiguous()
        and x.numel() > 0
        and x.numel() % 8 == 0
        and not torch.compiler.is_compiling()
        and peek_interpreter_stack() is None  # of vmap and grad, whose tensors end with them
    )


def _packed(noise: Tensor) -> Tensor:
    """Eight entries, each 0 or 1, as one byte: a product brings the last bit of each to the first byte of a word."""
    words = noise.to(torch.bool).view(-1).view(torch.int64)
    return words.mul(_TO_BITS).bitwise_right_shift_(56).to(torch.uint8)


def _unpacked(bits: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``_packed``: each byte eight times, of each of these its own bit, as 0 or 1."""
    words = bits.to(torch.int64).mul_(_TO_BYTES).bitwise_and_(_EACH_ITS_BIT)
    words = words.add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_TO_BYTES)
    return words.view(torch.uint8).to(like.dtype).view(like.shape)
