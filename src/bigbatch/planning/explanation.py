"""A plan explains itself: what the direct big batch needs, what each lever saves and costs, what limits now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.planning.chain import WHOLE, Segment
from bigbatch.planning.costs import MemoryProfile, Slot
from bigbatch.planning.naming import segments_of
from bigbatch.planning.search import neighbours
from bigbatch.planning.simulate import Simulation
from bigbatch.units import format_bytes
from bigbatch.values import Plan

Limit = Literal["resident", "inputs", "saved", "gathered", "work", "update"]


@dataclass(frozen=True)
class Block:
    """What one block holds for backward, in the largest micro-batch.

    Attributes:
        name: In ``named_modules``; "" for all that runs between blocks.
        kind: Its class.
        saved_bytes: What it holds when nothing is recomputed; what blocks share is counted at the first of them.
        held_bytes: What it holds under the plan. A group holds its inputs at its first block.
        recomputed: Whether the plan recomputes it, or modules inside of it.
        recompute_seconds: What that adds to a step.
        parts: The modules inside of it that the plan recomputes; empty where it is kept or recomputed as a whole.
    """

    name: str
    kind: str
    saved_bytes: int
    held_bytes: int
    recomputed: bool
    recompute_seconds: float
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lever:
    """One thing that a plan does. The levers of a plan add up to what it saves against the direct big batch.

    Attributes:
        name: "micro-batches", "gradients kept between them" or "recompute".
        saved_bytes: By how much it lowers the peak; less than zero where it raises it.
        added_seconds: What it adds to a step; less than zero where it is faster.
    """

    name: str
    saved_bytes: int
    added_seconds: float


@dataclass(frozen=True)
class Explanation:
    """Where the bytes of a plan are, and why; for JSON there is ``dataclasses.asdict``.

    Attributes:
        direct_bytes: Peak of the batch in one piece, with nothing recomputed.
        direct_of_budget: The same as a multiple of the budget.
        direct_seconds: How long its step would take.
        peak_bytes: Peak of the plan, as simulated from the profile.
        workspace_bytes: What kernels need beyond it, only while they run.
        step_seconds: How long its step takes.
        budget_bytes: What it was planned for.
        headroom_bytes: Budget minus workspace and the peak that the plan states, or the simulated one where it states
            none.
        kinds: Bytes at the peak by kind: parameters, gradients, optimizer, buffers, averages, other, inputs, saved,
            work (alive for a moment). Of several ranks also buckets (to sum gradients), gathered (parameters that FSDP2
            has whole), and unsharded gradients in place of gradients, where it keeps those of the whole model for the
            last micro-batch. They add up to ``peak_bytes``.
        blocks: By block, in the order of the forward; what runs between them comes last.
        levers: What each did, in the order in which they were taken.
        limit: The largest of what makes the peak.
        limit_text: The same as a sentence, with its bytes.
        leaner: The fastest plan that needs a little less memory; None when there is none.
        faster: A plan that is faster and needs little more memory; None when there is none.
    """

    direct_bytes: int
    direct_of_budget: float
    direct_seconds: float
    peak_bytes: int
    workspace_bytes: int
    step_seconds: float
    budget_bytes: int
    headroom_bytes: int
    kinds: dict[str, int]
    blocks: tuple[Block, ...]
    levers: tuple[Lever, ...]
    limit: Limit
    limit_text: str
    leaner: Plan | None
    faster: Plan | None


def explain(
    profile: MemoryProfile, plan: Plan, *, batch_size: int, budget_bytes: int, others: Sequence[Plan] | None = None
) -> Explanation:
    """What a plan does to a batch of this size, in bytes and seconds.

    Args:
        profile: What the model costs.
        plan: Found by the search, or written by hand. Its ``offload`` is not simulated: what it moves is counted
            on the device.
        batch_size: Samples in a step.
        budget_bytes: The memory there is.
        others: Plans to find the next leaner and faster ones in; by default they are searched for.

    Raises:
        OptionError: The plan recomputes what the profile has no block for.
    """
    sizes = micro_batch_sizes(batch_size, plan.micro_batch_size, profile.smallest_micro_batch)
    direct, simulation = Simulation(profile, [batch_size]), Simulation(profile, sizes)
    segments = segments_of(simulation.chain, plan.recompute, plan.keep)
    moment = _highest(profile, simulation, segments)
    kinds = _kinds(profile, simulation, moment)
    limit, limit_text = _limit(profile, moment, kinds)
    direct_bytes, peak = direct.peak_of(()), simulation.peak_of(segments)
    stated = peak if plan.peak_bytes is None else plan.peak_bytes
    seconds = simulation.step_seconds_of(segments)
    if others is None:
        needed = stated + simulation.workspace_bytes
        leaner, faster = neighbours(profile, batch_size=batch_size, needed_bytes=needed, seconds=seconds)
    else:
        leaner, faster = _between(stated, seconds, others)
    return Explanation(
        direct_bytes=direct_bytes,
        direct_of_budget=direct_bytes / budget_bytes,
        direct_seconds=direct.plain_seconds,
        peak_bytes=peak,
        workspace_bytes=simulation.workspace_bytes,
        step_seconds=seconds,
        budget_bytes=budget_bytes,
        headroom_bytes=budget_bytes - simulation.workspace_bytes - stated,
        kinds=kinds,
        blocks=_blocks(profile, simulation, segments),
        levers=_levers(profile, direct, simulation, segments),
        limit=limit,
        limit_text=limit_text,
        leaner=leaner,
        faster=faster,
    )


class _Moment(NamedTuple):
    """What is alive beyond what is resident, at a moment that may be the peak. ``slots`` is None in the update."""

    slots: tuple[int, int] | None
    saved: int
    gradients: int
    work: int

    @property
    def total(self) -> int:
        return self.saved + self.gradients + self.work


def _highest(profile: MemoryProfile, simulation: Simulation, segments: Sequence[Segment]) -> _Moment:
    """The moment of the peak."""
    gradients = profile.gradient_bytes
    found = [_Moment(None, 0, gradients, simulation.update_bytes - gradients)]
    first, later = simulation.sizes[0], max(simulation.sizes[1:], default=0)
    phase = simulation.phase(first, is_first=True, is_later=False)
    moves = list(phase.walk(segments))
    if simulation.loss_beside_first:
        _, held, move = moves[-1]
        found.append(_Moment(None, held + move.gain, 0, simulation.loss_beside_first))
    for slot, held, move in moves:
        born = _gradients_so_far(profile, profile.slots[move.last], first, move.need - move.gain)
        found.append(_Moment((slot, move.last), held + move.gain, born, move.need - move.gain - born))
    if later:
        phase = simulation.phase(later, is_first=False, is_later=True)
        for slot, held, move in phase.walk(segments):
            found.append(_Moment((slot, move.last), held + move.gain, gradients, move.need - move.gain - gradients))
    return max(found, key=lambda moment: moment.total)


def _gradients_so_far(profile: MemoryProfile, slot: Slot, num_samples: int, most: int) -> int:
    """Gradients among the bytes of a backward in a first micro-batch: what a later one does not need beside its own."""
    if most <= slot.forward.at(num_samples):
        return 0
    born = round(slot.backward_first.at(num_samples) - slot.backward.at(num_samples))
    return max(0, min(born, profile.gradient_bytes, most))


def _kinds(profile: MemoryProfile, simulation: Simulation, moment: _Moment) -> dict[str, int]:
    whole = profile.whole_gradients and moment.slots is not None
    gathered, sent = _of_ranks(profile, simulation, moment)
    of_ranks = {
        "unsharded gradients": moment.gradients if whole else 0,
        "buckets": profile.bucket_bytes + sent,
        "gathered": gathered,
    }
    return {
        "parameters": profile.parameter_bytes,
        "gradients": 0 if whole else moment.gradients,
        "optimizer": profile.optimizer_bytes,
        "buffers": profile.buffer_bytes,
        "averages": profile.average_bytes,
        "other": profile.other_bytes + simulation.outputs_bytes,
        "inputs": simulation.fixed_bytes - simulation.outputs_bytes - profile.resident_bytes,
        "saved": moment.saved,
        "work": moment.work - gathered - sent,
        **{kind: num_bytes for kind, num_bytes in of_ranks.items() if num_bytes},
    }


def _of_ranks(profile: MemoryProfile, simulation: Simulation, moment: _Moment) -> tuple[int, int]:
    """What of the work is parameters that FSDP2 has whole, and gradients that it sends."""
    if moment.slots is None or not profile.gathered:
        return 0, 0
    last = moment.slots[1]
    found = profile.gathered[last]
    if moment.work <= profile.slots[last].forward.at(max(simulation.sizes)):
        return min(found.forward_bytes, moment.work), 0
    gathered = min(found.backward_bytes, moment.work)
    return gathered, min(found.sent_bytes, moment.work - gathered)


def _limit(profile: MemoryProfile, moment: _Moment, kinds: dict[str, int]) -> tuple[Limit, str]:
    """The largest part of the peak, and a sentence about it."""
    whole = format_bytes(sum(kinds.values()))
    resident = profile.resident_bytes + moment.gradients
    parts: dict[Limit, int] = {
        "resident": resident,
        "inputs": kinds["inputs"],
        "saved": moment.saved,
        "gathered": kinds.get("gathered", 0),
        "work" if moment.slots else "update": kinds["work"],
    }
    limit = max(parts, key=lambda part: parts[part])
    largest = format_bytes(parts[limit])
    or_the_loss = ", or the loss of the whole batch," if profile.loss_bytes else ""
    sentences: dict[Limit, str] = {
        "resident": f"Parameters, gradients, optimizer state and buffers are {largest} of {whole}; neither smaller "
        "micro-batches nor recompute make them less.",
        "inputs": f"The batch itself is {largest} of {whole}; hand over micro-batches that are made when they are "
        "needed (bb.LogicalBatch, or collate=).",
        "saved": f"What the forward keeps for backward is {largest} of {whole}, at {_place(profile, moment)}.",
        "gathered": f"Parameters that FSDP2 has whole for a moment are {largest} of {whole}, at "
        f"{_place(profile, moment)}; shard smaller modules by themselves.",
        "work": f"One part of the model alone needs {largest} of {whole} for a moment: {_place(profile, moment)}.",
        "update": f"The optimizer's update{or_the_loss} needs {largest} of {whole} for a moment.",
    }
    return limit, sentences[limit]


def _place(profile: MemoryProfile, moment: _Moment) -> str:
    first, last = moment.slots or (0, len(profile.slots) - 1)
    names = [slot.name for slot in profile.slots[first : last + 1] if slot.name is not None]
    if names:
        return repr(names[0]) if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"
    before = next((slot.name for slot in reversed(profile.slots[:first]) if slot.name is not None), None)
    return "what comes before the first block" if before is None else f"what comes after {before!r}"


def _blocks(profile: MemoryProfile, simulation: Simulation, segments: Sequence[Segment]) -> tuple[Block, ...]:
    phase = simulation.phase(max(simulation.sizes), is_first=True, is_later=False)
    saved = {slot: move.gain for slot, _, move in phase.walk(())}
    held = {slot: move.gain for slot, _, move in phase.walk(segments)}
    seconds = dict(_seconds_by_slot(simulation, segments))
    chosen = {first: profile.slots[first].parts[part] for first, _, part in segments if part != WHOLE}
    parts = {first: (f"all but {part.keep}",) if part.keep else part.names for first, part in chosen.items()}
    found: dict[str, Block] = {}
    for position, slot in enumerate(profile.slots):
        name = slot.name or ""
        before = found.get(name, Block(name, slot.kind, 0, 0, recomputed=False, recompute_seconds=0.0))
        found[name] = Block(
            name,
            slot.kind,
            before.saved_bytes + saved[position],
            before.held_bytes + held.get(position, 0),
            recomputed=before.recomputed or (position in seconds and slot.name is not None),
            recompute_seconds=before.recompute_seconds + seconds.get(position, 0.0),
            parts=parts.get(position, ()),
        )
    between = found.pop("", None)
    return (*found.values(), *([between] if between else []))


def _seconds_by_slot(simulation: Simulation, segments: Sequence[Segment]) -> Iterator[tuple[int, float]]:
    """What each slot of a segment adds to a step: the last one stops at its last save, those before it run through."""
    for first, last, part in segments:
        for slot in range(first, last):
            yield slot, simulation.seconds_of(slot, last) - simulation.seconds_of(slot + 1, last)
        yield last, simulation.seconds_of(last, last, part)


def _levers(
    profile: MemoryProfile, direct: Simulation, simulation: Simulation, segments: Sequence[Segment]
) -> tuple[Lever, ...]:
    levers = []
    if len(simulation.sizes) > 1:
        # As if each micro-batch were the first one: without the gradients of those before it.
        phase = simulation.phase(max(simulation.sizes), is_first=True, is_later=False)
        alone = simulation.fixed_bytes + max(simulation.update_bytes, phase.peak(()))
        added = simulation.plain_seconds - direct.plain_seconds
        levers.append(Lever("micro-batches", direct.peak_of(()) - alone, added))
        levers.append(Lever("gradients kept between them", alone - simulation.peak_of(()), 0.0))
    if segments:
        saved = simulation.peak_of(()) - simulation.peak_of(segments)
        levers.append(Lever("recompute", saved, simulation.step_seconds_of(segments) - simulation.plain_seconds))
    return tuple(levers)


def _between(peak: int, seconds: float, plans: Sequence[Plan]) -> tuple[Plan | None, Plan | None]:
    """The plans on both sides of this one, by their peaks."""
    known = [(plan.peak_bytes, plan.step_seconds, plan) for plan in plans]
    below = [(bytes_, plan) for bytes_, _, plan in known if bytes_ is not None and bytes_ < peak]
    above = [(b, plan) for b, s, plan in known if b is not None and s is not None and b > peak and s < seconds]
    leaner = max(below, key=lambda found: found[0], default=(0, None))[1]
    return leaner, min(above, key=lambda found: found[0], default=(0, None))[1]
