"""A step without numbers: a copy of model, optimizers and average as fake tensors, run by the real ``Step``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.grad_scaler import GradScaler

from bigbatch.batch.logical import LogicalBatch
from bigbatch.batch.resizing import cut_batch_of, micro_batch_of
from bigbatch.batch.structure import is_array, leaves
from bigbatch.errors import RecomputeError, TraceError
from bigbatch.memory.events import Event
from bigbatch.memory.fakes import fake_copy, positions_count_up
from bigbatch.memory.kernels import Workspaces
from bigbatch.memory.naming import unwrapped
from bigbatch.memory.offloading import CountedHost, pretend_host
from bigbatch.memory.trace import FakeRecorder, Price
from bigbatch.stepping.distributed.buckets import NO_BUCKETS, Buckets
from bigbatch.stepping.fitting.recording import apply_quietly, recorded
from bigbatch.stepping.generators import host_generators_put_back
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.coupled.whole_batch import TwoPasses
    from bigbatch.stepping.step import Step


@dataclass(frozen=True)
class Record:
    """What a shadow step was seen to do.

    Attributes:
        events: In order.
        sizes: Samples in its micro-batches.
        peak_bytes: The most bytes that were alive.
        micro_batch_bytes: Of the micro-batches that were given to it.
        most_in_kernels: The most bytes that were alive in an operation, with its workspace, where that is known.
        most_before_update: The same, without what the update does.
        moments: See ``FakeRecorder``.
    """

    events: list[Event]
    sizes: tuple[int, ...]
    peak_bytes: int
    micro_batch_bytes: int
    most_in_kernels: float = 0.0
    most_before_update: float = 0.0
    moments: Sequence[int] = ()

    @property
    def peak_of_micro_batches(self) -> int:
        """The most bytes that were alive before the update."""
        update = next(i for i, event in enumerate(self.events) if event.marks("update"))
        return int(max(event.peak_bytes for event in self.events[: update + 1]))


_BLOCK_BYTES = {"cpu": 1, "cuda": 512}
"""Allocators give out memory in multiples of this (kMinBlockSize in c10/cuda/CUDACachingAllocator)."""


class _Recorder(FakeRecorder):
    """Remembers the tensors with numbers that it meets: a loss may use a model beside the one that it is given."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._real: dict[int, torch.Tensor] = {}

    def _see_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and not isinstance(tensor, FakeTensor) and tensor.is_leaf:
            self._real[id(tensor)] = tensor
        super()._see_tensor(tensor)

    def take_fakes_off(self) -> None:
        """Clear gradients without numbers of tensors with numbers."""
        for tensor in self._real.values():
            if isinstance(tensor.grad, FakeTensor):
                tensor.grad = None


class Shadow:
    """Runs steps of a fake copy of what a ``Step`` has; the original is only read.

    The copy's optimizers begin without state and make it in their first step. What makes micro-batches of a batch and
    weighs them runs on the real ones.

    Args:
        step: The original; its model may lie on any device, also ``meta``.
        batch: What a step gets; real, or on ``meta``.
        device: "cpu" or "cuda": what the step would run on. On CUDA the allocator rounds every tensor up to 512 bytes,
            and optimizers work on all parameters at once unless told otherwise.
        buckets: What summing gradients over ranks needs.
        is_sharded: The original is, or will be, spread over ranks by FSDP2; the copy is not.

    Raises:
        TraceError: It cannot be copied.
    """

    def __init__(
        self,
        step: Step,
        batch: Any,
        device: str = "cpu",
        buckets: Buckets = NO_BUCKETS,
        *,
        is_sharded: bool = False,
    ):
        self.device = device
        self.buckets = buckets
        self.workspaces: tuple[tuple[int, Workspaces], ...] = ()  # by the least samples of a micro-batch, ascending
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._batch = batch
        self._real_options = step.options
        with cannot_be_traced():
            self.step = _fake_step(step, self.mode)
        if self.two_passes is not None:
            of_original = step.accumulator.two_passes
            has_collectives = is_sharded or step.accumulator.ranks.reducer.must_run_together
            self.two_passes.keeps_first = of_original is not None and of_original.keeps_first and not has_collectives
        with self.mode:
            self._held = torch.empty(buckets.held_bytes, dtype=torch.uint8)
        if device == "cuda":
            _choose_foreach(self.step.optimizers)
        self._static = frozenset(
            tensor.untyped_storage()._cdata
            for module in (self.step.model, self.step.options.ema)
            if isinstance(module, nn.Module)
            for tensor in (*module.parameters(), *module.buffers())
        )

    @property
    def two_passes(self) -> TwoPasses | None:
        """Of a loss of the whole batch."""
        return self.step.accumulator.two_passes

    def run(
        self,
        sizes: Sequence[int],
        plan: Plan,
        *,
        batch: Any = None,
        closely: bool = False,
        gradients: bool = False,
        price: Price | None = None,
    ) -> Record:
        """Make a step of micro-batches of these sizes.

        Args:
            plan: What is recomputed.
            batch: To make them of, in the place of the one that was given.
            closely: Note modules and what they save; see ``recorded``.
            gradients: Note the bytes of gradients with each event.
            price: See ``FakeRecorder``.

        Raises:
            TraceError: Its memory depends on numbers, or fake tensors cannot follow it.
            RecomputeError: The plan does not go with the model.
        """
        step = self.step
        apply_quietly(plan, step.model)
        # A collate of the user's may draw random numbers; fake tensors do not.
        with cannot_be_traced(), host_generators_put_back():
            batch = self._logical_batch(self._batch if batch is None else batch, sizes)
            micro_batches = list(batch.micro_batches)
            given = [value for micro_batch in micro_batches for value in leaves(micro_batch) if is_array(value)]
            given = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
            of_batch = {tensor.untyped_storage()._cdata for tensor in given}
            recorder = _Recorder(step.model, self._static | of_batch, price, block_bytes=_BLOCK_BYTES[self.device])
            known = [found for least, found in self.workspaces if least <= max(sizes)]
            recorder.workspaces = known[-1] if known else recorder.workspaces
            recorder.track(step.model, *step.optimizers, step.options.ema, micro_batches, batch.whole, self._held)
            if gradients:
                recorder.watch_gradients(step.named_parameters().values())
            try:
                with (
                    self.mode,
                    recorder,
                    positions_count_up(of_batch),
                    self._host_of_card(),
                    recorded(step, recorder, closely=closely, moment_bytes=self.buckets.moment_bytes),
                ):
                    step.attempt(batch, None, step.named_parameters())
                    if isinstance(step.options.ema, nn.Module):
                        step.update_average()
            finally:
                recorder.take_fakes_off()
            with self.mode:
                step.clear()
        num_bytes = {t.untyped_storage()._cdata: recorder.size_of(t.untyped_storage()) for t in given}
        peak = max(event.peak_bytes for event in recorder.events)
        in_kernels = recorder.most_in_kernels, recorder.most_before_update
        return Record(recorder.events, tuple(sizes), int(peak), sum(num_bytes.values()), *in_kernels, recorder.moments)

    def _host_of_card(self) -> contextlib.AbstractContextManager[None]:
        """Where what a plan offloads goes; a CPU has no other memory."""
        return contextlib.nullcontext() if self.device == "cpu" else pretend_host(CountedHost())

    def _logical_batch(self, given: Any, sizes: Sequence[int]) -> LogicalBatch:
        if self.two_passes is None:
            return LogicalBatch([self._micro_batch(given, size) for size in sizes])
        if self._real_options.collate is not None:
            return fake_copy(cut_batch_of(given, sizes, self._real_options), self.mode)
        batch = fake_copy(given, self.mode)
        with self.mode:
            return cut_batch_of(batch, sizes, self._real_options)

    def _micro_batch(self, given: Any, size: int) -> Any:
        if self._real_options.collate is not None:
            return fake_copy(micro_batch_of(given, size, self._real_options), self.mode)
        batch = fake_copy(given, self.mode)
        with self.mode:
            return micro_batch_of(batch, size, self._real_options)


def _fake_step(step: Step, mode: FakeTensorMode) -> Step:
    options = step.options
    scaler = options.precision if isinstance(options.precision, GradScaler) else None
    optimizers = [(type(optimizer), _own_attributes(optimizer)) for optimizer in step.optimizers]
    model, ema, scaler, attributes = fake_copy((unwrapped(step.model), options.ema, scaler, optimizers), mode)
    fakes = []
    for kind, own in attributes:
        optimizer = kind.__new__(kind)
        optimizer.__dict__.update(own)
        optimizer.state.clear()
        fakes.append(optimizer)
    options = replace(
        options,
        precision=scaler or options.precision,
        ema=ema,
        scheduler=None,
        collate=None,
        length=None,
        max_tokens=None,
        pad_to_multiple_of=None,
        weight=_constant_like(options.weight),
    )
    with mode:
        # Its errors about arguments were raised by the original.
        fake = type(step)(model, step.accumulator.given_loss_fn, fakes, **vars(options))
    if fake.optimizer_undo is not None:
        fake.optimizer_undo.may_give_up = False
    return fake


def _choose_foreach(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """On CUDA, optimizers that were told neither run their ``foreach`` form, which needs more memory for a moment."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All but ``step``, which a scheduler puts on the instance, bound to the original."""
    return {name: value for name, value in vars(optimizer).items() if name != "step"}


def _constant_like(weight: Any) -> Any:
    """A weight with the same terms that looks at nothing: shapes do not depend on it."""
    if isinstance(weight, Mapping):
        return dict.fromkeys(weight, _one)
    return _one


def _one(micro_batch: Any) -> float:
    return 1.0


@contextlib.contextmanager
def cannot_be_traced() -> Iterator[None]:
    """Make ``TraceError`` of whatever goes wrong, and keep torch from printing it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except RecomputeError:
        raise  # not the trace's fault, but the plan's
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise TraceError(f"{type(error).__name__}: {first}") from error
    finally:
        logger.setLevel(level)
