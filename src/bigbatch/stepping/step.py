"""One optimizer step of the whole batch: what happens around the gradient, each once and in its order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bigbatch.batch.collating import warn_where_nothing_bounds
from bigbatch.errors import GradientError, LossError, NonFiniteError, OptionError, StateLostError
from bigbatch.memory.out_of_memory import is_out_of_memory
from bigbatch.memory.recompute import apply
from bigbatch.stepping.after_backward import Accumulation
from bigbatch.stepping.averaging import update_all_or_nothing, updater_of
from bigbatch.stepping.checks import check_no_gradients, optimizers_of, parameters_of, schedulers_of
from bigbatch.stepping.exactness import why_not_exact
from bigbatch.stepping.fitting import first_batch, sizing
from bigbatch.stepping.gradients import accumulation_dtype_of, clear_gradients
from bigbatch.stepping.insisting import insist
from bigbatch.stepping.judging import judged
from bigbatch.stepping.micro_batch_loop import Accumulator, OnMicroBatch
from bigbatch.stepping.noise_scale import NoiseScale
from bigbatch.stepping.norms import clip, total_norm
from bigbatch.stepping.optimizer_undo import OptimizerUndo
from bigbatch.stepping.precision import forget_unscaled
from bigbatch.stepping.recovery import Recovery
from bigbatch.stepping.state import load_state, state_of
from bigbatch.units import format_bytes, format_count, parse_bytes
from bigbatch.values import Plan, StepOptions, StepResult, check_positive

_log = logging.getLogger("bigbatch")


class Step:
    """One optimizer step of a batch, run in micro-batches, that equals the step of the one big batch.

    In this order, once each: forward and backward of every micro-batch, unscale, clip, optimizer, scaler, scheduler,
    EMA, clear. A step that is skipped moves nothing but the random numbers.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = Step(model, lambda m, b: (m(b[0]) - b[1]).square().mean(), optimizer, micro_batch_size=8)
    >>> step((torch.randn(20, 3), torch.randn(20, 1))).micro_batch_sizes
    (8, 8, 4)

    Args:
        model: The model, as one module.
        loss_fn: Called as ``loss_fn(model, micro_batch)``; see ``accumulate``.
        optimizer: One, or several for different parameters.
        plan: What to run: micro-batch size and recomputed modules. Instead of memory_budget and micro_batch_size.
        batch_size: Samples in a step, at most; a larger batch is an error.
        memory_budget: A plan is made at the first batch (see ``fit``), such that the peak of a step stays inside this:
            bytes, or a text such as ``"8GiB"``.
        micro_batch_size: Samples in one forward-backward; with a ``memory_budget``, the plan has this size.
        options: See ``StepOptions``.

    Attributes:
        micro_batch_size: Samples in one forward-backward; None: the whole batch, or not found yet.
        wanted_micro_batch_size: As given.
        plan: The plan that was given or found.
        num_steps: Optimizer steps done; skipped ones do not count.
        num_skipped, num_skipped_in_a_row: Steps that were skipped, all and since the last one that was not.
        on_micro_batch: Called before each micro-batch as ``on_micro_batch(k, num_micro_batches)``, for a progress bar.
        model, optimizers, schedulers, options, batch_size, budget_bytes: As given.
        noise_scale: ``noise_scale.value`` is the gradient noise scale, with the option of that name.
        accumulator, optimizer_undo: What runs the micro-batches, and what undoes an optimizer.

    Raises:
        ArgumentError: An argument is of the wrong kind.
        OptionError: Options do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        optimizer: torch.optim.Optimizer | Any,
        *,
        plan: Plan | None = None,
        batch_size: int | None = None,
        memory_budget: int | str | None = None,
        micro_batch_size: int | None = None,
        **options: Any,
    ):
        self.options = StepOptions.of(_with_plan(options, plan, memory_budget, micro_batch_size))
        self.accumulator = Accumulator(model, loss_fn, self.options, seed=torch.initial_seed())
        self.model = model
        self.optimizers = optimizers_of(optimizer)
        self.schedulers = schedulers_of(self.options.scheduler, self.optimizers)
        for name, size in (("batch_size", batch_size), ("micro_batch_size", micro_batch_size)):
            if size is not None:
                check_positive(name, size)
        self._update_average = updater_of(self.options.ema)
        self.batch_size = self.accumulator.most_samples = batch_size
        self.budget_bytes = None if memory_budget is None else parse_bytes(memory_budget)
        self.wanted_micro_batch_size = micro_batch_size
        self.micro_batch_size = plan.micro_batch_size if plan else micro_batch_size
        self.plan = plan
        self.num_steps = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.noise_scale = NoiseScale(self.accumulator, self.optimizers, wanted=self.options.noise_scale)
        self._recovery = Recovery(self)
        self._shrinks = self.options.on_out_of_memory == "shrink"
        self.optimizer_undo = OptimizerUndo(self.optimizers) if self._shrinks else None
        self._said: set[str] = set()
        self._named_key: list[int] = []
        self._named: dict[str, torch.Tensor] = {}
        if plan is not None:
            apply(plan, model)

    def __repr__(self) -> str:
        """Model, batch, micro-batch and plan in one line."""
        sizes = f"batch_size={self.batch_size}, micro_batch_size={self.micro_batch_size}"
        return f"Step({type(self.model).__name__}, {sizes}, plan: {_plan_in_words(self.plan, self.budget_bytes)})"

    @property
    def on_micro_batch(self) -> OnMicroBatch | None:
        """Called before each micro-batch with its number, from 1, and how many there are."""
        return self.accumulator.on_micro_batch

    @on_micro_batch.setter
    def on_micro_batch(self, listener: OnMicroBatch | None) -> None:
        self.accumulator.on_micro_batch = listener

    def __call__(self, batch: Any) -> StepResult:
        """Make one optimizer step of ``batch``.

        Returns:
            What happened; the loss is that of the whole batch, before the step.

        Raises:
            BatchError: The batch cannot be cut, is empty, or larger than ``batch_size``.
            LossError: What ``loss_fn`` returned is no loss, or nothing in the batch counts.
            GradientError: ``.grad`` is set before the step, or an optimizer runs inside backward.
            NonFiniteError: A loss or gradient is NaN or infinite, and ``on_non_finite`` does not skip it.
            BudgetError: Not even the smallest micro-batch fits.
            StateLostError: Memory ran out inside a large optimizer that is not fused; go on from a saved state.

        After any of them, model, optimizer and the default random number generators of torch are as before; those of
        Python and NumPy only with ``collate``, ``split`` or a function as ``weight``, which may draw from them.
        """
        if self.budget_bytes is not None and first_batch.is_needed(self, batch):
            self.fit(batch)
        if not self.num_steps:
            warn_where_nothing_bounds(batch, self.micro_batch_size, self.options)
        named = self.named_parameters()
        result = self._recovery.run(batch, named)
        try:
            if result.skipped:
                self._count_skipped()
            else:
                self._move_on()
        finally:
            clear_gradients(named.values())
        self._say_once(result)
        return result

    def attempt(self, batch: Any, micro_batch_size: int | None, named: dict[str, torch.Tensor]) -> StepResult:
        """The step without scheduler, EMA, step number and clearing; gradients are left as the optimizer saw them.

        Args:
            batch: What a step gets.
            micro_batch_size: Samples in one forward-backward, at most.
            named: What ``named_parameters`` gives.
        """
        ranks = self.accumulator.ranks
        self.noise_scale.check_ranks()
        self.accumulator.step_number = self.num_steps + self.num_skipped  # the same when it is made again
        done = self.accumulator.run(
            batch, micro_batch_size, named, check=lambda: check_no_gradients(named, parameters_of(self.optimizers))
        )
        try:
            result = self._update(done)
        except BaseException as error:
            self._abandon(done)
            if ranks.are_several and not isinstance(error, NonFiniteError | LossError):  # which all ranks raise
                raise ranks.left(error) from error
            raise
        if result.skipped:
            insist(lambda: self.accumulator.abandon(done, random_numbers=False))
        else:
            insist(self.accumulator.commit)
        return result

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters that need a gradient: of the model, and of the optimizers beside it, such as a temperature."""
        # The walk that gives names takes four times as long as the one that only sees whether something is new.
        inside = (p for module in self.model.modules() for p in module._parameters.values() if p is not None)
        key = [id(p) for p in (*inside, *parameters_of(self.optimizers)) if p.requires_grad]
        if key == self._named_key:
            return self._named
        named: dict[str, torch.Tensor] = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        known = {id(p) for p in named.values()}
        beside = [p for p in parameters_of(self.optimizers) if p.requires_grad and id(p) not in known]
        named.update({f"optimizer parameter {i}": p for i, p in enumerate(beside)})
        self._named_key, self._named = key, named
        return named

    def _update(self, done: Accumulation) -> StepResult:
        """Everything from the gradient to the optimizer."""
        done.gradients.correct(done.shares.corrections())
        scaler = self.accumulator.precision.scaler
        if scaler is not None:
            self.accumulator.precision.begin(self.accumulator.device)
            self.check_reached()
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        gradients = self.check_reached()
        norm = total_norm(gradients, self.accumulator.device)
        norm, finite = judged(self, norm, done)
        asked = self.options.max_grad_norm is not None or self.options.grad_norm
        # All that may need memory comes before the optimizer, which is hard to undo.
        noise_scale = self.noise_scale.measure(done, norm) if finite else None
        result = done.result(grad_norm=norm if asked else None, noise_scale=noise_scale, skipped=not finite)
        if finite:
            if self.options.max_grad_norm is not None:
                clip(gradients, norm, self.options.max_grad_norm)
            del gradients
            done.gradients.narrow()
            self._fill_missing()
            if self.accumulator.ranks.are_several:
                insist(self.step_optimizers)  # the other ranks make the step, so it cannot be begun again
            else:
                self.step_optimizers()
        if scaler is not None:
            insist(scaler.update)
        return result

    def step_optimizers(self) -> None:
        """Step all of them or, when memory runs out, none."""
        undo = self.optimizer_undo
        if undo is not None:
            undo.take()
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        except Exception as error:
            if undo is not None and undo.is_exact:
                insist(undo.restore)
            elif is_out_of_memory(error):
                raise StateLostError(
                    "Memory ran out inside optimizer.step(), when a part of the parameters may have moved, and they "
                    "are too large to be copied in each step. Go on from a saved state. An optimizer with fused=True "
                    "and one group of parameters needs no memory there."
                ) from error
            raise
        finally:
            if undo is not None:
                undo.let_go()

    def check_reached(self) -> list[torch.Tensor]:
        """Gradients that the optimizers will see."""
        found = [p.grad for p in parameters_of(self.optimizers) if p.grad is not None]
        if not found:
            raise GradientError(
                "No parameter of the optimizer got a gradient. Make it from the parameters of the model that Step "
                "gets, after anything that replaces them: torch.optim.AdamW(model.parameters())."
            )
        return found

    def _fill_missing(self) -> None:
        if self.options.zero_missing_gradients:
            for p in parameters_of(self.optimizers):
                if p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)

    def _abandon(self, done: Accumulation) -> None:
        insist(lambda: self.accumulator.abandon(done))
        if self.accumulator.precision.scaler is not None:
            forget_unscaled(self.accumulator.precision.scaler)

    def _move_on(self) -> None:
        self.num_steps += 1
        self.num_skipped_in_a_row = 0
        self.noise_scale.keep()
        for scheduler in self.schedulers:
            scheduler.step()
        self.update_average()

    def update_average(self) -> None:
        """Let the moving average take in the weights as they are now."""
        if self._update_average is not None:
            update_all_or_nothing(self._update_average, self.options.ema, self.model, may_fail=self._shrinks)

    def clear(self) -> None:
        """Let go of all gradients."""
        clear_gradients(self.named_parameters().values())

    def _count_skipped(self) -> None:
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if self.accumulator.precision.scaler is None and self.num_skipped_in_a_row > self.options.max_skipped:
            raise NonFiniteError(
                f"{self.num_skipped_in_a_row} steps in a row were not finite, more than "
                f"max_skipped={self.options.max_skipped}. Nothing moved. Look at the data and the learning rate."
            )

    def _say_once(self, result: StepResult) -> None:
        coupled, in_function = self.accumulator.two_passes is not None, self.accumulator.functional.is_used
        why = why_not_exact(result.exactness, is_of_whole_batch=coupled, in_function=in_function)
        if why and result.exactness not in self._said:
            self._said.add(result.exactness)
            _log.warning("The step is %s: %s", result.exactness, why)

    def fit(self, batch: Any) -> Plan:
        """Choose micro-batch size and recomputed modules for the memory budget; the state stays as it is.

        The plan is traced, timed, and tried once with ``batch``; what it recomputes is put on the model.

        Raises:
            OptionError: The step has no memory budget.
            BudgetError: Nothing fits.
        """
        if self.budget_bytes is None:
            raise OptionError('The step has no memory budget; make it with memory_budget="8GiB".')
        self.plan = first_batch.fit_together(self, batch, self.budget_bytes)
        self.micro_batch_size = self.plan.micro_batch_size
        return self.plan

    def measure(self, batch: Any, micro_batch_size: int | None) -> int:
        """Peak bytes of a steady step of ``batch``, tried and undone: the state stays as it is, bit for bit.

        On CPU every live tensor storage is counted; on CUDA it is what the allocator says.
        """
        if micro_batch_size is not None:
            check_positive("micro_batch_size", micro_batch_size)
        return sizing.measure(self, batch, micro_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on: step number, loss scale, average and micro-batch size.

        Model, optimizers and schedulers have states of their own.
        """
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave.

        Raises:
            OptionError: It is the state of something else, or of a step with other options. Nothing was loaded.
        """
        load_state(self, state)


def _plan_in_words(plan: Plan | None, budget_bytes: int | None) -> str:
    if plan is None:
        return "none" if budget_bytes is None else f"at the first batch, for {format_bytes(budget_bytes)}"
    peak = "" if plan.peak_bytes is None else f", peak {format_bytes(plan.peak_bytes)}"
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
    return f"{format_count(plan.num_recomputed, 'module')} recomputed{peak}{budget}"


def _with_plan(
    options: dict[str, Any], plan: Plan | None, memory_budget: int | str | None, micro_batch_size: int | None
) -> dict[str, Any]:
    """Options with those that the plan holds."""
    if plan is None:
        return options
    if not isinstance(plan, Plan):
        raise OptionError(f"plan is a {type(plan).__name__}; it is a bb.Plan, for example bb.Plan(micro_batch_size=8).")
    if memory_budget is not None or micro_batch_size is not None:
        given = "memory_budget" if memory_budget is not None else "micro_batch_size"
        raise OptionError(f"plan and {given} were both given; the plan says how much fits. Leave {given} out.")
    if plan.reduce is not None:
        asked = options.get("reduce", plan.reduce)
        if asked != plan.reduce:
            raise OptionError(f"reduce={asked!r}, but the plan has {plan.reduce!r}. Give one.")
        options = {**options, "reduce": plan.reduce}
    if plan.accumulation_dtype is not None:
        asked = options.get("accumulation_dtype")
        if asked is not None and accumulation_dtype_of(asked) != accumulation_dtype_of(plan.accumulation_dtype):
            raise OptionError(f"accumulation_dtype={asked!r}, but the plan has {plan.accumulation_dtype!r}. Give one.")
        return {**options, "accumulation_dtype": plan.accumulation_dtype}
    return options
