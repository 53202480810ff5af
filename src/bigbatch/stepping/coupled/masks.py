"""Masks of dropout that are drawn in the first of two forwards, kept as bits, and not drawn again in the second.

On a CPU random numbers take longer than all else in dropout: about 4 ns for an entry, a quarter of the time of a small
transformer. A card draws them while it reads, so nothing is kept there.

During a step ``torch.nn.functional.dropout``, which ``nn.Dropout`` calls too, is another function; outside of the two
forwards, in other threads and in compiled code it does what torch's does. A mask is found again by the state of the
generator from which it was drawn, and where it is taken, the generator is set to where drawing has left it. So each
call has the mask that torch would draw there, whatever else the second forward does, and whatever else draws (dropout
inside of attention, noise of the user's, a part that is recomputed) finds the numbers that it would find.

A mask is a bit for each entry of which the graph of a micro-batch holds a number of noise, and a state of the
generator. Small ones are drawn again; and as masks are kept for 15 micro-batches at most (``MOST_WITH_MASKS``), they
take about as much as the noise of one in float32, or less, however large the batch is.
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
from torch.overrides import has_torch_function_unary
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

FEWEST_ENTRIES = 2**15
"""Of a mask that is kept: its bits take 4 kB then, and a state of the generator 5 kB."""

_LISTENING = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
"""Of selective checkpoints, which expect of the second forward the operations that they see in the recomputation."""

_TO_BITS = 0x0102_0408_1020_4080
_TO_BYTES = 0x0101_0101_0101_0101
_EACH_ITS_BIT = 0x8040_2010_0804_0201 - 2**64
_CARRY = 0x7F7F_7F7F_7F7F_7F7F

_torch_dropout = F.dropout
_running: ContextVar[Masks | None] = ContextVar("_running", default=None)


class _Mask(NamedTuple):
    """Which entries are kept, as bits; of which tensor; and the state of the generator afterwards."""

    bits: Tensor
    kind: tuple[torch.Size, torch.dtype, float]
    after: Tensor


class Masks:
    """Those of the two forwards of one micro-batch; see ``standing_in``."""

    def __init__(self) -> None:
        self._drawn: dict[Any, _Mask] = {}
        self._is_second = False
        self._num_fakes = 0

    @property
    def num_bytes(self) -> int:
        """Of what is kept."""
        return sum(mask.bits.nbytes + mask.after.nbytes for mask in self._drawn.values())

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
        self._drawn.clear()

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """What torch's dropout returns, which divides the noise and then multiplies."""
        place, kind = self._place_of(x), (x.shape, x.dtype, p)
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
        # Seed, place in the block of numbers, and the first of the block (CPUGeneratorImplStateLegacy).
        return bytes(torch.get_rng_state()[:64].tolist())


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
        masks = _running.get()
        if masks is not None and training and not inplace and _can_be_kept(input, p):
            return masks.dropout(input, p)
    return _torch_dropout(input, p, training, inplace)


def _can_be_kept(x: Any, p: Any) -> bool:
    """Whether torch draws the mask as one tensor like the input, eight of its entries fill a byte, and it pays."""
    return (
        (type(x) is Tensor or isinstance(x, FakeTensor))
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not x.is_nested
        and x.is_floating_point()
        and x.numel() >= FEWEST_ENTRIES
        and x.numel() % 8 == 0
        and x.is_contiguous()
        and type(p) is float
        and 0 < p < 1
        and not has_torch_function_unary(x)
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
