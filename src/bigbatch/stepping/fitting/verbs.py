"""The public verbs of the planner: ``profile`` says what a model costs, ``plan`` what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bigbatch.errors import ArgumentError, BudgetError, OptionError, TraceError, warn
from bigbatch.memory.naming import unwrapped
from bigbatch.planning.advice import with_advice
from bigbatch.planning.cards import Card, find_card
from bigbatch.planning.costs import Line, MemoryProfile, Slot
from bigbatch.planning.search import Recompute, search
from bigbatch.planning.sharding_costs import with_buckets
from bigbatch.planning.space import names_held
from bigbatch.stepping.checks import check_model, update_is_lean
from bigbatch.stepping.fitting import sizing
from bigbatch.stepping.fitting.footprints import planned
from bigbatch.stepping.fitting.merged_offer import offer_of_merging
from bigbatch.stepping.fitting.planner import UNLIMITED, Planner
from bigbatch.stepping.fitting.shards import Sharding
from bigbatch.stepping.step import Step
from bigbatch.units import parse_bytes
from bigbatch.values import Plan, check_positive

_MOST_TIMED = 32


def profile(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    optimizer: Any = None,
    calibrate: bool = True,
    device: str | None = None,
    card: str | Card | None = None,
    **options: Any,
) -> MemoryProfile:
    """What a step costs in bytes and seconds, for any micro-batch size and any choice of recomputed modules.

    The real ``Step`` runs on a copy of the model that has shapes and no numbers, so memory is counted to the byte and
    none is needed: a model on the ``meta`` device goes too. Where the model can run, small micro-batches are timed;
    otherwise time is estimated from operations and bytes. The state of model and optimizer is bit for bit as before.

    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> batch = torch.randn(8, 64), torch.randint(10, (8,))
    >>> loss_fn = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
    >>> found = profile(model, loss_fn, batch, optimizer=torch.optim.AdamW(model.parameters()), calibrate=False)
    >>> found.parameter_bytes, found.optimizer_bytes
    (76840, 153696)

    Args:
        model: On any device.
        loss_fn: Called as ``loss_fn(model, micro_batch)``; see ``accumulate``.
        batch: An example of what a step gets; one sample is enough, for samples are repeated where more are needed.
        optimizer: One or several; None: no optimizer is counted.
        calibrate: Time micro-batches, where the model can run.
        device: "cpu" or "cuda": where it will run; None: where the model is.
        card: What to estimate times for: a name such as ``"rtx4090"``, or a ``Card``.
        options: See ``StepOptions``; the same that the step will have.

    Raises:
        TraceError: The model cannot run without numbers (its memory depends on them, or it calls what fake tensors
            do not know), and it has none to run with. Where it has, real tensors are measured instead:
            ``MemoryProfile.fallback`` says why.
    """
    planner = _planner(model, loss_fn, batch, optimizer, device, card, options)
    try:
        found = planner.timed(_MOST_TIMED, None) if calibrate else planner.traced
    except TraceError as error:
        if not planner.can_run:
            raise
        found = _measured(planner, str(error))
    return found


def plan(
    profile_or_model: MemoryProfile | nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    *,
    optimizer: Any = None,
    batch_size: int | None = None,
    memory_budget: int | str | None = None,
    world_size: int | None = None,
    sharding: Sharding | None = None,
    micro_batch_size: int | None = None,
    recompute: Recompute = None,
    calibrate: bool = True,
    device: str | None = None,
    card: str | Card | None = None,
    **options: Any,
) -> Plan:
    """The fastest way to run steps of ``batch_size`` samples within a memory budget.

    Micro-batch size and recomputed modules are chosen together, for the least seconds of a step whose peak is within
    the budget less a margin of 1 %. Given a model, the peak of the plan is traced and exact; given a profile, it is
    read from the profile. With FSDP2 it is computed from the trace of the whole model, with a margin of 3 %.

    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> batch = torch.randn(8, 64), torch.randint(10, (8,))
    >>> loss_fn = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
    >>> costs = profile(model, loss_fn, batch, calibrate=False)
    >>> found = plan(costs, batch_size=4096, memory_budget="4MiB")
    >>> found.peak_bytes <= 4 * 2**20 < plan(costs, batch_size=4096).peak_bytes
    True

    Args:
        profile_or_model: What ``profile`` found; or a model, with the arguments of ``profile`` after it.
        loss_fn: With a model; see ``profile``.
        batch: With a model; see ``profile``.
        optimizer: With a model; see ``profile``.
        batch_size: Samples in a step, over all ranks; None: those of ``batch``.
        world_size: Ranks that share a batch; None: those that the model is wrapped for, else 1. The plan is that of the
            rank with the largest share, with what it holds to sum gradients.
        sharding: How a model that is not wrapped will be: ``"ddp"`` (default for several ranks), or ``"fsdp2"``, as
            ``bigbatch train`` wraps it: the blocks of its lists, and the model. Then ``Plan.reduce`` is chosen too.
        memory_budget: Bytes, or a text such as ``"8GiB"``; None: unlimited.
        micro_batch_size: Held at this; None to choose it.
        recompute: Held at this: ``"all"`` blocks, each alone, ``"none"``, or names as in ``Plan.recompute``; None to
            choose.
        calibrate: With a model; see ``profile``.
        device: With a model; see ``profile``.
        card: With a model; see ``profile``.
        options: With a model; see ``StepOptions``.

    Raises:
        BudgetError: Nothing fits; ``smallest_bytes`` is the smallest budget that works.
        OptionError: The model is sharded in a way whose bytes are not known, or for other ranks than ``world_size``.
        TraceError: See ``profile``.
    """
    for name, number in (("world_size", world_size), ("batch_size", batch_size)):
        if number is not None:
            check_positive(name, number)
    budget_bytes = None if memory_budget is None else parse_bytes(memory_budget)
    held = {"micro_batch_size": micro_batch_size, "recompute": recompute}
    if isinstance(profile_or_model, MemoryProfile):
        of_a_model = (loss_fn, batch, optimizer, device, card)
        if batch_size is None or any(given is not None for given in of_a_model) or options:
            raise ArgumentError(
                "A plan from a profile takes what to plan for, and the profile knows the rest: "
                'bb.plan(profile, batch_size=64, memory_budget="8GiB").'
            )
        return _from_profile(profile_or_model, batch_size, world_size or 1, sharding, budget_bytes, held)
    ranks = {"num_ranks": world_size, "sharding": sharding}
    blocks = _names_in(recompute)
    planner = _planner(profile_or_model, loss_fn, batch, optimizer, device, card, options, blocks=blocks, **ranks)
    # An example is of the whole batch, unless the model is wrapped: then it is of this rank.
    num_samples = (
        -(-batch_size // planner.spread.num_ranks) if batch_size else -(-planner.num_samples // (world_size or 1))
    )
    try:
        costs = planner.timed(num_samples, budget_bytes) if calibrate else planner.traced
        return planned(planner, costs, num_samples, budget_bytes, **held)
    except BudgetError as error:
        offers = offer_of_merging(planner, num_samples, budget_bytes, micro_batch_size, recompute)
        raise with_advice(error, planner.traced, num_samples, offers) from None
    except TraceError as error:
        if not planner.can_run:
            raise
        warn(f"The plan is found by trying, because the model cannot be traced: {error}")
        return planner.by_trying(num_samples, budget_bytes, micro_batch_size, recompute)


def _from_profile(
    profile: MemoryProfile,
    batch_size: int,
    world_size: int,
    sharding: Sharding | None,
    budget_bytes: int | None,
    held: dict[str, Any],
) -> Plan:
    if sharding == "fsdp2":
        raise ArgumentError(
            "A profile does not know which parameters are in which module, which a plan with FSDP2 needs. Plan from "
            'the model: bb.plan(model, loss_fn, batch, optimizer=optimizer, sharding="fsdp2", world_size=4, ...).'
        )
    num_samples = -(-batch_size // world_size)
    if world_size > 1:
        profile = with_buckets(profile)
    if profile.whole_batch:
        held = {**held, "micro_batch_size": _only_size(held["micro_batch_size"], num_samples)}
    try:
        found = search(profile, batch_size=num_samples, budget_bytes=budget_bytes or UNLIMITED, **held)
    except BudgetError as error:
        raise with_advice(error, profile, num_samples) from None
    return replace(found, budget_bytes=budget_bytes)


def _only_size(micro_batch_size: int | None, batch_size: int) -> int:
    if micro_batch_size is not None and micro_batch_size < batch_size:
        raise OptionError(
            f'The profile is of a step with batch_norm="exact", whose micro-batches of {micro_batch_size} would run '
            f"side by side; what that needs is found by tracing it. Plan from the model: bb.plan(model, loss_fn, ...)."
        )
    return batch_size


def _names_in(recompute: Recompute) -> list[str]:
    """The modules that are held, of which it must be known what recomputing them costs."""
    return [name for entry in names_held(recompute) for name in ([entry] if isinstance(entry, str) else entry)]


def _planner(
    model: Any,
    loss_fn: Any,
    batch: Any,
    optimizer: Any,
    device: str | None,
    card: Any,
    options: dict[str, Any],
    **more: Any,
) -> Planner:
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f'device={device!r}; it is "cpu", "cuda", or None for where the model is.')
    if batch is None:
        raise ArgumentError(
            "A plan for a model needs its loss and an example of its batch: "
            'bb.plan(model, loss_fn, batch, optimizer=optimizer, batch_size=64, memory_budget="8GiB").'
        )
    check_model(model)
    # One without state and temporaries stands for "no optimizer".
    optimizer = optimizer if optimizer is not None else torch.optim.SGD(model.parameters(), lr=0.0)
    found = find_card(card) if isinstance(card, str) else card
    return Planner(Step(model, loss_fn, optimizer, **options), batch, device=device, card=found, **more)


def _measured(planner: Planner, why: str) -> MemoryProfile:
    """A profile from steps of real tensors: without blocks, so that only micro-batch sizes can be chosen."""
    step, smallest = planner.step, planner.step.accumulator.smallest_micro_batch
    sizes = (smallest, 2 * smallest)
    parameters = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in step.model.parameters()}
    of_batch = planner.bytes_of_batch
    first, later = [], []
    for size in sizes:
        alone, two = planner.batch_of(size), planner.batch_of(2 * size)
        first.append(sizing.measure(step, alone, None) - of_batch.at(size))
        later.append(sizing.measure(step, two, size) - of_batch.at(2 * size))
    gradients = sum(p.nbytes for p in step.named_parameters().values())
    resident = sum(parameters.values())
    slot = Slot(
        None,
        backward=Line.through((sizes[0], later[0] - gradients - resident), (sizes[1], later[1] - gradients - resident)),
        backward_first=Line.through((sizes[0], first[0] - resident), (sizes[1], first[1] - resident)),
    )
    return MemoryProfile(
        parameter_bytes=resident,
        gradient_bytes=gradients,
        update_bytes=max(0, int(later[0]) - gradients - resident),
        batch=of_batch,
        slots=(slot,),
        smallest_micro_batch=smallest,
        whole_batch=planner.pooled is not None,
        device=planner.device,
        fallback=why,
        model=type(unwrapped(step.model)).__name__,
        update_is_lean=update_is_lean(step.optimizers),
        optimizer=" + ".join(type(optimizer).__name__ for optimizer in step.optimizers),
        warnings=("Optimizer state and buffers are in the peaks of the slot; they were not told apart.",),
    )
