r"""Dropout whose masks do not depend on how a batch is cut: each is a function of seed, step, sample and call alone.

Torch draws masks from one stream, in the order of the forwards, so that a cut gives sample 7 another mask than the big
batch would. Here a mask is keyed by (seed, number of the step, place of the sample in the batch, number of the call in
the forward): any cut, and a step that is made again after running out of memory, drops the same. With several ranks the
batch is that of rank 0, then that of rank 1, and so on: each knows the place of its first sample, and all take the seed
of rank 0.

How a dropout is caught: every one of torch, from ``nn.Dropout`` to the maths path of attention, ends in the operation
``bernoulli_`` on an empty tensor, or in ``native_dropout`` on a card. A dispatch mode answers these two. That sees what
is behind any name it was imported by, and calls from C++, where replacing functions would not.

Where the number of the call is kept: in the field of the host's random number generator that says what seed it was made
with, and that nothing reads while numbers are drawn. So whatever runs a forward again and puts the random numbers back
for it, as recomputation (``torch.utils.checkpoint``) and forwards that take turns do, finds the same numbers of calls,
and so the same masks, without knowing of us.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bigbatch.batch.logical import Part
from bigbatch.errors import BatchError, LossError, OptionError
from bigbatch.stepping.compiled import is_compiled
from bigbatch.stepping.dropout.philox import keep_mask

_aten = torch.ops.aten
_BERNOULLI = _aten.bernoulli_.float
_NATIVE_DROPOUT = _aten.native_dropout.default
_FUSED_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
# Not every build has them all.
_FUSED_FOUND = [getattr(_aten, name).default for name in _FUSED_NAMES if hasattr(_aten, name)]
_FUSED = {op: [argument.name for argument in op._schema.arguments].index("dropout_p") for op in _FUSED_FOUND}

_MARK = 0xB16B  # in the upper 16 bits of the field: it is ours. Below are 24 bits each for micro-batch and call.
_seed_of_this_run: ContextVar[int | None] = ContextVar("_seed_of_this_run", default=None)
_ALL = Part(None, 0)


@contextlib.contextmanager
def same_masks(seed: int) -> Iterator[None]:
    """Within the block, ``accumulate`` draws no seed of its own and takes this one, to compare one cut with another."""
    token = _seed_of_this_run.set(seed)
    try:
        yield
    finally:
        _seed_of_this_run.reset(token)


class NativeDropout:
    """Torch's own: nothing is done."""

    seed: int | None = None

    def look_at(self, model: nn.Module) -> None:
        """Nothing needs to be known."""

    def next_seed(self) -> int:
        """That the next run would take, were it by itself."""
        return 0

    def running(self, sizes: list[int], number: int, part: Part = _ALL) -> AbstractContextManager[Any]:
        """The micro-batches of a step."""
        return nullcontext()

    def forward(self, num_samples: int, first: int | None = None, *, idle: bool = False) -> AbstractContextManager[Any]:
        """The forward of a micro-batch."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[Any]:
        """A backward."""
        return nullcontext()


class PerSampleDropout(NativeDropout):
    """The masks of the steps of one model.

    Args:
        seed: That all masks depend on. None: each run draws one from torch's random numbers.

    Attributes:
        seed: As given.
    """

    def __init__(self, seed: int | None):
        self.seed = seed
        self._model: nn.Module = nn.Identity()
        self._recurrent: list[tuple[str, nn.RNNBase]] = []
        self._time_first: list[tuple[str, Any]] = []
        self._masks: _Masks | None = None
        self._sizes: list[int] = []
        self._first = 0

    def look_at(self, model: nn.Module) -> None:
        """Remember the layers whose dropout is out of reach.

        Raises:
            OptionError: The model is compiled.
        """
        if is_compiled(model):
            raise OptionError(
                'dropout="per-sample" cannot reach into compiled code, which draws its own masks. Give the model as it '
                'was before torch.compile, or dropout="native".'
            )
        self._model = model
        named = list(model.named_modules())
        self._recurrent = [(name, m) for name, m in named if isinstance(m, nn.RNNBase) and m.num_layers > 1]
        layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        self._time_first = [(name, m) for name, m in named if isinstance(m, layers) and not m.self_attn.batch_first]

    def next_seed(self) -> int:
        """That the next run would take, were it by itself."""
        given = self._given
        return (_next_seed() if given is None else given) % 2**64

    @property
    def _given(self) -> int | None:
        return self.seed if self.seed is not None else _seed_of_this_run.get()

    @contextlib.contextmanager
    def running(self, sizes: list[int], number: int, part: Part = _ALL) -> Iterator[None]:
        """The micro-batches of a step.

        Args:
            sizes: Of the micro-batches so far; grows while they run.
            number: Of the step.
            part: Of the batch, with the seed of all ranks when there are several.

        Raises:
            OptionError: A layer drops in a way that cannot be keyed.
        """
        self._refuse_what_is_out_of_reach()
        self._masks = _Masks(self._model, self.next_seed() if part.seed is None else part.seed, number)
        self._sizes, self._first = sizes, part.first_sample
        try:
            yield
        finally:
            self._masks = None
            if self._given is None:
                _draw_seed()

    @contextlib.contextmanager
    def forward(self, num_samples: int, first: int | None = None, *, idle: bool = False) -> Iterator[None]:
        """The forward of a micro-batch, inside ``running``.

        Args:
            num_samples: In it.
            first: Place of its first sample among those that run here; None: it is the last of ``sizes``.
            idle: Nothing of it counts, so it does not matter what it drops.

        Raises:
            BatchError: Nobody knows how many samples it has.
        """
        assert self._masks is not None
        if num_samples == 0 and not idle:
            raise BatchError(
                'dropout="per-sample" needs to know how many samples a micro-batch has, and this one does not tell. '
                'Give dropout="native".'
            )
        before = torch.initial_seed()
        first = sum(self._sizes[:-1]) if first is None else first
        _set_field(self._masks.begin(self._first + first, num_samples))
        try:
            with _Answers(self._masks):
                yield
        finally:
            _set_field(before)

    def backward(self) -> AbstractContextManager[Any]:
        """A backward, inside ``running``, in which a forward may run again."""
        assert self._masks is not None
        return _Answers(self._masks) if self._masks.may_be_recomputed else nullcontext()

    def _refuse_what_is_out_of_reach(self) -> None:
        for name, layer in self._recurrent:
            if layer.training and layer.dropout > 0:
                raise OptionError(
                    f'dropout="per-sample" cannot reach the dropout between the layers of {name!r} '
                    f"({type(layer).__name__}, dropout={layer.dropout}), which one kernel draws. Make it of "
                    f'layers with nn.Dropout between them, set its dropout to 0, or give dropout="native".'
                )
        for name, layer in self._time_first:
            if any(m.training and m.p > 0 for m in layer.modules() if isinstance(m, nn.Dropout)):
                raise OptionError(
                    f'dropout="per-sample" needs the samples in dimension 0, but {name!r} ({type(layer).__name__}) has '
                    f'them in dimension 1. Make it with batch_first=True, or give dropout="native".'
                )


def _draw_seed() -> int:
    return int(torch.randint(2**62, ()))


def _next_seed() -> int:
    """The one that will be drawn when the run is over; so no random number was drawn in it but by others."""
    state = torch.get_rng_state()
    try:
        return _draw_seed()
    finally:
        torch.set_rng_state(state)


def _set_field(value: int) -> None:
    """Set what the generator says it was seeded with, and nothing else: the numbers to come stay as they are.

    The state of the host's generator begins with it (``CPUGeneratorImplStateLegacy`` in ``CPUGeneratorImpl.cpp``).
    """
    with _disable_current_modes():
        state = torch.get_rng_state()
        state[:8].view(torch.int64).fill_(value - 2**64 if value >= 2**63 else value)
        torch.set_rng_state(state)


class _Masks:
    """The masks of one step.

    Attributes:
        may_be_recomputed: A mask was drawn where backward may run the forward again.
    """

    def __init__(self, model: nn.Module, seed: int, number: int):
        self._model = model
        self._key = seed % 2**64
        self._number = number % 2**32
        self._spans: list[tuple[int, int]] = []
        self.may_be_recomputed = False

    def begin(self, first: int, num_samples: int) -> int:
        """Note a micro-batch; returns what the field says when none of its calls was made."""
        self._spans.append((first, num_samples))
        return _MARK << 48 | (len(self._spans) - 1) << 24

    def draw(self, shape: torch.Size, keep: float, device: torch.device) -> torch.Tensor:
        """The mask of the next call: which entries are kept."""
        field = torch.initial_seed()
        if field >> 48 != _MARK:
            raise LossError(_LOST)
        _set_field(field + 1)
        # Recomputation listens to what is saved, or (reentrant) saves nothing.
        self.may_be_recomputed |= not torch.is_grad_enabled() or _saved_tensors_are_hooked()
        first, num_samples = self._spans[field >> 24 & 0xFFFFFF]
        if num_samples == 0:
            return torch.ones(shape, dtype=torch.bool, device=device)
        self._check_samples_come_first(shape, num_samples)
        mask = keep_mask(
            keep,
            first,
            (num_samples, shape.numel() // num_samples),
            (field & 0xFFFFFF, self._number),
            self._key,
            device,
        )
        return mask.view(shape)

    def _check_samples_come_first(self, shape: torch.Size, num_samples: int) -> None:
        """Samples may be split into tokens or heads, one after another. Anything else is not to be told by a shape."""
        if shape and shape[0] == num_samples:
            return
        several = bool(shape) and shape[0] % num_samples == 0
        # (time, samples, channels) with a whole number of times for each sample looks like tokens.
        doubtful = len(shape) > 1 and shape[1] == num_samples > 1
        if several and (not doubtful or isinstance(self._calling()[1], nn.MultiheadAttention)):
            return
        raise LossError(
            f'dropout="per-sample" needs the samples in dimension 0, one after another, but in '
            f"{self.calling_module()} dropout gets a tensor of shape {tuple(shape)} in a micro-batch of {num_samples} "
            f'samples. Bring them there, or give dropout="native".'
        )

    def calling_module(self) -> str:
        """The innermost module that is running, for a message."""
        name, module = self._calling()
        return f"{name!r} ({type(module).__name__})" if module is not None else "a function"

    def _calling(self) -> tuple[str, nn.Module | None]:
        """The innermost module of the model whose code is running, and its name."""
        names = {id(module): name for name, module in self._model.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                return names[id(owner)] or "the model", owner
            frame = frame.f_back
        return "", None


class _Answers(TorchDispatchMode):
    """Answers the operations that draw masks, of one forward or backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads the compiler, to keep it away from a handler that it will never see

    def __init__(self, masks: _Masks):
        super().__init__()
        self._masks = masks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _BERNOULLI and kwargs.get("generator") is None and not _has_no_numbers(args[0]):
            return self._bernoulli(*args)
        if func is _NATIVE_DROPOUT and not _has_no_numbers(args[0]):
            return self._native_dropout(*args)
        place = _FUSED.get(func)
        if place is not None and _dropout_of(args, kwargs, place) > 0:
            raise OptionError(
                f'dropout="per-sample" cannot reach the dropout of a fused attention kernel ({func}), called in '
                f"{self._masks.calling_module()}. Take the maths path, by running the model inside "
                f"torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), or its eager attention; or "
                f'set its attention dropout to 0, or give dropout="native".'
            )
        return func(*args, **kwargs)

    def _bernoulli(self, noise: torch.Tensor, keep: float = 0.5) -> torch.Tensor:
        return noise.copy_(self._masks.draw(noise.shape, keep, noise.device))

    def _native_dropout(self, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = self._masks.draw(x.shape, 1 - p, x.device)
        return x.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def _saved_tensors_are_hooked() -> bool:
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return found is not None


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    """Planned memory does not depend on what is dropped, and nothing can be."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _dropout_of(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> float:
    return args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)


_LOST = (
    'dropout="per-sample" has lost count of the calls: the random number generator was set inside the forward '
    "(torch.manual_seed, torch.set_rng_state), or something was recomputed without putting it back "
    "(torch.utils.checkpoint with preserve_rng_state=False). Leave that out, or give "
    'dropout="native".'
)
