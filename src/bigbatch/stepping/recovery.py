"""A step that runs out of memory is undone and made again in smaller micro-batches: same samples, same step number."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.batch.logical import LogicalBatch, num_samples_of
from bigbatch.batch.sizes import part_sizes
from bigbatch.errors import BudgetError, DistributedError, EmptyBatchError, RankMemoryError, StateLostError
from bigbatch.memory.out_of_memory import is_out_of_memory, release
from bigbatch.memory.recompute import Recomputing, apply
from bigbatch.stepping.fitting import first_batch
from bigbatch.stepping.insisting import insist
from bigbatch.stepping.keeping import Keeping
from bigbatch.values import Plan, StepResult

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

_log = logging.getLogger("bigbatch")


class Recovery:
    """Makes the attempts of a step, and remembers which micro-batch size fits.

    Args:
        step: Whose attempts.
    """

    def __init__(self, step: Step):
        self._step = step
        self._larger: list[int | None] = []  # sizes that ran out of memory, the largest first
        self._calm = 0  # steps since the last one that ran out
        self._recomputing: tuple[Recomputing, Plan | None] | None = None  # the last resort, and the plan before it

    def run(self, batch: Any, named: dict[str, torch.Tensor]) -> StepResult:
        """Attempt the step until it fits.

        Raises:
            BudgetError: Not even the smallest micro-batch fits. All is as before the step.
        """
        retries, again = 0, False
        self._grow_back()
        keeping = Keeping() if self._may_keep(batch) else None
        self._step.accumulator.plan = self._step.plan
        while True:
            try:
                result = self._attempt(batch, named, keeping)
                break
            except Exception as error:
                in_doubt = keeping is not None and keeping.is_in_doubt and not is_out_of_memory(error)
                if not in_doubt and not self._can_be_tried_again(error, batch):
                    raise
                said = str(error).partition("\n")[0]
            # Out of the except block: the traceback holds the activations of the failed attempt.
            insist(release)
            retries += 1
            if in_doubt:
                keeping = None
                continue
            again = self._shrink(batch, said, tried_again=again)
        self._calm = 0 if retries else self._calm + 1
        return replace(result, retries=retries) if retries else result

    def _attempt(self, batch: Any, named: dict[str, torch.Tensor], keeping: Keeping | None) -> StepResult:
        step = self._step
        step.accumulator.keeping = keeping
        try:
            return step.attempt(batch, step.micro_batch_size, named)
        finally:
            step.accumulator.keeping = None

    def _may_keep(self, batch: Any) -> bool:
        """Gradients of finished micro-batches can be taken out where no other rank and no engine counts on them."""
        accumulator = self._step.accumulator
        counted_on = accumulator.ranks.are_several or accumulator.ranks.reducer.reduces_inside
        # With a loss of the whole batch, what is finished belongs to the outputs of all.
        return self._may_be_cut_smaller(batch) and not counted_on and accumulator.two_passes is None

    def _may_be_cut_smaller(self, batch: Any) -> bool:
        options = self._step.options
        return options.on_out_of_memory == "shrink" and options.split is None and not isinstance(batch, LogicalBatch)

    def _can_be_tried_again(self, error: Exception, batch: Any) -> bool:
        lost = isinstance(error, StateLostError | DistributedError) and not isinstance(error, RankMemoryError)
        return self._may_be_cut_smaller(batch) and is_out_of_memory(error) and not lost

    def _shrink(self, batch: Any, said: str, *, tried_again: bool) -> bool:
        """Choose the next smaller size; the smallest is tried once more, for memory may only have been in pieces."""
        step = self._step
        # One size for all ranks: a rank may have fewer samples, or none.
        ranks = step.accumulator.ranks
        num_samples = ranks.largest(
            num_samples_of(batch, step.options) if not ranks.are_several else _length(batch, step)
        )
        size = min(step.micro_batch_size or num_samples, num_samples)
        smaller = _next_smaller(num_samples, size, step.accumulator.smallest_micro_batch)
        if smaller is None and tried_again and self._recompute_more(batch):
            return False
        if smaller is None and tried_again:
            self._recompute_as_before()
            raise BudgetError(
                f"Out of memory in a step of {num_samples} samples, even with micro-batches of {size}: {said} "
                f"Nothing was moved. Recompute modules (plan=bb.Plan(..., recompute=(names))), use precision"
                f'="bf16", or an optimizer with less state.',
                smallest_bytes=None,
                budget_bytes=step.budget_bytes,
            )
        if smaller is None:
            return True
        _log.warning(
            "Out of memory with micro-batches of %d (%s). The step is made again with %d.", size, said, smaller
        )
        self._larger.append(step.micro_batch_size)
        step.micro_batch_size = smaller
        return False

    def _recompute_more(self, batch: Any) -> bool:
        """Where the smallest size does not fit, recompute as much as helps; once. Returns whether there is more."""
        step = self._step
        if step.accumulator.ranks.are_several:
            return False  # what each rank would trace is not the same
        try:
            plan = first_batch.leanest(step, batch) if self._recomputing is None else None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        if plan is None or (step.plan is not None and _is_no_leaner(plan, step.plan)):
            return False
        self._recomputing = apply(plan, step.model), step.plan
        step.plan = plan
        _log.warning(
            "Out of memory with the smallest micro-batches, of %s. The step is made again with %d modules recomputed.",
            step.micro_batch_size,
            len(self._recomputing[0].mechanism),
        )
        return True

    def _recompute_as_before(self) -> None:
        if self._recomputing is not None:
            handle, self._step.plan = self._recomputing
            handle.remove()
            self._recomputing = None

    def _grow_back(self) -> None:
        """After ``grow_after`` steps without trouble, try the size before."""
        grow_after = self._step.options.grow_after
        if grow_after is not None and self._larger and self._calm >= grow_after:
            size = self._larger.pop()
            _log.warning(
                "%d steps without running out of memory: trying micro-batches of %s again.", self._calm, size or "all"
            )
            self._step.micro_batch_size = size
            self._calm = 0


def _length(batch: Any, step: Step) -> int:
    try:
        return num_samples_of(batch, step.options)
    except EmptyBatchError:
        return 0


def _is_no_leaner(plan: Plan, before: Plan) -> bool:
    """Whether it recomputes nothing that was not recomputed before, and keeps all that was kept of it."""
    return set(plan.recompute) <= set(before.recompute) and set(plan.keep) >= set(before.keep)


def _next_smaller(num_samples: int, size: int, smallest: int) -> int | None:
    """A size for about twice as many micro-batches; None when there is none."""
    half = math.ceil(num_samples / (2 * math.ceil(num_samples / size)))
    fitting = [part for part in part_sizes(num_samples, smallest) if part <= half and part < size]
    return fitting[-1] if fitting else None
