"""From what a model costs to what to do: the fastest step of a batch that stays within a budget.

Micro-batch size and recomputed blocks are chosen together. Past the size where a sample gets no faster, a smaller
micro-batch is free and recompute is not; before it, the other way round. So neither "the largest batch that fits" nor
"recompute everything" is what to look for, but the least time of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from bigbatch.errors import BudgetError, OptionError
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.space import Choice, Recompute, Space
from bigbatch.units import format_bytes
from bigbatch.values import Plan, check_positive

MARGIN = 0.01
"""Share of the budget that a plan leaves free, for what the prediction may be off by: see docs/accuracy.md."""

MAX_FRONTIER_PLANS = 40
_CLOSE_LOOKS = 4
_STEP = 0.01
_LESS = 1 - 1e-9


def search(
    profile: MemoryProfile,
    *,
    batch_size: int,
    budget_bytes: int,
    margin: float = MARGIN,
    micro_batch_size: int | None = None,
    recompute: Recompute = None,
) -> Plan:
    """The plan of least seconds whose peak, with the workspace of kernels, is at most ``budget_bytes * (1 - margin)``.

    Where times were measured, a plan of larger micro-batches is taken that is slower by no more than 1 %, which cannot
    be told apart: it is nearer to the big batch.

    Args:
        profile: What the model costs.
        batch_size: Samples in a step.
        budget_bytes: Memory that there is.
        margin: Share of the budget that stays free.
        micro_batch_size: Held at this; None to choose it.
        recompute: Held at this: "all" blocks, each alone, "none", or names as in ``Plan.recompute``. None to choose.

    Raises:
        BudgetError: Nothing fits; ``smallest_bytes`` is the smallest budget with which this call has a plan.
        OptionError: An option is out of its range, or ``recompute`` names what the profile does not have.
    """
    check_positive("budget_bytes", budget_bytes)
    space = Space(profile, batch_size, micro_batch_size, recompute)
    limit = _limit(budget_bytes, margin)
    choice = space.fastest(limit, close_looks=_CLOSE_LOOKS)
    if choice is None:
        # In a long chain with many skips the only choice that fits may be lost; what the error promises must work.
        choice = space.smallest()
        if choice.needed_bytes > limit:
            smallest_bytes = _budget_for(choice.needed_bytes, margin)
            raise nothing_fits(space.plan(choice, None), smallest_bytes, budget_bytes, margin)
    return space.plan(space.leaner(space.of_more_samples(choice, limit)), budget_bytes)


def frontier(
    profile: MemoryProfile,
    *,
    batch_size: int,
    micro_batch_size: int | None = None,
    recompute: Recompute = None,
    most: int = MAX_FRONTIER_PLANS,
) -> tuple[Plan, ...]:
    """Plans from the leanest to the fastest; each has a higher peak and less seconds than the one before it.

    Every plan is the fastest for its peak. Where there are more than ``most``, they are spread evenly over the
    logarithm of the peak. ``budget_bytes`` of each is None.

    Args:
        profile: What the model costs.
        batch_size: Samples in a step.
        micro_batch_size: As in ``search``.
        recompute: As in ``search``.
        most: Plans at most, at least 2.
    """
    space = Space(profile, batch_size, micro_batch_size, recompute)
    smallest = space.smallest()
    choice = space.fastest(math.inf, close_looks=1)
    found: list[Choice] = []
    ratio = (max(1, smallest.needed_bytes) / max(1, choice.needed_bytes)) ** (1 / (most - 1)) if choice else 1.0
    limit = float(choice.needed_bytes) if choice else 0.0
    while choice is not None:
        found.append(choice)
        if choice.needed_bytes <= smallest.needed_bytes:
            break
        # The last one is at the smallest peak of all, so that the frontier ends where a budget begins to work.
        limit = max(smallest.needed_bytes, min(math.floor(limit * ratio), choice.needed_bytes - 1))
        choice = space.fastest(limit, close_looks=1) or smallest
    return undominated([space.plan(choice, None) for choice in found])


def neighbours(
    profile: MemoryProfile, *, batch_size: int, needed_bytes: int, seconds: float
) -> tuple[Plan | None, Plan | None]:
    """The fastest plan that needs less, and one that is faster and needs little more; None where there is none.

    A plan of a deep model has another one within a few bytes. So both are looked for a step of the memory away, and
    further where there is nothing so near.

    Args:
        profile: What the model costs.
        batch_size: Samples in a step.
        needed_bytes: What the plan between them needs, workspace included.
        seconds: How long its step takes.
    """
    space = Space(profile, batch_size, None, None)

    def up_to(limit: float) -> Choice | None:
        return space.fastest(limit, close_looks=1)

    leaner = up_to(min(needed_bytes - 1, math.floor(needed_bytes * (1 - _STEP)))) or up_to(needed_bytes - 1)
    fastest, low = up_to(math.inf), needed_bytes
    faster = fastest if fastest is not None and fastest.seconds < seconds * _LESS else None
    while faster is not None and faster.needed_bytes > max(low + 1, low * (1 + _STEP)):
        # Half of the way, on the scale of factors.
        middle = max(low + 1, math.isqrt(low * faster.needed_bytes))
        closer = up_to(middle)
        if closer is not None and closer.seconds < seconds * _LESS:
            faster = closer
        else:
            low = middle
    found = [None if choice is None else space.plan(space.leaner(choice), None) for choice in (leaner, faster)]
    return found[0], found[1]


def undominated(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Plans by ascending peak, without those for which another one is no worse in peak and seconds."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes or 0, plan.step_seconds or 0.0)):
        if not kept or (plan.step_seconds or 0.0) < (kept[-1].step_seconds or 0.0):
            kept.append(plan)
    return tuple(kept)


def _limit(budget_bytes: int, margin: float) -> int:
    if not 0 <= margin < 1:
        raise OptionError(f"margin={margin!r}; it is a share of the budget, from 0 to less than 1.")
    return math.floor(budget_bytes * (1 - margin))


def _budget_for(needed_bytes: int, margin: float) -> int:
    """The smallest budget that leaves so many bytes."""
    budget = math.ceil(needed_bytes / (1 - margin))
    while _limit(budget, margin) < needed_bytes:
        budget += 1
    while budget > 1 and _limit(budget - 1, margin) >= needed_bytes:
        budget -= 1
    return budget


def nothing_fits(leanest: Plan, smallest_bytes: int, budget_bytes: int, margin: float) -> BudgetError:
    """The error for a budget in which nothing fits.

    Args:
        leanest: The plan that needs least.
        smallest_bytes: The smallest budget for it.
        budget_bytes: The budget.
        margin: Share of it that stays free.
    """
    count = leanest.num_recomputed
    modules = f" with {count} module{'s' if count > 1 else ''} recomputed" if count else ""
    free = f", of which {margin:.0%} is kept free" if margin else ""
    # Rounded up, so that who gives the budget that is named has enough.
    needed, more = (format_bytes(b, at_least=True) for b in (smallest_bytes, smallest_bytes - budget_bytes))
    return BudgetError(
        f"No plan fits in {format_bytes(budget_bytes)}: even micro-batches of {leanest.micro_batch_size}{modules} need "
        f"{needed}{free}. Raise the budget by {more}.",
        smallest_bytes,
        budget_bytes,
    )
