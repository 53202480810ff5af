"""Plans for ``batch_norm="exact"``: all of the batch at once if recomputing lets it fit, else lock-step.

With one micro-batch torch's own BatchNorm sees the whole batch, and nothing has to wait or to move. Lock-step comes
second: on a card it moves what is saved to the host and back, several times over. On a CPU there is no other memory to
move it to, so that it needs about what the big batch needs, and is never chosen.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigbatch.errors import BudgetError, OptionError
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.space import Recompute, names_held
from bigbatch.stepping.micro_batch_loop import Accumulator
from bigbatch.units import format_bytes
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.fitting.planner import Planner
    from bigbatch.stepping.step import Step


def as_one_micro_batch(step: Step) -> Step:
    """The step as it is when the whole batch is one micro-batch; it shares all with the original."""
    return with_options(step, batch_norm="native")


def with_options(step: Step, **changes: Any) -> Step:
    """The step with other ``StepOptions``. It has the model and optimizers of the original, and its own accumulator."""
    twin = copy.copy(step)
    twin.options = replace(step.options, **changes)
    twin.accumulator = Accumulator(step.model, step.accumulator.given_loss_fn, twin.options)
    twin.accumulator.most_samples = step.accumulator.most_samples
    return twin


def plan_pooled(
    planner: Planner,
    profile: MemoryProfile,
    batch_size: int,
    budget_bytes: int | None,
    micro_batch_size: int | None,
    recompute: Recompute,
) -> Plan:
    """The plan for a step whose layers normalise by the whole batch; see ``Planner.plan``.

    Plans in lock-step have no ``step_seconds``: how fast the host is reached is not measured.

    Raises:
        BudgetError: Nothing fits.
        OptionError: ``recompute="all"`` together with micro-batches.
    """
    if micro_batch_size is not None:
        return _within(planner, batch_size, budget_bytes, [micro_batch_size], _names(recompute), None)
    try:
        return planner.plan(profile, batch_size, budget_bytes, micro_batch_size=batch_size, recompute=recompute)
    except BudgetError as error:
        if planner.device == "cpu":
            error.args = (
                f'{error} With batch_norm="exact" all samples of the batch are there at once, and on a CPU what is '
                f"saved has no other memory to go to.",
            )
            raise
        return _within(planner, batch_size, budget_bytes, _halves(batch_size), _names(recompute), error)


def _within(
    planner: Planner,
    batch_size: int,
    budget_bytes: int | None,
    sizes: list[int],
    names: tuple[str | tuple[str, ...], ...],
    failure: BudgetError | None,
) -> Plan:
    """The plan of the first size whose traced peak is within the budget."""
    smallest = math.inf if failure is None or failure.smallest_bytes is None else failure.smallest_bytes
    for size in sizes:
        plan = Plan(micro_batch_size=size, accumulation_steps=math.ceil(batch_size / size), recompute=names)
        peak, with_workspace = planner.peaks(plan, batch_size)
        needed = math.ceil(with_workspace / (1 - planner.margin))
        if budget_bytes is None or needed <= budget_bytes:
            return replace(plan, peak_bytes=peak, budget_bytes=budget_bytes)
        smallest = min(smallest, needed)
    raise BudgetError(
        f'Nothing fits in {format_bytes(budget_bytes or 0)}: with batch_norm="exact" {batch_size} samples need '
        f"{format_bytes(smallest)}, in micro-batches of {sizes[-1]} whose forwards take turns. Raise the budget.",
        smallest_bytes=int(smallest),
        budget_bytes=budget_bytes,
    )


def _halves(batch_size: int) -> list[int]:
    """Micro-batch sizes to try, from half of the batch down to 1: larger ones are faster."""
    sizes = [math.ceil(batch_size / parts) for parts in (2**i for i in range(1, 32)) if parts < 2 * batch_size]
    return list(dict.fromkeys(sizes))


def _names(recompute: Recompute) -> tuple[str | tuple[str, ...], ...]:
    if recompute == "all":
        raise OptionError(
            'recompute="all" and micro-batches with batch_norm="exact": in lock-step what is recomputed is there for '
            "all micro-batches at once, so it saves little. Leave one of them out, or name the modules."
        )
    return names_held(recompute)
