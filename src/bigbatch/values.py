"""The values that pass through: what to do (``Plan``), how (``StepOptions``), what happened (``StepResult``).

Frozen, without modules inside, and without torch: reading a plan on a laptop loads nothing heavy.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from bigbatch.checking import check_choice, check_keep, check_offload, check_recompute
from bigbatch.errors import OptionError
from bigbatch.footprint import Footprint
from bigbatch.peers import OUR_WORDS, to_peer

if TYPE_CHECKING:
    import torch

Exactness = Literal["exact", "same in distribution", "approximate"]
DropoutPolicy = Literal["native", "per-sample"]
BatchNormPolicy = Literal["merge", "exact", "frozen", "native"]


class Json:
    """``to_json`` and ``from_json`` for a frozen dataclass of plain values and 0-d tensors."""

    _readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """What makes a field, by its name, of what is read for it; the others are taken as they are read."""

    def to_json(self) -> str:
        """The value as JSON text. Tensors become numbers, which waits for the device."""
        return json.dumps(json_ready(dataclasses.asdict(self)))  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The value that ``to_json`` wrote; lists come back as tuples.

        Raises:
            OptionError: It is no JSON, or a field is unknown or missing.
        """
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise OptionError(f"{text[:80]!r} is no JSON: {error}.") from error
        known = {spec.name for spec in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        if not isinstance(found, dict) or not set(found) <= known:
            raise OptionError(f"{text[:80]!r} is no {cls.__name__}: its fields are {sorted(known)}.")
        try:
            return cls(**{name: cls._readers.get(name, _same)(_read(value)) for name, value in found.items()})
        except OptionError:
            raise
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise OptionError(f"{text[:80]!r} is no {cls.__name__}: {error}.") from error


def json_ready(value: Any) -> Any:
    """The value with tensors as numbers, which waits for the device, and what is not finite as text."""
    if isinstance(value, dict):
        return {name: json_ready(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(json_ready(inner) for inner in value)
    number = value.item() if hasattr(value, "item") else value
    # JSON has no NaN, and strict readers refuse the bare word that Python writes for it.
    return _NOT_FINITE.get(str(number), number) if isinstance(number, float) else number


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _same(value: Any) -> Any:
    return value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _read(inner) for name, inner in value.items()}
    if value in _NOT_FINITE.values():
        return float(value)
    return tuple(_read(inner) for inner in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Plan(Json):
    """How a batch is run on the memory there is; made by a search, or by hand.

    Attributes:
        micro_batch_size: Samples in one forward-backward, at most.
        accumulation_steps: Micro-batches in a step of the planned batch; None when written by hand.
        recompute: Modules recomputed in backward, by their names in ``named_modules``. A tuple of names is a group
            of neighbours recomputed as one segment.
        keep: Pairs of a name in ``recompute`` (not in a group) and what is kept of it, so that it does not run again:
            ``"attention"``, what kernels of scaled dot product attention return; ``"matmul"``, what matrix products and
            convolutions return, and attention.
        offload: Names in ``recompute`` (of a group the first) whose input lies in host memory between forward and
            backward; on a card only.
        accumulation_dtype: Gradients are added up in this dtype, for example ``"float32"``; None is the default
            of ``StepOptions``.
        max_tokens: Padded tokens that the micro-batch size stands for: so many of the longest samples it was planned
            with. With the option ``length`` micro-batches hold no more, unless there is a footprint. None: nothing was
            planned with lengths.
        footprint: Bytes of a micro-batch by its samples and its longest length, and how many it may take.
        peak_bytes: Expected peak of a steady step, in bytes.
        step_seconds: Expected time of a step, in seconds.
        budget_bytes: The budget it was made for, in bytes.
        reduce: How FSDP2 sums gradients, as in ``StepOptions.reduce``; None: as the step is told.
    """

    micro_batch_size: int
    accumulation_steps: int | None = None
    recompute: tuple[str | tuple[str, ...], ...] = ()
    accumulation_dtype: str | None = None
    peak_bytes: int | None = None
    step_seconds: float | None = None
    budget_bytes: int | None = None
    keep: tuple[tuple[str, str], ...] = ()
    offload: tuple[str, ...] = ()
    max_tokens: int | None = None
    footprint: Footprint | None = None
    reduce: Literal["after", "each"] | None = None

    def __post_init__(self) -> None:
        if self.reduce is not None:
            check_choice("reduce", self.reduce, ("after", "each"))
        for name in ("micro_batch_size", "accumulation_steps", "max_tokens"):
            size = getattr(self, name)
            if size is not None or name == "micro_batch_size":
                check_positive(name, size)
        check_recompute(self.recompute)
        # A list would make the plan unhashable, and unequal to its own JSON.
        object.__setattr__(self, "recompute", tuple(e if isinstance(e, str) else tuple(e) for e in self.recompute))
        check_keep(self.keep, self.recompute)
        object.__setattr__(self, "keep", tuple((name, kept) for name, kept in self.keep))
        check_offload(self.offload, self.recompute)
        object.__setattr__(self, "offload", tuple(self.offload))
        if isinstance(self.footprint, Mapping):
            object.__setattr__(self, "footprint", Footprint(**self.footprint))

    @property
    def num_recomputed(self) -> int:
        """How many modules are recomputed.

        >>> Plan(micro_batch_size=4, recompute=("a", ("b", "c"))).num_recomputed
        3
        """
        return sum(1 if isinstance(entry, str) else len(entry) for entry in self.recompute)

    @property
    def what_runs(self) -> tuple[Any, ...]:
        """What two plans of one model and batch must share to run the same, whatever is expected of them."""
        return self.micro_batch_size, self.recompute, self.keep, self.offload

    def to(self, peer: str, *, world_size: int = 1, batch_size: int | None = None) -> dict[str, Any]:
        """The plan in the words of another library, as a dictionary; a warning names what it has no words for.

        >>> Plan(micro_batch_size=8, accumulation_steps=4).to("transformers")
        {'per_device_train_batch_size': 8, 'gradient_accumulation_steps': 4}

        Args:
            peer: "transformers", "lightning", "accelerate", "deepspeed" or "torchtune".
            world_size: Ranks that share a batch.
            batch_size: Samples of a step over all ranks. None: those of the plan, on each rank.

        Raises:
            OptionError: The library is unknown, the batch cannot be shared equally, or its size is not known.
        """
        check_positive("world_size", world_size)
        if batch_size is not None:
            check_positive("batch_size", batch_size)
        return to_peer(self, peer, world_size=world_size, batch_size=batch_size)


@dataclass(frozen=True)
class StepResult(Json):
    """What one optimizer step did. Tensors are 0-d and stay on the device until somebody reads them.

    Attributes:
        loss: The loss of the whole batch, shape ``()``.
        terms: The terms of the loss by name, each of the whole batch, shape ``()``.
        weight: What the mean is over: samples, or tokens; shape ``()`` or a number.
        grad_norm: 2-norm of the gradient before clipping, shape ``()``; None unless clipped or asked for.
        skipped: Nothing moved: a gradient was not finite.
        micro_batch_sizes: Samples in each micro-batch, in order; several sizes where memory ran out in the middle.
        retries: How often the step began or went on again after running out of memory.
        noise_scale: Gradient noise scale in samples, averaged over the steps so far, shape ``()``; infinite where the
            gradient is lost in noise. None unless asked for, and before there was a step of two micro-batches.
        exactness: How far "equals the big batch" holds: "exact"; "same in distribution" when random numbers were
            drawn (dropout); "approximate" when layers, or ``F.batch_norm`` in a forward, saw the
            statistics of a micro-batch.
        padding: Share of the padded tokens that stand for nothing: of the samples in their order, cut under the same
            bound, and of the micro-batches that were made; of several ranks, on this one. None when samples were not
            grouped by length.
    """

    loss: torch.Tensor | float
    terms: dict[str, torch.Tensor | float] = field(default_factory=dict)
    weight: torch.Tensor | float = 1.0
    grad_norm: torch.Tensor | float | None = None
    skipped: bool = False
    micro_batch_sizes: tuple[int, ...] = ()
    retries: int = 0
    exactness: Exactness = "exact"
    noise_scale: torch.Tensor | float | None = None
    padding: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Everything about a step that is not the model, the loss, the optimizer or the plan.

    Attributes:
        weight: What a mean loss is over: ``"samples"`` (default), ``"tokens"`` (entries that are not -100 in the one
            leaf named ``labels``), ``"next_tokens"`` (the same in ``labels[:, 1:]``, for models that shift inside),
            a callable ``weight(micro_batch)``, or a dict of these for each term of a dict loss.
        max_grad_norm: Scale the gradient down to this 2-norm, over all optimizers together; None: do not.
        grad_norm: Report the norm even when nothing is clipped.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or the torch dtype: autocast in the forward, not a cast of the
            parameters; ``"fp16"`` scales the loss. One's own ``GradScaler`` means fp16 with that scaler.
        scheduler: One or several learning rate schedulers, stepped once per optimizer step.
        ema: An ``AveragedModel`` or any object with ``update``, updated once per optimizer step.
        batch_norm: ``"merge"``: one update of the running statistics per step, from the whole batch; ``"exact"``:
            layers normalise by the whole batch too, for loss and gradient of the big batch; see docs/batch-norm.md;
            ``"frozen"``: layers use their running statistics; ``"native"``: torch's, once per micro-batch.
        dropout: ``"native"``: torch draws the masks, in another order than the big batch would; ``"per-sample"``: masks
            depend on seed, step, sample and call alone, and any cut has those of the big batch; see docs/dropout.md.
        accumulation_dtype: Gradients are added up in this dtype. None: float32 for parameters of 16 bits,
            the parameter's own for others.
        noise_scale: Measure how noisy the gradient is, and so how large a batch still pays; see docs/noise-scale.md.
        zero_missing_gradients: Parameters without a gradient get zeros. An optimizer skips ``None``, but moves a
            parameter with a zero gradient by its momentum and weight decay.
        on_non_finite: ``"raise"``: a NaN or infinite loss or gradient is an error (fp16 overflow is skipped);
            ``"skip"``: the step is dropped, counted and named.
        max_skipped: Steps that may be dropped in a row, under ``"skip"``, before it is an error.
        on_out_of_memory: ``"shrink"``: a step that runs out of memory is undone and made again in smaller
            micro-batches, in the end with modules recomputed, and that is remembered; ``"raise"``: it is undone and
            the error is raised, except for what an optimizer has moved when memory runs out inside it.
        grow_after: After so many steps without running out, the size before is tried again; None: never.
        reduce: When gradients are summed over ranks. ``"after"``: once all ranks have run all of their micro-batches,
            so that they can undo the step together; ``"overlap"``: inside the last backward, which hides the time it
            takes, and a failure there ends the run; ``"each"``: FSDP2 sums after each micro-batch, which keeps no
            gradients of whole modules. FSDP2 takes ``"after"`` as ``"overlap"``.
        collate: The batch is a list of samples; this makes a micro-batch of some of them.
        length: ``length(sample)``, its tokens. Samples of like length make a micro-batch, so that little is padded;
            ``micro_batch_size`` then means so many of the longest samples, or as many tokens in more short ones.
        max_tokens: Padded tokens of a micro-batch, its samples times its longest length, at most; beside it
            ``micro_batch_size`` is the most samples.
        pad_to_multiple_of: Lengths are padded to a multiple of this. ``collate`` is told by its attribute or its
            parameter of this name, as data collators of transformers are.
        split: ``split(batch, micro_batch_size)`` returns the micro-batches of a batch that we cannot cut.
        batch_dims: By dotted path: the dimension of the samples, or None for what is shared by all of them.
    """

    weight: str | Callable[[Any], Any] | Mapping[str, str | Callable[[Any], Any]] | None = None
    max_grad_norm: float | None = None
    grad_norm: bool = False
    precision: Any = "fp32"
    scheduler: Any = None
    ema: Any = None
    batch_norm: BatchNormPolicy = "merge"
    dropout: DropoutPolicy = "native"
    accumulation_dtype: Any = None
    noise_scale: bool = False
    zero_missing_gradients: bool = False
    on_non_finite: Literal["raise", "skip"] = "raise"
    max_skipped: int = 10
    on_out_of_memory: Literal["shrink", "raise"] = "shrink"
    grow_after: int | None = None
    reduce: Literal["after", "overlap", "each"] = "after"
    collate: Callable[..., Any] | None = None
    length: Callable[[Any], Any] | None = None
    max_tokens: int | None = None
    pad_to_multiple_of: int | None = None
    split: Callable[[Any, int], Any] | None = None
    batch_dims: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        check_choice("batch_norm", self.batch_norm, ("merge", "exact", "frozen", "native"))
        check_choice("dropout", self.dropout, ("native", "per-sample"))
        check_choice("on_non_finite", self.on_non_finite, ("raise", "skip"))
        check_choice("reduce", self.reduce, ("after", "overlap", "each"))
        check_choice("on_out_of_memory", self.on_out_of_memory, ("shrink", "raise"))
        check_positive("max_skipped", self.max_skipped)
        for name in ("grow_after", "max_tokens", "pad_to_multiple_of"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.max_grad_norm is not None and not _is_positive(self.max_grad_norm):
            raise OptionError(f"max_grad_norm={self.max_grad_norm!r}; it is a number > 0, or None to clip nothing.")
        for name in ("collate", "length", "split"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise OptionError(f"{name}={getattr(self, name)!r} cannot be called; {name} is a function.")
        if self.collate is not None and self.split is not None:
            raise OptionError("collate= and split= were both given; one of them makes the micro-batches: take one.")
        for name in ("grad_norm", "noise_scale", "zero_missing_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r}; it is True or False.")
        if self.noise_scale and self.batch_norm == "exact":
            raise OptionError(
                'noise_scale=True does not go with batch_norm="exact": no micro-batch has a gradient of its own there. '
                "Leave one of them out."
            )
        _check_lengths(self)
        check_batch_dims(self.batch_dims)
        if self.collate is not None and self.batch_dims is not None:
            raise OptionError("batch_dims has no effect beside collate=, which makes each micro-batch. Leave it out.")

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> StepOptions:
        """Options from the keywords of a call.

        Raises:
            OptionError: A keyword is unknown; the message says what it is called here.
        """
        known = [spec.name for spec in dataclasses.fields(cls)]
        for name in keywords:
            if name not in known:
                hint = OUR_WORDS.get(name, f"The options are {', '.join(known)}.")
                raise OptionError(f"There is no option {name!r}. {hint}")
        return cls(**keywords)


AFTER_THE_GRADIENT = frozenset(
    {
        "max_grad_norm",
        "grad_norm",
        "noise_scale",
        "scheduler",
        "ema",
        "zero_missing_gradients",
        "on_non_finite",
        "max_skipped",
        "on_out_of_memory",
        "grow_after",
    }
)
"""Options of what a ``Step`` does with the gradient; the others say what the gradient is."""


def check_positive(name: str, size: object) -> None:
    """Raise ``OptionError`` unless ``size`` is a whole number of at least 1."""
    if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 1:
        raise OptionError(f"{name}={size!r}; it is a whole number of at least 1.")


def check_batch_dims(batch_dims: object) -> None:
    """Raise ``OptionError`` unless it maps dotted paths to a dimension or None."""
    if batch_dims is None:
        return
    if not isinstance(batch_dims, Mapping):
        raise OptionError(
            f"batch_dims={batch_dims!r}; it maps dotted paths to a dimension, or to None for what is shared by all "
            f'samples: batch_dims={{"x": 1, "inputs.mask": None}}.'
        )
    for path, dim in batch_dims.items():
        if not isinstance(path, str) or isinstance(dim, bool) or not (dim is None or isinstance(dim, int)):
            raise OptionError(f"batch_dims[{path!r}] is {dim!r}; it is a whole number, or None for a shared value.")


def _check_lengths(options: StepOptions) -> None:
    for name, other in (("length", "collate"), ("max_tokens", "length"), ("pad_to_multiple_of", "collate")):
        if getattr(options, name) is not None and getattr(options, other) is None:
            raise OptionError(
                f"{name}= has no effect without {other}=. Samples are grouped by length where they are still a list: "
                "collate=..., length=lambda sample: len(sample['input_ids']), and max_tokens=... or a micro-batch size."
            )


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0
