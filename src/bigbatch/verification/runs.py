"""Gradients of a batch on a private copy of a model: at once, in micro-batches, and of each micro-batch alone."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch.batch.logical import LogicalBatch, Piece, pieces_of
from bigbatch.batch.moving import on_device
from bigbatch.batch.weighing import Weigher
from bigbatch.errors import BatchError, BigBatchWarning, LossError, OptionError
from bigbatch.stepping.accumulate import accumulate
from bigbatch.stepping.checks import by_itself
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.coupled.outputs import named_leaves
from bigbatch.stepping.coupled.whole_batch import WholeBatchLoss
from bigbatch.stepping.dropout.per_sample import NativeDropout, PerSampleDropout, same_masks
from bigbatch.stepping.generators import Generators
from bigbatch.stepping.losses import Term, plain_loss, terms_of, value_of
from bigbatch.stepping.normalization import batchnorm
from bigbatch.stepping.undo import Undo
from bigbatch.values import AFTER_THE_GRADIENT, DropoutPolicy, StepOptions
from bigbatch.verification.copying import inside, private_copy
from bigbatch.verification.widening import Widened, switch_dropout_off, switch_recompute_off, wide_batch, widened

_MOST_OF_A_PARAMETER = 20_000
_SEED = 0  # of masks; any will do

Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class Found:
    """Loss and gradient of a batch.

    Attributes:
        loss: Of the whole batch.
        gradients: By parameter; None where the loss does not reach it.
        sizes: Samples in each micro-batch.
    """

    loss: float
    gradients: Gradients
    sizes: tuple[int, ...]


class Runs:
    """A copy of model and batch in a wide dtype, and what is computed with them; the originals are never changed.

    Each run leaves the buffers of the copy as they were, but not the random numbers: two runs draw different ones.

    Args:
        model: Is copied as it is, with its training flags; dropout and recompute are switched off in the copy.
        loss_fn: As for ``accumulate``.
        batch: As for ``accumulate``, but not a ``LogicalBatch``.
        options: Of the step. Those of what a step does with the gradient have no effect, nor has ``precision``.
        dtype: Of the copies.
        with_masks: Leave dropout on, and give each sample the same masks in all runs.

    Attributes:
        model: The copy.
        options: With which the copy is run.
        num_samples: In the batch.
        dropouts: Layers of the copy in which dropout was switched off.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        batch: Any,
        options: StepOptions,
        dtype: torch.dtype,
        *,
        with_masks: bool = False,
    ):
        self._mode = Widened(dtype, drops=with_masks)
        self.model = private_copy(model, dtype)
        switch_recompute_off(self.model)
        self.dropouts = [] if with_masks else switch_dropout_off(self.model)
        self._dropout = PerSampleDropout(_SEED) if with_masks else NativeDropout()
        self._dropout.look_at(self.model)
        self._loss_fn = loss_fn
        self.options = _options_of_the_gradient(options, dtype, "per-sample" if with_masks else "native")
        self._batch = batch if options.collate is not None else wide_batch(batch, dtype)
        self._named = {name: p for name, p in inside(self.model).named_parameters() if p.requires_grad}
        self._device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        for p in self._named.values():
            p.grad = None
        self._undo = Undo(self.model)
        with widened(self._mode):
            # What a split makes may have no samples that can be counted, but then it has a weight.
            weigher = Weigher(options.weight if options.split else None)
            self.num_samples = pieces_of(self._batch, 1, self.options, weigher).num_samples

    @property
    def drops_in_functions(self) -> bool:
        """Whether a dropout that is no layer was switched off in the runs so far."""
        return self._mode.switched_dropout_off

    @contextmanager
    def _running(self, policy: str) -> Iterator[None]:
        frozen = batchnorm.frozen(self.model) if policy == "frozen" else nullcontext()
        self._undo.take(self._device)
        try:
            with without_compiled_code(self.model), warnings.catch_warnings(), widened(self._mode), frozen:
                warnings.simplefilter("ignore", BigBatchWarning)  # the findings say it
                yield
        finally:
            self._undo.restore(random_numbers=False)

    def whole(self, *, batch_norm: str | None = None) -> Found:
        """The true big batch: one forward and one backward, by nothing but ``loss_fn`` and autograd.

        Args:
            batch_norm: Instead of that of the options.

        Raises:
            LossError: What ``loss_fn`` returned is no loss, or it reaches no parameter of the model that it got.
        """
        policy = batch_norm or self.options.batch_norm
        size = self.num_samples
        with self._running(policy), self._dropout.running([size], 0), self._dropout.forward(size):
            loss = plain_loss(self._loss_fn(self.model, self._whole_batch()))
            return Found(float(loss.detach()), self._gradients_of(loss), (self.num_samples,))

    def _whole_batch(self) -> Any:
        batch = self._batch if self.options.collate is None else self.options.collate(self._batch)
        return next(iter(on_device([Piece(batch, self.num_samples, {})], self._device))).micro_batch

    def _gradients_of(self, loss: torch.Tensor) -> Gradients:
        reached: tuple[torch.Tensor | None, ...] = (None,) * len(self._named)
        if loss.requires_grad:
            reached = torch.autograd.grad(loss, list(self._named.values()), allow_unused=True)
        if any(gradient is None for gradient in reached):
            _check_not_reentrant(loss)
        if all(gradient is None for gradient in reached):
            raise LossError(
                "The loss reaches no parameter of the model that loss_fn was given, which is a private copy. Let "
                "loss_fn use its first argument and no other model: lambda model, batch: ...; and look for "
                "torch.no_grad(), .detach() or .item() between the model and the loss."
            )
        return dict(zip(self._named, reached, strict=True))

    def cut(self, micro_batch_size: int, *, batch_norm: str | None = None) -> Found:
        """The gradient of ``accumulate``.

        Args:
            micro_batch_size: Samples in a micro-batch, at most.
            batch_norm: Instead of that of the options.
        """
        options = {**vars(self.options), **({"batch_norm": batch_norm} if batch_norm else {})}
        with self._running("native"), same_masks(_SEED), by_itself():
            try:
                result = accumulate(
                    self.model,
                    self._loss_fn,
                    self._batch,
                    micro_batch_size=micro_batch_size,
                    parameters=self._named.values(),
                    **options,
                )
                gradients = {name: p.grad for name, p in self._named.items()}
                return Found(float(result.loss), gradients, result.micro_batch_sizes)
            finally:
                for p in self._named.values():
                    p.grad = None

    def pieces(self, micro_batch_size: int, weight: Any) -> list[Piece]:
        """The micro-batches that a step would make, with that ``weight``."""
        with widened(self._mode):
            found = pieces_of(self._batch, micro_batch_size, self.options, Weigher(weight))
            return list(on_device(list(found.pieces), self._device))

    def terms(self, micro_batch: Any = None, *, batch_norm: str | None = None) -> dict[str, tuple[Term, torch.Tensor]]:
        """Each term of the loss of a micro-batch by name, and its gradient as one vector.

        Args:
            micro_batch: None: the whole batch.
            batch_norm: Instead of that of the options.

        Returns:
            The vector has the first 20,000 entries of each parameter: what adds up does so in each entry, and large
            models have more than can be kept for each micro-batch.
        """
        with self._running(batch_norm or self.options.batch_norm):
            micro_batch = self._whole_batch() if micro_batch is None else micro_batch
            terms = terms_of(self._loss_fn(self.model, micro_batch))
            return {term.name: (term, self._flat_gradient_of(value_of(term))) for term in terms}

    def _flat_gradient_of(self, value: torch.Tensor) -> torch.Tensor:
        parameters = list(self._named.values())
        reached = (None,) * len(parameters)
        if value.requires_grad:
            reached = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
        dense = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, reached, strict=True)]
        return torch.cat([gradient.flatten()[:_MOST_OF_A_PARAMETER] for gradient in dense])

    @property
    def num_entries(self) -> int:
        """Of a gradient as ``terms`` gives it."""
        return sum(min(p.numel(), _MOST_OF_A_PARAMETER) for p in self._named.values())

    @property
    def is_of_whole_batch(self) -> bool:
        """Whether the loss is a ``WholeBatchLoss``."""
        return isinstance(self._loss_fn, WholeBatchLoss)

    def outputs(self, micro_batch: Any = None, *, batch_norm: str | None = None) -> list[tuple[str, Any]]:
        """Path and leaf of what the forward of a ``WholeBatchLoss`` returns for a micro-batch, without a graph."""
        with self._running(batch_norm or self.options.batch_norm), torch.no_grad():
            returned = self._loss_fn.forward(self.model, self._whole_batch() if micro_batch is None else micro_batch)
            return list(named_leaves(returned))

    def forward(self, micro_batch: Any = None, *, batch_norm: str | None = None) -> None:
        """Only the forward, without a graph, for those who listen to the layers of the copy."""
        with self._running(batch_norm or self.options.batch_norm), torch.no_grad():
            whole = self._whole_batch() if micro_batch is None else micro_batch
            (self._loss_fn.forward if self.is_of_whole_batch else self._loss_fn)(self.model, whole)


def _options_of_the_gradient(options: StepOptions, dtype: torch.dtype, dropout: DropoutPolicy) -> StepOptions:
    plain = {name: getattr(StepOptions(), name) for name in AFTER_THE_GRADIENT}
    collate = options.collate
    wide = collate and (lambda samples: wide_batch(collate(samples), dtype))
    return dataclasses.replace(
        options, precision="fp32", dropout=dropout, collate=wide, pad_to_multiple_of=None, **plain
    )


def _check_not_reentrant(loss: torch.Tensor) -> None:
    """Raise ``OptionError`` where the graph ends at a reentrant checkpoint, which hides the parameters inside."""
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise OptionError(
                "The model runs torch.utils.checkpoint with use_reentrant=True, which hides the parameters inside from "
                "autograd.grad. Write use_reentrant=False, or bb.recompute."
            )
        seen.add(node)
        left += [following for following, _ in node.next_functions]


def check_can_be_run_at_once(batch: Any) -> None:
    """Raise ``BatchError`` for a batch of which only micro-batches are there."""
    if isinstance(batch, LogicalBatch):
        raise BatchError(
            "A LogicalBatch is cut already, so there is no whole batch to compare with. Give verify the batch before "
            "it was cut, and split= if it is cut in a way of your own."
        )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back what a ``loss_fn`` can move that uses the model itself, or draws random numbers, whatever happens."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    undo, generators = Undo(model), Generators(device, everywhere=True)
    undo.take(device)
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        undo.restore()
        generators.restore()
        for module, training in flags:
            module.training = training
