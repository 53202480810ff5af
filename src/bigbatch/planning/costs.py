"""What a model costs, as numbers: ``MemoryProfile`` and its parts. Made by tracing a step; read by the search."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from bigbatch.values import Json


class Line(NamedTuple):
    """Something that grows with the micro-batch: ``fixed + per_sample * samples``, in bytes or seconds.

    >>> Line(100, 8).at(4)
    132
    """

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, num_samples: int) -> float:
        """Its value for a micro-batch of so many samples."""
        return self.fixed + self.per_sample * num_samples

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> Self:
        """The line through two measurements ``(samples, value)``; flat when both have the same size."""
        (size, value), (other_size, other_value) = first, second
        slope = (other_value - value) / (other_size - size) if other_size != size else 0.0
        return cls(value - slope * size, slope)


NOTHING = Line()
MOST_WITH_MASKS = 15
"""At most so many micro-batches of a ``WholeBatchLoss`` keep masks of dropout for their second forward. This and what
follows is what steps do, and what the simulation prices."""
FEWEST_ENTRIES = 2**15
"""Of a mask that is kept: its bits take 4 kB then, and the state of the generator beside it 5 kB."""
STATE_BYTES = 5056
"""Of the state of torch's generator on a CPU."""


def mask_bytes(num_entries: int) -> int:
    """Of a mask that is kept as bits, with the state of the generator after it; 0 where it is drawn again."""
    is_kept = num_entries >= FEWEST_ENTRIES and num_entries % 8 == 0
    return num_entries // 8 + STATE_BYTES if is_kept else 0


class Gathered(NamedTuple):
    """What FSDP2 has whole in a slot, in bytes.

    Attributes:
        forward_bytes: Parameters in its forward, and what is received.
        backward_bytes: The same in its backward.
        sent_bytes: Gradients that are sent there.
    """

    forward_bytes: int
    backward_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Part:
    """Another way to recompute a block: modules inside it alone, or all of it but some operations.

    Attributes:
        names: Of the modules; the block itself, when all of it is recomputed.
        saved: Storages that the block holds then: what the rest saves, and what goes into these modules.
        recompute_seconds: Of their forwards up to the last save of each.
        keep: The word of ``Plan.keep`` for operations that are not recomputed; "" when all are.
    """

    names: tuple[str, ...]
    saved: tuple[int, ...]
    recompute_seconds: Line = NOTHING
    keep: str = ""

    @property
    def way(self) -> frozenset[str]:
        """What is the same for all calls of a module."""
        return frozenset((*self.names, self.keep))


@dataclass(frozen=True)
class Slot:
    """One stretch of the forward: a block (a module that may be recomputed), or what runs between two blocks.

    A storage is *held* from the first slot that saves it until that slot's backward. Bytes are for one micro-batch.

    Attributes:
        name: Of the block in ``named_modules``; None for what runs between blocks.
        kind: Class of the block; "" between blocks.
        saved: Storages that it saves for backward, as indices into ``MemoryProfile.storages``.
        inputs: Storages of its arguments, kept instead when it is recomputed.
        forward: Most bytes alive in its forward beyond those held by the slots before it.
        recompute: The same up to its last save, where a second forward stops.
        backward: Most bytes alive in its backward beyond those held by itself and the slots before it, when all
            gradients exist.
        backward_first: The same in a first micro-batch, beyond parameters and held storages: gradients come into
            being, and those of the slots after it are counted here.
        pending: Bytes alive when its backward begins, beyond those held: gradients of its outputs, and of skip
            connections across it.
        pending_first: The same in a first micro-batch.
        forward_seconds: Of its forward.
        recompute_seconds: Of its forward up to the last save: the price of recomputing it.
        may_recompute: Whether it may be recomputed at all.
        follows: Whether it may form a group with the block before it: neighbours in one ``nn.Sequential`` or
            ``nn.ModuleList``, its sole input is what that one returned, and nothing runs between them.
        parts: What may be recomputed of it instead of all; its backward then needs no more than when all is kept.
    """

    name: str | None
    kind: str = ""
    saved: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    forward: Line = NOTHING
    recompute: Line = NOTHING
    backward: Line = NOTHING
    backward_first: Line = NOTHING
    pending: Line = NOTHING
    pending_first: Line = NOTHING
    forward_seconds: Line = NOTHING
    recompute_seconds: Line = NOTHING
    may_recompute: bool = False
    follows: bool = False
    parts: tuple[Part, ...] = ()


def _same(value: Any) -> Any:
    return value


def _line(value: Any) -> Line:
    return Line(*value)


def _slot(found: dict[str, Any]) -> Slot:
    return Slot(**{name: _SLOT_READERS.get(name, _same)(value) for name, value in found.items()})


def _part(found: dict[str, Any]) -> Part:
    return Part(tuple(found["names"]), tuple(found["saved"]), _line(found["recompute_seconds"]), found["keep"])


_SLOT_READERS: dict[str, Any] = {
    **{spec.name: _line for spec in dataclasses.fields(Slot) if isinstance(spec.default, Line)},
    "parts": lambda values: tuple(map(_part, values)),
}
_READERS: dict[str, Any] = {
    "batch": _line,
    "workspace": _line,
    "outputs": _line,
    "masks": lambda values: tuple(map(_line, values)),
    "loss_bytes": lambda values: tuple((int(size), num_bytes) for size, num_bytes in values),
    "storages": lambda values: tuple(map(_line, values)),
    "gathered": lambda values: tuple(Gathered(*value) for value in values),
    "slots": lambda values: tuple(map(_slot, values)),
    "micro_seconds": lambda values: tuple((int(size), seconds) for size, seconds in values),
}


@dataclass(frozen=True)
class MemoryProfile(Json):
    """What a model, its loss and its optimizer cost: bytes and seconds for any micro-batch size.

    The peak of a steady step of N samples is the largest of these, each beside what is resident (parameters, buffers,
    optimizer state, averages, buckets, others) and ``batch.at(N)``:

    - in a first micro-batch: per slot, held storages and ``forward`` or ``backward_first``;
    - in a later one: gradients, held storages and ``forward`` or ``backward``;
    - in the update: gradients and ``update_bytes``;
    - for a loss of the whole batch in several micro-batches: ``outputs`` and ``masks`` beside each, and ``loss_bytes``.

    Attributes:
        parameter_bytes: Parameters of the model, frozen ones too, each storage once.
        gradient_bytes: Gradients as they are added up.
        optimizer_bytes: State of the optimizers after their first step.
        buffer_bytes: Buffers of the model.
        average_bytes: An EMA of the weights.
        other_bytes: What a step itself keeps: copies of buffers to undo a failed step, tensors outside of the model.
        bucket_bytes: Of several ranks, what is there to sum gradients: the buckets of DistributedDataParallel.
        update_bytes: Most bytes alive from the last backward to the end of the step beyond gradients: what clipping and
            the optimizer need for a moment.
        update_is_lean: Whether no option of the optimizers makes ``update_bytes`` less.
        batch: Bytes of the inputs on the device. On CPU this is by samples of the whole batch.
        batch_is_whole: Whether ``batch`` is for the samples of the whole batch, and not of a micro-batch.
        storages: Bytes of what is saved for backward; each storage once, however many slots save it.
        slots: In the order of the forward. The first and the last are not blocks.
        outputs: Gradients of the outputs of a ``WholeBatchLoss``, by samples of the whole batch.
        masks: Entries of the masks of dropout that a micro-batch may keep for its second forward (``mask_bytes``).
        loss_bytes: Of a ``WholeBatchLoss``, the most bytes alive in the loss for so many samples of the whole batch.
        keeps_first: Whether the graph of the first micro-batch is there beside such a loss, and not made again.
        gathered: By slot, what of its lines FSDP2 needs; empty where the model is not spread over ranks.
        whole_gradients: Under FSDP2, that ``gradient_bytes`` are those of the whole model, until the last micro-batch.
        workspace: Bytes that kernels need only while they run, beyond counted storages; zero when not measured.
        micro_seconds: Measured or estimated ``(samples, seconds)`` of one forward-backward without recompute.
        update_seconds: Of what comes once a step.
        timing: "measured" on the device, or "estimated" from operations and bytes.
        smallest_micro_batch: 2 when a layer uses statistics of the batch (BatchNorm), else 1.
        whole_batch: All samples of a batch have to be there at once (BatchNorm under ``"exact"``), so that the only
            micro-batch is the batch.
        device: "cpu" or "cuda".
        fallback: Why real tensors had to be used; None when shapes were enough.
        model: Class of the model.
        optimizer: Classes of the optimizers, joined with " + ".
        warnings: What a person should know, in sentences.
    """

    _readers = _READERS

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    average_bytes: int = 0
    other_bytes: int = 0
    bucket_bytes: int = 0
    update_bytes: int = 0
    update_is_lean: bool = False
    batch: Line = NOTHING
    batch_is_whole: bool = True
    storages: tuple[Line, ...] = ()
    slots: tuple[Slot, ...] = ()
    outputs: Line = NOTHING
    masks: tuple[Line, ...] = ()
    loss_bytes: tuple[tuple[int, float], ...] = ()
    keeps_first: bool = False
    gathered: tuple[Gathered, ...] = ()
    whole_gradients: bool = False
    workspace: Line = NOTHING
    micro_seconds: tuple[tuple[int, float], ...] = ()
    update_seconds: float = 0.0
    timing: Literal["measured", "estimated"] = "estimated"
    smallest_micro_batch: int = 1
    whole_batch: bool = False
    device: str = "cpu"
    fallback: str | None = None
    model: str = ""
    optimizer: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """What is there at every moment of a step, beside the batch."""
        of_model = self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes + self.average_bytes
        return of_model + self.other_bytes + self.bucket_bytes

    def loss_bytes_at(self, num_samples: int) -> float:
        """The most bytes alive in the loss of a whole batch.

        Between known sizes it is a power of the samples, as the bytes of all pairs, or of chunks of them, are.
        """
        known = sorted(self.loss_bytes)
        if not known or len(known) == 1:
            return known[0][1] if known else 0.0
        index = next((i for i in range(1, len(known)) if num_samples <= known[i][0]), len(known) - 1)
        (size, before), (other, after) = known[index - 1], known[index]
        power = math.log(max(after, 1.0) / max(before, 1.0)) / math.log(other / size)
        return max(before, 1.0) * (num_samples / size) ** power

    @property
    def recomputable(self) -> tuple[str, ...]:
        """All blocks that may be recomputed, each once."""
        return tuple(dict.fromkeys(slot.name for slot in self.slots if slot.may_recompute and slot.name))
