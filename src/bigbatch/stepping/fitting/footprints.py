"""What a planned micro-batch takes by its samples and its length: traced at some of them, and exact for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from bigbatch.batch.collating import longest_of
from bigbatch.batch.sizes import part_sizes
from bigbatch.errors import RecomputeError, TraceError
from bigbatch.footprint import Footprint, Moment
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.search import Recompute
from bigbatch.stepping.fitting.planner import UNLIMITED, Planner
from bigbatch.stepping.fitting.shadow import Record
from bigbatch.values import Plan

_FEW, _MORE = 2, 4
"""Samples of the micro-batches that are traced. Of a single one, some operations need no copy."""
_SHORTEST = 1 / 8
"""Of the longest sample: the length of the shortest that is traced, about."""
_OFF = 0.01
"""Share of the traced bytes by which polynomials may be off at a length of which they do not come."""
_MOST_LENGTHS = 512


def planned(
    planner: Planner,
    profile: MemoryProfile,
    batch_size: int,
    budget_bytes: int | None,
    micro_batch_size: int | None = None,
    recompute: Recompute = None,
) -> Plan:
    """What ``Planner.plan`` makes of the profile; for samples with lengths and a budget, with its footprint.

    Without one, where it cannot be found: the batch at hand has not enough lengths, the model cannot be traced, or it
    does other things for other lengths, or FSDP2 spreads it. Then micro-batches are held to ``Plan.max_tokens``.

    Raises:
        BudgetError: See ``Planner.plan``.
    """
    plan = planner.plan(profile, batch_size, budget_bytes, micro_batch_size=micro_batch_size, recompute=recompute)
    has_none = planner.step.options.length is None or planner.pooled is not None or planner.spread.is_sharded
    if has_none or budget_bytes is None:
        return plan
    by_length = _by_length(planner)
    try:
        moments = _moments(planner, plan, batch_size, by_length)
    except (TraceError, RecomputeError):
        return plan
    if moments is None:
        return plan
    # What it needs beside its tensors (workspace of kernels, and the margin) stays free.
    free = budget_bytes - planner.budget_for(plan, profile)
    limit = int((plan.peak_bytes or 0) + max(free, 0) * (1 - planner.margin))
    longest = max(by_length)
    limit = min(limit, _next_larger(moments, plan, batch_size, longest) - 1)
    return replace(plan, footprint=Footprint(_highest(moments, limit, 2 * longest), limit))


def _next_larger(moments: torch.Tensor, plan: Plan, batch_size: int, longest: int) -> int:
    """Bytes of the next larger micro-batch of the longest samples.

    A plan may hold less than it could, because that is faster or was asked for: then that many do not fit either.
    """
    sizes = [size for size in part_sizes(batch_size) if size > plan.micro_batch_size]
    if not sizes:
        return UNLIMITED
    return int((moments @ torch.tensor(_terms(min(sizes), longest), dtype=torch.float64)).max())


def _by_length(planner: Planner) -> dict[int, Any]:
    """A sample of each padded length."""
    options = planner.step.options
    return {longest_of([sample], options): sample for sample in planner.batch}


def _chosen(lengths: Sequence[int]) -> tuple[list[int], int] | None:
    """Three lengths to trace and one to check them at; None when there are none that are far enough apart."""
    lengths = [length for length in lengths if length > 1]
    if len(lengths) < 3 or lengths[0] > lengths[-1] / 2:
        return None
    longest = lengths[-1]
    shortest = _nearest(lengths[:-2], _SHORTEST * longest)
    middle = _nearest([n for n in lengths[:-1] if n > shortest], (shortest + longest) / 2)
    others = [n for n in lengths if n not in (shortest, middle, longest)]
    return [shortest, middle, longest], _nearest(others or [middle], 3 * longest / 4)


def _nearest(lengths: Sequence[int], wanted: float) -> int:
    return min(lengths, key=lambda length: abs(length - wanted))


def _moments(planner: Planner, plan: Plan, batch_size: int, by_length: dict[int, Any]) -> torch.Tensor | None:
    """Coefficients of each moment, shape ``(moments, 6)``; None where steps of other lengths are not alike.

    A step of two equal micro-batches is traced: the second has the gradients of the first beside it.
    """
    chosen = _chosen(sorted(by_length))
    if chosen is None:
        return None
    lengths, check = chosen
    profile = planner.traced

    def alive(samples: int, length: int) -> torch.Tensor:
        record = planner.shadow.run([samples, samples], plan, batch=[by_length[length]])
        return torch.tensor(record.moments, dtype=torch.float64) + _of_batch(record, profile, batch_size)

    sizes = (_FEW, max(_MORE, plan.micro_batch_size))
    points = list(product(sizes, lengths))
    found = [alive(*point) for point in points]
    if len({len(moments) for moments in found}) > 1:
        return None
    # In units of the largest, so that the equations are well conditioned.
    units = torch.tensor(_terms(sizes[1], lengths[-1]), dtype=torch.float64)
    equations = torch.tensor([_terms(*point) for point in points], dtype=torch.float64) / units
    moments = torch.linalg.solve(equations, torch.stack(found)).T / units
    real = alive(_FEW + 1, check).max()
    expected = (moments @ torch.tensor(_terms(_FEW + 1, check), dtype=torch.float64)).max()
    return moments if abs(expected - real) <= _OFF * real else None


def _terms(samples: int, length: int) -> list[float]:
    """What the coefficients of a ``Moment`` belong to."""
    return [1.0, length, length**2, samples, samples * length, samples * length**2]


def _of_batch(record: Record, profile: MemoryProfile, batch_size: int) -> float:
    """Bytes of the batch beside those that were traced: all of it is there, or two micro-batches are."""
    return profile.batch.at(batch_size) - record.micro_batch_bytes if profile.batch_is_whole else 0.0


def _highest(moments: torch.Tensor, limit_bytes: int, longest: int) -> tuple[Moment, ...]:
    """Those of the moments that let fewest samples be, for some length up to the longest."""
    moments = moments.unique(dim=0)
    kept: dict[int, None] = {}
    for length in range(1, longest + 1, -(-longest // _MOST_LENGTHS)):
        powers = torch.tensor([1.0, length, length**2], dtype=torch.float64)
        fixed, each = moments[:, :3] @ powers, moments[:, 3:] @ powers
        left = limit_bytes - fixed
        # Half a byte for each sample is rounding.
        most = torch.where(each > 0.5, left / each, torch.where(left < 0, -torch.inf, torch.inf))
        kept[int(most.argmin())] = None
    return tuple(_rounded(moments[index].tolist()) for index in kept)


def _rounded(coefficients: list[float]) -> Any:
    return tuple(round(number, 6) + 0.0 for number in coefficients)  # no -0.0
