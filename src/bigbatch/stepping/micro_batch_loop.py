"""The loop over micro-batches. It exists once; ``accumulate`` and ``Step`` are its users."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from bigbatch.batch.collating import Room
from bigbatch.batch.logical import LogicalBatch, Piece, Pieces, check_adds_up, pieces_at, pieces_of, read_to_the_end
from bigbatch.batch.moving import device_of, on_device
from bigbatch.batch.structure import shapes_in
from bigbatch.batch.weighing import Weigher
from bigbatch.errors import BatchError, DistributedError, LossError
from bigbatch.stepping.after_backward import Accumulation
from bigbatch.stepping.checks import (
    check_goes_with_whole_batch_loss,
    check_loss_fn,
    check_may_be_grouped,
    check_model,
    check_something_counts,
    nothing_counts,
    nothing_needs_a_gradient,
)
from bigbatch.stepping.compiled import is_compiled
from bigbatch.stepping.coupled.whole_batch import TwoPasses, WholeBatchLoss
from bigbatch.stepping.distributed.ranks import Ranks
from bigbatch.stepping.distributed.reducing import Reducer
from bigbatch.stepping.distributed.settling import num_told, settle
from bigbatch.stepping.dropout.per_sample import NativeDropout, PerSampleDropout
from bigbatch.stepping.generators import Generators
from bigbatch.stepping.gradients import Coefficients, Gradients, accumulation_dtype_of
from bigbatch.stepping.hooks import HookWatch
from bigbatch.stepping.insisting import insist
from bigbatch.stepping.keeping import Keeping
from bigbatch.stepping.losses import Term, terms_of
from bigbatch.stepping.normalization import batchnorm
from bigbatch.stepping.normalization.functional import FunctionalBatchNorm
from bigbatch.stepping.normalization.pooled_batchnorm import PooledBatchNorm
from bigbatch.stepping.normalization.side_by_side import run_side_by_side
from bigbatch.stepping.placing import say_where
from bigbatch.stepping.precision import Precision
from bigbatch.stepping.remarks import Remarks
from bigbatch.stepping.shares import Share, Shares
from bigbatch.stepping.undo import Undo
from bigbatch.values import Plan, StepOptions

OnMicroBatch = Callable[[int, int | None], None]


class Accumulator:
    """Runs forward and backward of the micro-batches of a step, for as many steps as one likes.

    Args:
        model: Passed to ``loss_fn``.
        loss_fn: ``loss_fn(model, micro_batch)``; see ``accumulate``.
        options: Those of a step.
        seed: Of dropout per sample; None: each run draws one.

    Attributes:
        device: Where the first parameter of the model is.
        precision: Autocast and loss scaling.
        two_passes: Of a ``WholeBatchLoss``.
        loss_fn: What is called with each micro-batch: as given, or the second of the two passes.
        given_loss_fn: As given.
        on_micro_batch: See ``Step``.
        most_samples: A batch may have.
        keeping: What the attempts of a step hand on; None: nothing.
        dropout: What draws the masks.
        step_number: That masks depend on, with the option for them.
        listening: Makes what listens to the backwards of a step, from its list of sizes.
        plan: That the micro-batch size comes from, for samples with lengths.
        functional: Whether BatchNorm was seen that is no layer.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Any], options: StepOptions, *, seed: int | None = None
    ):
        check_model(model)
        check_loss_fn(loss_fn)
        self.model = model
        self.given_loss_fn = loss_fn
        self.options = options
        self.device = device_of(tuple(model.modules()))
        self.precision = Precision(options.precision, self.device.type)
        self.two_passes = TwoPasses(loss_fn, self.precision) if isinstance(loss_fn, WholeBatchLoss) else None
        if self.two_passes is not None:
            check_goes_with_whole_batch_loss(options)
        self.loss_fn = loss_fn if self.two_passes is None else self.two_passes.second
        self.on_micro_batch: OnMicroBatch | None = None
        self.most_samples: int | None = None
        self.keeping: Keeping | None = None
        self.dropout = PerSampleDropout(seed) if options.dropout == "per-sample" else NativeDropout()
        self.step_number = 0
        self.listening: Callable[[list[int]], AbstractContextManager[Any]] = lambda sizes: nullcontext()
        self.plan: Plan | None = None
        self._weigher = Weigher(options.weight)
        self._weights_add_up = not self._weigher.has_callable
        self._remarks = Remarks(weight_is_default=self._weigher.is_default)
        self._accumulation_dtype = accumulation_dtype_of(options.accumulation_dtype)
        self._modules: tuple[nn.Module, ...] = ()
        self._look_at_modules()
        self._generators = Generators(self.device)
        self._coefficients = Coefficients()
        self._trusted_hooks: set[Any] = set()
        # A function that makes batches may draw from Python and NumPy too, whose states take time to read.
        self._draws_anywhere = options.collate is not None or options.split is not None or self._weigher.has_callable

    def check_size(self, num_samples: int) -> None:
        """Raise ``BatchError`` when these are more samples than a batch may have."""
        if self.most_samples is not None and num_samples > self.most_samples:
            raise BatchError(
                f"The batch has {num_samples} samples, but batch_size={self.most_samples}. Hand over smaller "
                f"batches, or make the Step with that batch_size."
            )

    def cut(self, batch: Any, micro_batch_size: int | None) -> Pieces:
        """The micro-batches of a batch, weighed."""
        few_lengths = self.options.length is not None and is_compiled(self.model)
        room = Room(self.smallest_micro_batch, self.plan, few_lengths)
        return pieces_of(batch, micro_batch_size, self.options, self._weigher, room)

    def _look_at_modules(self) -> None:
        """Find the layers and buffers that need care; again only when modules have come or gone."""
        modules = tuple(self.model.modules())
        self.device = device_of(modules)
        if modules == self._modules:
            return
        self._modules = modules
        self.dropout.look_at(self.model)
        self.ranks = Ranks(Reducer(modules, self.options.reduce, pools=self.options.batch_norm == "exact"))
        self._batch_norms = batchnorm.layers_of(self.model)
        self.functional = FunctionalBatchNorm(self.model)
        statistics = batchnorm.MergedStatistics(self.model)
        self._statistics = statistics if self.options.batch_norm == "merge" and statistics.buffers() else None
        self._pooled = PooledBatchNorm(self.model) if self.options.batch_norm == "exact" else None
        self._undo = Undo(self.model, left_out=self._statistics.buffers() if self._statistics else frozenset())

    @property
    def sees_batch_statistics(self) -> bool:
        """Whether some layer normalises by the micro-batch it gets."""
        policy = self.options.batch_norm
        return policy != "exact" and any(batchnorm.uses_batch_statistics(layer, policy) for layer in self._batch_norms)

    @property
    def pools_statistics(self) -> bool:
        """Whether some layer normalises by the whole batch, for which all micro-batches must be there."""
        return self._pooled is not None and self._pooled.is_needed()

    @property
    def smallest_micro_batch(self) -> int:
        """Samples that a micro-batch should have at least: BatchNorm refuses one value per channel."""
        return 2 if self.sees_batch_statistics else 1

    def run(
        self,
        batch: Any,
        micro_batch_size: int | None,
        named_parameters: dict[str, torch.Tensor],
        *,
        only_these: bool = False,
        check: Callable[[], None] | None = None,
    ) -> Accumulation:
        """Forward and backward of every micro-batch. If it fails, all is as before; ``keeping`` may have a part.

        Args:
            batch: See ``accumulate``.
            micro_batch_size: Samples in a micro-batch, at most; None: the whole batch at once.
            named_parameters: Those that may get a gradient.
            only_these: Compute no other gradients.
            check: Raises when a step must not begin.
        """
        self._look_at_modules()  # a model may be moved, or get other layers, between two steps
        self.ranks.reducer.check_parameters(named_parameters, only_these=only_these)
        pieces = self._pieces_or_nothing(batch, micro_batch_size, check)
        self._generators = Generators(self.device) if self._draws_anywhere else self._undo.rng
        parameters = list(named_parameters.values())
        gradients = Gradients(parameters, self._accumulation_dtype, self._coefficients, only_these=only_these)
        done = Accumulation(gradients, Shares(pieces), padding=pieces.padding)
        watch = None
        self.ranks.num_told = num_told(len(parameters))
        try:
            self.ranks.reducer.begin()
            watch = HookWatch(named_parameters, self._modules, self._trusted_hooks)
            if self._statistics:
                self._statistics.start()
            if self.keeping is not None:
                places = partial(pieces_at, batch, options=self.options, weigher=self._weigher)
                pieces = self.keeping.begin(done, pieces, micro_batch_size, places)
            masks = self.dropout.running(done.sizes, self.step_number, pieces.part)
            with masks, self.listening(done.sizes) as done.contributions:
                self._loop(batch, pieces, done, watch)
            self._trusted_hooks |= watch.hooks
        except BaseException as error:
            self._give_up(error, done, watch)
            raise
        finally:
            if watch is not None:
                watch.stop()
            self.ranks.reducer.end()
        self._settle(done)
        if only_these and all(p.grad is None for p in parameters):
            self.abandon(done)
            raise LossError(
                "The loss reaches none of the parameters= that were given. Give those that it depends on; for all of "
                "the model leave parameters= out."
            )
        return done

    def _give_up(self, error: BaseException, done: Accumulation, watch: HookWatch | None) -> None:
        """Put everything back after an error between two exchanges, and tell the other ranks of it."""
        if watch is not None:
            insist(watch.undo)
            if self.keeping is not None:
                self.keeping.keep(done, error, partial(self._left_no_trace, done, watch))
        insist(self.ranks.reducer.abandon)
        insist(lambda: self.abandon(done))
        if isinstance(error, Exception):
            self.ranks.fail(error)

    def _left_no_trace(self, done: Accumulation, watch: HookWatch) -> bool:
        """Whether nothing would be different if the micro-batches so far had not run, but for their gradients."""
        statistics = (
            self.pools_statistics
            or self.sees_batch_statistics
            or (self._statistics is not None and self._statistics.is_active)
        )
        if statistics or self._draws_anywhere or watch.hooks or done.shares.num_backwards > 1:
            return False
        if len({p.device for p in done.gradients.parameters}) > 1:
            return False  # each has a thread of its own in backward, which may still add when another has failed
        watch.check()
        return not self._undo.is_needed()

    def _pieces_or_nothing(self, batch: Any, size: int | None, check: Callable[[], None] | None) -> Pieces:
        self._undo.take(self.device, everywhere=self._draws_anywhere)
        try:
            cut, meets = partial(self._own_pieces, batch, size, check), self.pools_statistics
            pieces = self.ranks.cut(cut, self._weigher.by_term, self.dropout.next_seed, meets=meets)
            self.check_size(pieces.part.num_samples)
            check_something_counts(pieces)
        except BaseException:
            self._undo.restore()  # a collate of the user's draws random numbers
            raise
        return pieces

    def _own_pieces(self, batch: Any, micro_batch_size: int | None, check: Callable[[], None] | None) -> Pieces:
        if check is not None:
            check()
        pieces = self.cut(batch, micro_batch_size)
        if pieces.padding is not None:
            sees_statistics = self.sees_batch_statistics or self.pools_statistics
            check_may_be_grouped(self.options, sees_statistics, self.two_passes is not None)
        if self.pools_statistics:
            self.ranks.reducer.check_may_meet()
            pieces = read_to_the_end(pieces)
        self._check_weights_add_up(batch, pieces)
        return pieces

    def _settle(self, done: Accumulation) -> None:
        """Once all ranks have run all of their micro-batches."""
        if not self.ranks.are_several:
            return
        try:
            settle(self.ranks, done, self._undo, self._statistics)
        except BaseException as error:
            insist(lambda: self.abandon(done))
            if isinstance(error, Exception) and not isinstance(error, DistributedError | LossError):
                raise self.ranks.left(error) from error  # alone, when all had agreed to go on
            raise

    def _loop(self, batch: Any, pieces: Pieces, done: Accumulation, watch: HookWatch) -> None:
        frozen = batchnorm.frozen(self.model) if self.options.batch_norm == "frozen" else nullcontext()
        pooled = self._pooled if self.ranks.meetings or (self.pools_statistics and pieces.count != 1) else None
        with frozen, self._prepared(batch, pieces) as pieces:
            self.functional.begin(layers_show=self.sees_batch_statistics or (self.pools_statistics and pooled is None))
            if pooled is None:
                reached = self._one_by_one(pieces, done, watch)
            else:
                reached = run_side_by_side(pooled, pieces, done, self.device, self.ranks, self._terms, self._backward)
        watch.check()
        self.check_size(sum(done.sizes))  # of an iterator it is only known now
        # A rank whose micro-batches count nothing has nothing to reach; alone, it was refused or has no weight.
        if not reached and not (self.ranks.are_several and nothing_counts(pieces)):
            raise nothing_needs_a_gradient()
        self.ranks.reducer.check_reduced()
        self._finish(pieces, done)
        if self.keeping is not None:
            self.keeping.end()

    def _prepared(self, batch: Any, pieces: Pieces) -> AbstractContextManager[Pieces]:
        if self.two_passes is None:
            return nullcontext(pieces)
        return self.two_passes.prepared(self, batch, pieces, self._undo, self._statistics)

    def _one_by_one(self, pieces: Pieces, done: Accumulation, watch: HookWatch) -> bool:
        """Forward and backward of each micro-batch. Returns whether some loss needed a gradient."""
        reached = bool(done.sizes)  # by an attempt before this one
        last = len(pieces.pieces) if isinstance(pieces.pieces, list) else 0
        for number, piece in enumerate(on_device(pieces.pieces, self.device), 1):
            self.ranks.reducer.before_micro_batch(is_last=number == last)
            if not piece.idle:
                self._begin(piece, pieces, done)
            try:
                shares = self._forward(piece, done.shares)
                if shares:
                    self._backward(shares, done)
                    reached = True
            except Exception as error:
                say_where(error, done.sizes, pieces, is_first_step=self.step_number == 0)
                raise
            if number <= 2:
                watch.check()
            if self.keeping is not None:
                self.keeping.finished_one(done)
            # Neither the graph nor the micro-batch may be there while the next one computes.
            del shares, piece
        return reached

    def _terms(self, piece: Piece, pieces: Pieces, done: Accumulation) -> list[Term]:
        if not piece.idle:
            self._begin(piece, pieces, done)
        return terms_of(self._call(piece))

    def _begin(self, piece: Piece, pieces: Pieces, done: Accumulation) -> None:
        done.sizes.append(piece.num_samples)
        if self.on_micro_batch is not None:
            self.on_micro_batch(len(done.sizes), pieces.count)

    def _backward(self, shares: list[Share], done: Accumulation) -> None:
        if self.functional.is_due and done.sizes:  # else they are of another rank
            self.functional.look(shares)
        with self.dropout.backward():
            done.gradients.backward(shares, self.precision.scale)

    def _forward(self, piece: Piece, shares: Shares) -> list[Share]:
        """Loss of one micro-batch, as what of it is to be backpropagated."""
        nothing_counts = piece.idle or (not any(piece.weights.values()) and shares.only_means)
        if nothing_counts and not self.ranks.reducer.reduces_inside:
            # Nothing of it counts, but train-mode BatchNorm of the big batch would have seen it.
            if self.sees_batch_statistics:
                with torch.no_grad():
                    self._call(piece)
            return []
        terms = terms_of(self._call(piece))
        found = shares.idle(terms, piece) if nothing_counts else shares.of(terms, piece)
        if shares.num_backwards > 1:
            self.ranks.reducer.check_one_backward()
        return [share for share in found if share.value.requires_grad]

    def _call(self, piece: Piece) -> Any:
        if self._statistics:
            self._statistics.before_forward(lambda: self._call_loss_fn(piece), lambda: shapes_in(piece.micro_batch))
        returned = self._call_loss_fn(piece)
        if self._statistics and not piece.idle:
            self._statistics.after_forward()
        return returned

    def _call_loss_fn(self, piece: Piece) -> Any:
        with self.precision.forward(self.device.type), self.dropout.forward(piece.num_samples, idle=piece.idle):
            return self.loss_fn(self.model, piece.micro_batch)

    def _finish(self, pieces: Pieces, done: Accumulation) -> None:
        several = (pieces.part.num_micro_batches or len(done.sizes)) > 1
        if several and (self.sees_batch_statistics or self.functional.is_used):
            done.exactness = "approximate"
        elif several and self._generators.were_used():
            done.exactness = "same in distribution"
        self._remarks.make(pieces, done)

    def _check_weights_add_up(self, batch: Any, pieces: Pieces) -> None:
        """A weight of the user's own is tried on the whole batch once; the others are known to add up."""
        cut_by_us = not isinstance(batch, LogicalBatch) and self.options.split is None and self.options.collate is None
        if not self._weights_add_up and cut_by_us and pieces.count != 1:
            parts = [piece.weights for piece in pieces.pieces]
            num_samples = sum(piece.num_samples for piece in pieces.pieces)
            check_adds_up(parts, self._weigher.weigh([(batch, num_samples)])[0])
            self._weights_add_up = True

    def commit(self) -> None:
        """The step counts: update the running statistics of BatchNorm, and forget how all was before."""
        self._undo.let_go()
        if self._statistics:
            self._statistics.commit()
        if self._pooled is not None:
            self._pooled.commit()

    def abandon(self, done: Accumulation, *, random_numbers: bool = True) -> None:
        """The step does not count: put gradients, buffers and, unless told otherwise, random numbers back."""
        done.gradients.restore()
        if self._statistics:
            self._statistics.restore()
        if self._pooled is not None:
            self._pooled.forget()
        self._undo.restore(random_numbers=random_numbers)
