"""What a plan cannot do: what else would help when nothing fits, and when accumulation is the wrong tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from bigbatch.batch.sizes import micro_batch_sizes, part_sizes
from bigbatch.errors import BudgetError
from bigbatch.planning.costs import Line, MemoryProfile, Slot
from bigbatch.planning.grouping import leanest
from bigbatch.planning.search import MARGIN
from bigbatch.planning.seconds import micro_seconds
from bigbatch.planning.simulate import Simulation
from bigbatch.units import format_bytes
from bigbatch.values import Plan

FEW_SAMPLES = 16
"""Below so many samples the statistics of BatchNorm are noise: "Group Normalization", arXiv:1803.08494, figure 1."""

MUCH_SLOWER = 1.5
"""A micro-batch of one or two samples is worth a word from so many times the time per sample of the best size on."""

_OF_STATE_IN_8_BITS = 0.25
_OF_BLOCKS_TRAINED = 0.25
# Half of what matrix products save; the residual stream, norms and losses stay in float32.
_OF_SAVED_UNDER_AUTOCAST = 2 / 3


@dataclass(frozen=True)
class Relief:
    """Something beside micro-batches and recompute that needs less memory.

    Attributes:
        name: What it is.
        saved_bytes: By how much the smallest peak of all plans falls, about.
        smallest_bytes: The smallest peak of all plans with it, workspace included.
        fits: Whether that is within the budget, with the share of it that a plan leaves free.
        how: What to write, and what it changes.
    """

    name: str
    saved_bytes: int
    smallest_bytes: int
    fits: bool
    how: str

    def __str__(self) -> str:
        enough = "and that is enough" if self.fits else f"down to {format_bytes(self.smallest_bytes)}"
        return f"{self.name} saves about {format_bytes(self.saved_bytes)}, {enough}: {self.how}"


def what_else(profile: MemoryProfile, *, batch_size: int, budget_bytes: int) -> tuple[Relief, ...]:
    """What else would help where no plan fits, the most helpful first; what saves nothing is left out.

    Each is held against the smallest peak of all plans, where it counts: half the saved bytes save nothing when the
    optimizer's update is what needs the most. The bytes are estimates from the profile, nothing is run for them.

    Args:
        profile: What the model costs.
        batch_size: Samples in a step.
        budget_bytes: The memory there is.
    """
    now = smallest_bytes(profile, batch_size)
    found = []
    for name, changed, how in _reliefs(profile):
        smallest = smallest_bytes(changed, batch_size)
        if smallest < now:
            found.append(Relief(name, now - smallest, smallest, smallest <= budget_bytes * (1 - MARGIN), how))
    return tuple(sorted(found, key=lambda relief: relief.smallest_bytes))


def with_advice(
    error: BudgetError, profile: MemoryProfile, batch_size: int, offers: tuple[str, ...] = ()
) -> BudgetError:
    """The error with what else would help, in its text and in its ``what_else``.

    Args:
        offers: Sentences that go before the others: what only the caller can know, such as another ``batch_norm`` that
            fits.
    """
    if error.budget_bytes is None or error.what_else:
        return error
    found = offers + tuple(map(str, what_else(profile, batch_size=batch_size, budget_bytes=error.budget_bytes)))
    first = "What else would help, each by itself:" if found else "Nothing else that is known here would help."
    text = "\n  ".join([f"{error}\n{first}", *found])
    return BudgetError(text, error.smallest_bytes, error.budget_bytes, found)


def smallest_bytes(profile: MemoryProfile, batch_size: int) -> int:
    """The smallest peak that any cut and any recompute gives a batch, workspace included."""
    smallest = profile.smallest_micro_batch
    peaks = []
    # In between, a larger micro-batch needs more; the whole batch does not keep gradients beside a second forward.
    parts = [] if profile.whole_batch else part_sizes(batch_size, smallest)
    for size in {min([*parts, batch_size]), batch_size}:
        simulation = Simulation(profile, micro_batch_sizes(batch_size, size, smallest))
        peaks.append(simulation.peak_of(leanest(simulation) or ()) + simulation.workspace_bytes)
    return min(peaks)


def _reliefs(profile: MemoryProfile) -> Iterator[tuple[str, MemoryProfile, str]]:
    """Name, the profile as it would be, and what to do."""
    yield (
        "bf16 autocast",
        # Autocast makes a copy of each weight in 16 bits, and keeps it until the backward.
        dataclasses.replace(
            _with_activations(profile, _OF_SAVED_UNDER_AUTOCAST),
            other_bytes=profile.other_bytes + profile.parameter_bytes // 2,
        ),
        'precision="bf16". What products save takes half the bytes, and weights are copied in 16 bits.',
    )
    half = _with_activations(profile, 0.5)
    batch = Line(profile.batch.fixed, profile.batch.per_sample * 0.5)
    yield (
        "Half the tokens (or pixels) of a sample",
        dataclasses.replace(half, batch=batch),
        "what is saved grows with them; what attention saves without a flash kernel grows with their square.",
    )
    state = profile.optimizer_bytes
    yield (
        "An 8-bit optimizer",
        dataclasses.replace(profile, optimizer_bytes=round(state * _OF_STATE_IN_8_BITS)),
        "for example AdamW8bit of torchao or bitsandbytes: a quarter of the state, and other rounding.",
    )
    yield (
        "SGD without momentum",
        # What the update needs beside it is what the next one speaks of.
        dataclasses.replace(profile, optimizer_bytes=0),
        "no optimizer state at all, but another training: learning rates do not carry over.",
    )
    # Measured peaks without a trace do not tell the update apart.
    if not profile.update_is_lean and profile.fallback is None:
        yield (
            "A fused optimizer",
            dataclasses.replace(profile, update_bytes=0),
            "fused=True (or foreach=False): the update makes no copies of all gradients and parameters at once.",
        )
    blocks = [slot.name for slot in profile.slots if slot.name is not None]
    trained = max(1, round(len(blocks) * _OF_BLOCKS_TRAINED))
    if len(blocks) > trained:
        yield (
            f"Training only the last {trained} of {len(blocks)} blocks",
            _frozen_below(profile, blocks[-trained]),
            "requires_grad_(False) on all before them: these save nothing, and have no gradients and optimizer state.",
        )


def _with_activations(profile: MemoryProfile, factor: float) -> MemoryProfile:
    """As if everything that grows with the samples took this share; weights, gradients and state as they are."""

    def grown(line: Line) -> Line:
        return Line(line.fixed, line.per_sample * factor)

    names = [spec.name for spec in dataclasses.fields(Slot) if isinstance(spec.default, Line)]
    counted = [name for name in names if not name.endswith("_seconds")]
    slots = [
        dataclasses.replace(slot, **{name: grown(getattr(slot, name)) for name in counted}) for slot in profile.slots
    ]
    return dataclasses.replace(profile, storages=tuple(map(grown, profile.storages)), slots=tuple(slots))


def _frozen_below(profile: MemoryProfile, name: str) -> MemoryProfile:
    """As if nothing before this block was trained: it runs forward, saves nothing, and has no backward."""
    first = next(position for position, slot in enumerate(profile.slots) if slot.name == name)
    nothing = {"saved": (), "inputs": (), "recompute": Line(), "may_recompute": False, "follows": False, "parts": ()}
    nothing |= dict.fromkeys(("backward", "backward_first", "pending", "pending_first"), Line())
    slots = [dataclasses.replace(slot, **nothing) for slot in profile.slots[:first]]
    # A first backward down to this block has brought the gradients of all that is trained into being.
    born = profile.slots[first].backward_first.fixed - profile.slots[first].backward.fixed
    share = max(0.0, min(1.0, born / profile.gradient_bytes)) if profile.gradient_bytes else 1.0
    return dataclasses.replace(
        profile,
        slots=(*slots, *profile.slots[first:]),
        gradient_bytes=round(profile.gradient_bytes * share),
        optimizer_bytes=round(profile.optimizer_bytes * share),
        update_bytes=round(profile.update_bytes * share),
    )


def wrong_tool(profile: MemoryProfile, *, batch_size: int, budget_bytes: int, plan: Plan) -> tuple[str, ...]:
    """When accumulation is not what helps, in sentences; none when it is the right tool.

    Args:
        profile: What the model costs.
        batch_size: Samples in a step.
        budget_bytes: The memory there is.
        plan: The plan for them.
    """
    advice = (_fits_anyway(profile, batch_size, budget_bytes, plan), _few_samples(profile, batch_size, plan))
    return tuple(text for text in (*advice, _below_the_knee(profile, batch_size, plan)) if text)


def _fits_anyway(profile: MemoryProfile, batch_size: int, budget_bytes: int, plan: Plan) -> str | None:
    direct = Simulation(profile, [batch_size])
    needed = direct.peak_of(()) + direct.workspace_bytes
    if needed > budget_bytes * (1 - MARGIN):
        return None
    fits = f"The batch of {batch_size} fits as it is: it needs {format_bytes(needed)} of {format_bytes(budget_bytes)}"
    if plan.micro_batch_size >= batch_size:
        return f"{fits}. Nothing has to be cut or recomputed."
    if plan.step_seconds is not None and plan.step_seconds < direct.plain_seconds:
        faster = direct.plain_seconds / plan.step_seconds
        return f"{fits}; micro-batches of {plan.micro_batch_size} are only {faster:.2f} x as fast."
    return f"{fits}. Micro-batches of {plan.micro_batch_size} are not needed for memory."


def _few_samples(profile: MemoryProfile, batch_size: int, plan: Plan) -> str | None:
    # Only a layer that uses statistics of the batch cannot do with one sample.
    if profile.smallest_micro_batch < 2 or not plan.micro_batch_size < min(FEW_SAMPLES, batch_size):
        return None
    return (
        f"BatchNorm normalizes each micro-batch by the statistics of its {plan.micro_batch_size} samples, not of the "
        f"{batch_size} of the batch; below {FEW_SAMPLES} they are noisy, and the model trains worse. Give "
        f'batch_norm="exact", take GroupNorm, freeze the statistics (batch_norm="frozen"), or, on several cards, take '
        f"SyncBatchNorm."
    )


def _below_the_knee(profile: MemoryProfile, batch_size: int, plan: Plan) -> str | None:
    if plan.micro_batch_size > 2 or not profile.micro_seconds or plan.micro_batch_size >= batch_size:
        return None
    sizes = [size for size, _ in profile.micro_seconds if plan.micro_batch_size < size <= batch_size]
    per_sample = {size: micro_seconds(profile, size) / size for size in [plan.micro_batch_size, *sizes]}
    best = min(per_sample, key=lambda size: per_sample[size])
    times = per_sample[plan.micro_batch_size] / per_sample[best]
    if times < MUCH_SLOWER:
        return None
    return (
        f"A sample takes {times:.1f} x as long in micro-batches of {plan.micro_batch_size} as in those of {best}. More "
        f"than accumulation, what makes room helps here: bf16, an 8-bit optimizer, shorter samples, a larger card."
    )
