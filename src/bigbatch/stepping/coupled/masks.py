"""Masks of dropout that are drawn in the first of two forwards, kept as bits, and not drawn again in the second.

Random numbers are most of what dropout costs on a CPU, about 4 ns for an entry and a quarter of the time of a small
transformer (https://github.com/pytorch/pytorch/issues/138199; without it this module could go). A card draws them while
it reads, so nothing is kept there.

During a step ``torch.nn.functional.dropout``, which ``nn.Dropout`` calls too, is another function; outside of the two
forwards, in other threads and in compiled code it does what torch's does. A mask is found again by the state of the
generator from which it was drawn, and where it is taken, the generator is set to where drawing has left it. So each
call has the mask that torch would draw there, whatever else the second forward does, and whatever else draws (dropout
inside of attention, noise of the user's, a part that is recomputed) finds the numbers that it would find.

A mask takes one bit for each entry, where the graph holds a number of noise, and one state of the generator. Small
masks are drawn again, because that state would outweigh them. Of ``MOST_WITH_MASKS`` micro-batches at most, all masks
together take half to all of what the noise of one takes in float32, however large the batch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from bigbatch.planning.costs import mask_bytes

# Private to torch, as other names here are; tests "selective", "grad" and "vmap" fail when they change.
_LISTENING = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
"""Of selective checkpoints, which expect of the second forward the operations that they see in the recomputation."""

_NORMALS = 24 + 624 * 8
"""Where a state has the normal numbers that are left over; before are seed, place in a block of numbers, and the block.
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/CPUGeneratorImpl.cpp"""

# Eight bytes of 0 or 1 as one word of 64 bits: multiplying gathers their lowest bits in the top byte, and back.
_TO_BITS = 0x0102_0408_1020_4080
_TO_BYTES = 0x0101_0101_0101_0101
_EACH_ITS_BIT = 0x8040_2010_0804_0201 - 2**64  # the same bits, as int64 has them
_CARRY = 0x7F7F_7F7F_7F7F_7F7F

_torch_dropout = F.dropout
_running: ContextVar[Masks | None] = ContextVar("_running", default=None)


class _Mask(NamedTuple):
    """Which entries are kept, as bits; of which tensor; and the state of the generator afterwards."""

    bits: Tensor
    kind: tuple[Any, ...]
    after: Tensor


class Masks:
    """Those of the two forwards of one micro-batch; see ``standing_in``.

    Attributes:
        num_entries: Of each mask of the first forward, kept or too small.
    """

    def __init__(self) -> None:
        self.num_entries: list[int] = []
        self._drawn: dict[Any, _Mask] = {}
        self._is_second = False
        self._num_fakes = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the block, the first forward: what is drawn is kept."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the block, the second forward: what is kept is taken, and let go of."""
        self._is_second, self._num_fakes = True, 0
        with self.drawing():
            yield

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """What torch's dropout returns, operation by operation, so that results are the same bits.

        https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Dropout.cpp
        """
        if not self._is_second:
            self.num_entries.append(x.numel())
        if not mask_bytes(x.numel()):
            return _torch_dropout(x, p)
        place, kind = self._place_of(x), (x.shape, x.dtype, p, getattr(x, "fake_mode", None))
        if not self._is_second:
            noise = torch.empty_like(x).bernoulli_(1 - p)
            self._drawn[place] = _Mask(_packed(noise), kind, _state_beside(x))
            return x * noise.div_(1 - p)
        mask = self._drawn.get(place)
        if mask is None or mask.kind != kind:
            return _torch_dropout(x, p)
        del self._drawn[place]
        if not isinstance(x, FakeTensor):
            torch.set_rng_state(mask.after)
        return x * _unpacked(mask.bits, x).div_(1 - p)

    def _place_of(self, x: Tensor) -> Any:
        """Where in the stream of random numbers this call is; one without numbers draws none, and is counted."""
        if isinstance(x, FakeTensor):
            self._num_fakes += 1
            return self._num_fakes
        state = torch.get_rng_state()
        # The first five numbers of a block are in no other one.
        return bytes(torch.cat((state[:64], state[_NORMALS:])).tolist())


@contextmanager
def standing_in() -> Iterator[None]:
    """Within the block, dropout may take masks that are kept. Nothing is done where somebody has replaced it before."""
    if F.dropout is not _torch_dropout:
        yield
        return
    F.dropout = _dropout
    try:
        yield
    finally:
        if F.dropout is _dropout:
            F.dropout = _torch_dropout


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not torch.compiler.is_compiling():
        if has_torch_function_unary(input):  # torch's own would hand modes the function that stands in for it
            how = {"p": p, "training": training, "inplace": inplace}
            return handle_torch_function(_torch_dropout, (input,), input, **how)
        masks = _running.get()
        if masks is not None and training and not inplace and _can_be_kept(input, p):
            return masks.dropout(input, p)
    return _torch_dropout(input, p, training, inplace)


# Of which torch.jit.script, called in a forward or in another thread, makes what it makes of torch's.
vars(_dropout).update(__script_if_tracing_wrapper=True, __original_fn=_torch_dropout)


def _can_be_kept(x: Any, p: Any) -> bool:
    """Whether torch draws the mask as one tensor like the input, and nobody notes which operations are run for it."""
    return (
        (type(x) is Tensor or isinstance(x, FakeTensor))
        and torch._C._get_tracing_state() is None
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not x.is_nested
        and x.is_contiguous()
        and type(p) is float
        and 0 < p < 1
        and peek_interpreter_stack() is None  # of vmap and grad, whose tensors end with them
        and not any(isinstance(mode, _LISTENING) for mode in _get_current_dispatch_mode_stack())
    )


def _state_beside(x: Tensor) -> Tensor:
    """The state of the generator, in a tensor that is counted as others are; beside a fake one, without numbers."""
    state = torch.get_rng_state()
    counted = torch.empty(state.numel(), dtype=torch.uint8)
    return counted if isinstance(x, FakeTensor) else counted.copy_(state)


def _packed(noise: Tensor) -> Tensor:
    """Eight entries, each 0 or 1, as one byte: a product brings the last bit of each to the first byte of a word."""
    words = noise.to(torch.bool).view(-1).view(torch.int64)
    return words.mul(_TO_BITS).bitwise_right_shift_(56).to(torch.uint8)


def _unpacked(bits: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``_packed``: each byte eight times, of each of these its own bit, as 0 or 1."""
    words = bits.to(torch.int64).mul_(_TO_BYTES).bitwise_and_(_EACH_ITS_BIT)
    words = words.add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_TO_BYTES)
    return words.view(torch.uint8).to(like.dtype).view(like.shape)
