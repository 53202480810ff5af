"""The plan of a step: chosen on numbers, then traced, so that its peak is exact."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bigbatch.batch.collating import samples_for
from bigbatch.batch.logical import num_samples_of
from bigbatch.batch.resizing import micro_batch_of
from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.errors import BudgetError, OptionError, RecomputeError, TraceError
from bigbatch.memory.recompute import apply
from bigbatch.planning.cards import Card, find_card
from bigbatch.planning.costs import NOTHING, Line, MemoryProfile, Slot
from bigbatch.planning.search import MARGIN, Recompute, nothing_fits, search
from bigbatch.planning.sharding_costs import Shards
from bigbatch.planning.simulate import Simulation
from bigbatch.planning.space import names_held
from bigbatch.planning.timeline import Timeline, read_timeline
from bigbatch.stepping.fitting import sizing
from bigbatch.stepping.fitting.pooled_plans import as_one_micro_batch, plan_pooled
from bigbatch.stepping.fitting.pricing import Roofline
from bigbatch.stepping.fitting.profiling import bytes_of_batch, profile_of
from bigbatch.stepping.fitting.rivals import fastest_in_trial, free_bytes, seconds_of
from bigbatch.stepping.fitting.shadow import Shadow
from bigbatch.stepping.fitting.sharded_plans import plan_sharded, ways_of
from bigbatch.stepping.fitting.shards import Sharding, Spread, shards_of
from bigbatch.stepping.fitting.timing import timed
from bigbatch.stepping.fitting.workspace import find_workspace
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

UNLIMITED = 2**60
"""Bytes that stand for no budget."""
_DEFAULT_CARD = "a100-80gb"
_MOST_ROUNDS = 8
_WORTH_ANOTHER_ROUND = 0.01
"""Of the budget: when so much more was expected than is needed, there may be a faster plan."""


class Planner:
    """Plans steps of one model. It only reads the step; where it runs the model, it puts everything back.

    Args:
        step: Model, loss, optimizers and options.
        batch: An example of what the step gets; its samples are repeated where more are needed.
        device: "cpu" or "cuda": where it will run; None: where the model is.
        card: What the device can do, for models that cannot be timed.
        blocks: Names of modules that are to be recomputed.
        num_ranks: That will share a batch; None: as many as the model is wrapped for.
        sharding: How the model will be wrapped, when it is not.

    Attributes:
        margin: Share of the budget that plans leave free.
        spread: How the model is, or will be, spread over ranks.
        pooled: The step, if its BatchNorm layers normalise by the whole batch; else None.
    """

    def __init__(
        self,
        step: Step,
        batch: Any,
        *,
        device: str | None = None,
        card: Card | None = None,
        blocks: Sequence[str] = (),
        num_ranks: int | None = None,
        sharding: Sharding | None = None,
    ):
        sizing.check_can_be_cut(step, batch)
        # Layers that pool the whole batch are as torch's own when it is one micro-batch, which is what profiles are of.
        self.pooled = step if step.accumulator.pools_statistics else None
        self.step = as_one_micro_batch(step) if self.pooled else step
        self.batch = batch
        self.spread = Spread(step, sharding, num_ranks)
        self._blocks = [*dict.fromkeys((*blocks, *self.spread.names))]
        self.margin = MARGIN
        self.num_samples = num_samples_of(batch, step.options)
        here = step.accumulator.device.type
        self.device = device or ("cuda" if here == "cuda" or (card and card.name != "cpu") else "cpu")
        self.can_run = here == self.device and not self.spread.is_sharded
        self._is_for_card = card is not None
        self._workspaces: dict[Any, int] = {}  # by micro-batch size and what is recomputed
        self.card = card or find_card("cpu" if self.device == "cpu" else _DEFAULT_CARD)

    def batch_of(self, num_samples: int) -> Any:
        """A batch of so many samples, as the step would get it."""
        if self.step.options.collate is not None:
            return samples_for(self.batch, num_samples, self.step.options)
        return micro_batch_of(self.batch, num_samples, self.step.options)

    @cached_property
    def bytes_of_batch(self) -> Line:
        """Bytes of batches by their samples."""
        return bytes_of_batch(self.step, self.batch)

    def by_trying(
        self, batch_size: int, budget_bytes: int | None, micro_batch_size: int | None, recompute: Recompute
    ) -> Plan:
        """A plan from steps of real tensors: the largest micro-batch that fits; nothing is recomputed but on request.

        Raises:
            BudgetError: Nothing fits.
            OptionError: All blocks are to be recomputed; which modules these are is found by tracing.
        """
        step = self.pooled or self.step
        if recompute == "all":
            raise OptionError(
                'recompute="all" is all blocks of a model, which are found by tracing it, and this one cannot be '
                'traced. Name them: recompute=("blocks.0", "blocks.1").'
            )
        names = names_held(recompute)
        step.wanted_micro_batch_size = micro_batch_size
        with apply(Plan(micro_batch_size=batch_size, recompute=names), step.model):
            found = sizing.fit(step, self.batch_of(batch_size), budget_bytes or UNLIMITED)
        return replace(found, recompute=names, budget_bytes=budget_bytes)

    @cached_property
    def shadow(self) -> Shadow:
        """The step without numbers, made at its first use."""
        return Shadow(self.step, self.batch, self.device, self.spread.buckets, is_sharded=self.spread.is_sharded)

    @cached_property
    def traced(self) -> MemoryProfile:
        """The profile with estimated times.

        Raises:
            TraceError: Fake tensors cannot follow the model.
        """
        found = profile_of(self.step, self.shadow, self.batch, price=Roofline(self.card), wanted=self._blocks)
        return replace(found, whole_batch=self.pooled is not None)

    @cached_property
    def shards(self) -> Shards:
        """The model as FSDP2 spreads it over the ranks."""
        return shards_of(self.step, self.spread.num_ranks, self.device)

    def fits_directly(self, budget_bytes: int) -> bool:
        """Whether the whole batch is expected to fit at once, with nothing recomputed."""
        simulation = Simulation(self.traced, (self.num_samples,))
        return simulation.peak_of(()) + simulation.workspace_bytes <= budget_bytes * (1 - self.margin)

    def timed(self, batch_size: int, budget_bytes: int | None) -> MemoryProfile:
        """The profile with the times of this device, where the model can run on it."""
        if not self.can_run or self._is_for_card:
            return self.traced
        # What is timed is really run, so it has to fit on this machine too.
        room = min(budget_bytes or UNLIMITED, free_bytes(self.step.accumulator.device))

        def fits(size: int, recompute_all: bool) -> bool:
            simulation = Simulation(self.traced, (size, size))
            segments = simulation.chain.every_block() if recompute_all else ()
            return simulation.peak_of(segments) + simulation.workspace_bytes <= room

        with self.any_number_of_samples():
            found = find_workspace(self.step, self.batch, self.shadow, self.traced, batch_size, fits)
            known = self.traced.workspace
            workspace = Line(known.fixed + found.fixed, known.per_sample + found.per_sample)
            return timed(self.step, self.batch, replace(self.traced, workspace=workspace), fits, batch_size)

    @contextlib.contextmanager
    def any_number_of_samples(self) -> Iterator[None]:
        """While steps are tried: two micro-batches are run at a time, which may be more samples than a batch has."""
        accumulator = self.step.accumulator
        most_samples, accumulator.most_samples = accumulator.most_samples, None
        try:
            yield
        finally:
            accumulator.most_samples = most_samples

    def peak_bytes(self, plan: Plan, batch_size: int) -> int:
        """Peak of a steady step under this plan, traced.

        Raises:
            RecomputeError: The plan does not go with the model.
        """
        return self.peaks(plan, batch_size)[0]

    def peaks(self, plan: Plan, batch_size: int) -> tuple[int, int]:
        """The peak of tensors alone, and that with the workspace of kernels as far as ``timed`` has measured it."""
        if self._is_in_lockstep(plan, batch_size):
            sizes = micro_batch_sizes(batch_size, plan.micro_batch_size, 1)  # a rest of 1 is no trouble here
            record = self.lockstep_shadow.run(sizes, plan)
            return record.peak_bytes, max(record.peak_bytes, math.ceil(record.most_in_kernels))
        sizes = self.sizes_of(plan, batch_size)
        record = self.shadow.run(self._to_be_traced(sizes), plan)
        added = self._batch_bytes(sizes) - record.micro_batch_bytes
        return record.peak_bytes + added, max(record.peak_bytes, math.ceil(record.most_in_kernels)) + added

    def timeline(self, plan: Plan, batch_size: int) -> Timeline:
        """What is alive at every moment of a steady step under this plan; its highest moment is ``peak_bytes``.

        Raises:
            OptionError: The step is no sequence of micro-batches in one process.
            RecomputeError: The plan does not go with the model.
        """
        if self.spread.is_sharded:
            raise OptionError("A timeline shows a step of one process; leave it out for a plan with FSDP2.")
        if self._is_in_lockstep(plan, batch_size):
            raise OptionError(
                'Micro-batches with batch_norm="exact" run side by side, and a timeline shows them one by one. Leave '
                "micro_batch_size out, or draw the plan of another batch_norm."
            )
        profile, sizes = self.traced, self.sizes_of(plan, batch_size)
        price = Roofline(self.card)
        record = self.shadow.run(self._to_be_traced(sizes), plan, closely=True, gradients=True, price=price)
        return read_timeline(
            record.events,
            profile,
            micro_batch_bytes=record.micro_batch_bytes,
            batch_bytes=self._batch_bytes(sizes),
            num_later=len(sizes) - 1 if self.step.accumulator.two_passes is None else min(1, len(sizes) - 1),
        )

    def _to_be_traced(self, sizes: list[int]) -> list[int]:
        """The first micro-batch and the largest of the others, each of which is as that one; for a loss of all, all."""
        if self.step.accumulator.two_passes is not None:
            return sizes
        return [sizes[0], *([max(sizes[1:])] if len(sizes) > 1 else [])]

    @cached_property
    def lockstep_shadow(self) -> Shadow:
        """The step without numbers whose micro-batches run side by side; made at its first use."""
        found = Shadow(self.pooled or self.step, self.batch, self.device, self.spread.buckets)
        found.workspaces = self.shadow.workspaces
        return found

    def _is_in_lockstep(self, plan: Plan, batch_size: int) -> bool:
        return self.pooled is not None and plan.micro_batch_size < batch_size

    def sizes_of(self, plan: Plan, batch_size: int) -> list[int]:
        """Samples in each micro-batch."""
        return micro_batch_sizes(batch_size, plan.micro_batch_size, self.traced.smallest_micro_batch)

    def _batch_bytes(self, sizes: list[int]) -> int:
        """Bytes of the batch that lie on the device."""
        profile = self.traced
        return math.ceil(profile.batch.at(sum(sizes) if profile.batch_is_whole else max(sizes)))

    def plan(
        self,
        profile: MemoryProfile,
        batch_size: int,
        budget_bytes: int | None,
        *,
        micro_batch_size: int | None = None,
        recompute: Recompute = None,
    ) -> Plan:
        """The fastest plan whose traced peak is within the budget less its margin.

        Raises:
            BudgetError: There is none.
        """
        budget = UNLIMITED if budget_bytes is None else budget_bytes
        if self.spread.is_sharded:
            held = {"micro_batch_size": micro_batch_size, "recompute": recompute}
            found = plan_sharded(profile, self.shards, batch_size, budget, ways=ways_of(self.step), **held)
            return self._finished(found, budget_bytes)
        if self.pooled is not None and (micro_batch_size is None or micro_batch_size < batch_size):
            return plan_pooled(self, profile, batch_size, budget_bytes, micro_batch_size, recompute)

        def choose(target: int) -> Plan:
            return search(
                profile,
                batch_size=batch_size,
                budget_bytes=target,
                margin=self.margin,
                micro_batch_size=micro_batch_size,
                recompute=recompute,
            )

        while True:
            try:
                found = self._within(profile, batch_size, budget, choose)
                if profile.timing == "measured" and micro_batch_size is None and recompute is None:
                    found = fastest_in_trial(self, found, profile, batch_size, budget)
                return self._finished(found, budget_bytes)
            except _CannotRecomputeError as error:
                if recompute not in (None, "all"):
                    raise error.cause from None
                profile = self._without(error.plan, profile)

    def _finished(self, plan: Plan, budget_bytes: int | None) -> Plan:
        max_tokens = sizing.max_tokens_of(plan.micro_batch_size, self.batch, self.step.options)
        return replace(plan, budget_bytes=budget_bytes, max_tokens=max_tokens)

    def _within(
        self, profile: MemoryProfile, batch_size: int, budget_bytes: int, choose: Callable[[int], Plan]
    ) -> Plan:
        """Choose, trace, and choose again with less when the choice was off."""
        target = budget_bytes
        for _ in range(_MOST_ROUNDS):
            try:
                chosen = choose(target)
            except BudgetError:
                break
            plan = self.traced_plan(chosen, batch_size)
            over = self.budget_for(plan, profile) - budget_bytes
            if over <= 0:
                return self._faster(plan, chosen, profile, batch_size, budget_bytes, choose)
            target = max(1, target - over)
        return self._leanest(profile, batch_size, budget_bytes, choose)

    def _faster(
        self,
        plan: Plan,
        chosen: Plan,
        profile: MemoryProfile,
        batch_size: int,
        budget_bytes: int,
        choose: Callable[[int], Plan],
    ) -> Plan:
        """The plan, or a faster one, when it needs a good deal less than was expected."""
        spared = (chosen.peak_bytes or 0) - (plan.peak_bytes or 0)
        if spared < _WORTH_ANOTHER_ROUND * budget_bytes or not chosen.recompute:
            return plan
        other = self.traced_plan(choose(budget_bytes + spared), batch_size)
        is_faster = seconds_of(other) < seconds_of(plan)
        return other if is_faster and self.budget_for(other, profile) <= budget_bytes else plan

    def _leanest(
        self, profile: MemoryProfile, batch_size: int, budget_bytes: int, choose: Callable[[int], Plan]
    ) -> Plan:
        """The plan of the smallest peak, if that is within the budget.

        Raises:
            BudgetError: It is not.
        """
        try:
            chosen = choose(1)
        except BudgetError as error:
            chosen = choose(error.smallest_bytes or budget_bytes)
        plan = self.traced_plan(chosen, batch_size)
        smallest_bytes = self.budget_for(plan, profile)
        if smallest_bytes <= budget_bytes:
            return plan
        raise nothing_fits(plan, smallest_bytes, budget_bytes, self.margin)

    def traced_plan(self, plan: Plan, batch_size: int) -> Plan:
        """The plan with its traced peak.

        Raises:
            TraceError: The model cannot be traced.
        """
        try:
            peak, with_workspace = self.peaks(plan, batch_size)
            self._workspaces[plan.micro_batch_size, plan.recompute, plan.keep] = with_workspace - peak
            return replace(plan, peak_bytes=peak)
        except (RecomputeError, TraceError) as error:
            if not plan.recompute:
                raise
            raise _CannotRecomputeError(plan, error) from error

    def budget_for(self, plan: Plan, profile: MemoryProfile) -> int:
        """The smallest budget for a plan."""
        needed = plan.peak_bytes or 0
        if profile.workspace != NOTHING:
            needed += self._workspaces[plan.micro_batch_size, plan.recompute, plan.keep]
            needed += self.traced.workspace.at(plan.micro_batch_size)
        return math.ceil(needed / (1 - self.margin))

    def _without(self, plan: Plan, profile: MemoryProfile) -> MemoryProfile:
        """The profile without what made the plan fail: its groups, or those of its modules that fail alone."""
        grouped = {name for entry in plan.recompute if not isinstance(entry, str) for name in entry}
        if grouped:
            slots = (replace(slot, follows=slot.follows and slot.name not in grouped) for slot in profile.slots)
            return replace(profile, slots=tuple(slots))
        names = [name for name in plan.recompute if isinstance(name, str)]
        # Where each works alone and all of them together do not, none of them is offered again.
        failing = {name for name in names if not self._can_be_recomputed(name, dict(plan.keep))} or {*names}

        def without(slot: Slot) -> Slot:
            parts = tuple(part for part in slot.parts if failing.isdisjoint(part.names))
            return replace(slot, parts=parts, may_recompute=slot.may_recompute and slot.name not in failing)

        return replace(profile, slots=tuple(map(without, profile.slots)))

    def _can_be_recomputed(self, name: str, keep: dict[str, str]) -> bool:
        kept = ((name, keep[name]),) if name in keep else ()
        try:
            self.shadow.run([self.traced.smallest_micro_batch], Plan(micro_batch_size=1, recompute=(name,), keep=kept))
        except (RecomputeError, TraceError):
            return False
        return True


class _CannotRecomputeError(Exception):
    """Modules of a plan cannot be recomputed."""

    def __init__(self, plan: Plan, cause: Exception):
        super().__init__(str(cause))
        self.plan = plan
        self.cause = cause
