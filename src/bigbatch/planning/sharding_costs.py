r"""What a model costs on one of several ranks: with the buckets of DDP, or with its weights spread by FSDP2.

FSDP2 keeps a shard of every parameter and gathers whole *units* (a wrapped module, or what is left with the model as a
whole, the *root*) when they run. This is how torch 2.11 to 2.13 does it, for units $1..n$ in the order of the forward,
with $P_i$ the padded bytes of the parameters of a unit, and $R_i$ those of its gradients as they are sent:

- The root is whole from the beginning of a forward to the end of its backward: $P_0$.
- In the forward a unit is whole, and what was received for it stays until the next one is whole: $P_0 + 2 P_i$; and
  when the next one comes, $P_0 + P_i + P_{i+1}$.
- In the backward the unit before it is being received already: $P_0 + P_i + P_{i-1}$; and what was sent for the unit
  after it stays until this one is sent: $R_{i+1}$.
- The gradients of a unit are whole until they are sent. With ``reduce="after"`` they are sent in the last micro-batch,
  so those of all units stay until then; with ``"each"`` those of one unit and of the root.

Where two of these follow one another in a unit, the larger is counted for all of it; so a plan says a little more than
is needed where units differ, or where the loss is computed outside of the model, after the last unit has gone.

So all that changes from a profile of the whole model are bytes that are added to its slots, and what is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from bigbatch.errors import OptionError
from bigbatch.planning.costs import Gathered, Line, MemoryProfile, Slot
from bigbatch.units import format_names

When = Literal["after", "each"]
"""How often gradients are summed: once a step, or in each micro-batch."""

LINK_BYTES_PER_SECOND = {"cuda": 25e9, "cpu": 1e9}
"""What a rank is thought to send and receive, where nobody says: a PCI Express 4.0 slot, and a network of 10 Gbit/s."""
BUCKET_BYTES = 25 * 2**20
"""Of the copies in which gradients are summed over ranks, after the last backward."""


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers as one, in bytes.

    Attributes:
        name: Of the module in ``named_modules``; "" is the root.
        gathered_bytes: Its parameters, whole and padded.
        traced_bytes: Its gradients in the profile of the whole model.
        kept_bytes: Its whole gradients, as they are added up over micro-batches.
        sent_bytes: The same as they are sent, padded.
        shard_bytes: The gradient of the shard of one rank.
    """

    name: str
    gathered_bytes: int
    traced_bytes: int
    kept_bytes: int
    sent_bytes: int
    shard_bytes: int


@dataclass(frozen=True)
class Shards:
    """A model that is spread over ranks, as the rank with the largest shards has it.

    Attributes:
        world_size: Ranks.
        units: The root first, the others in any order.
        parameter_bytes: Of its shards.
        optimizer_bytes: State of the optimizers for them.
        update_bytes: Most bytes alive in the update beyond the gradients of its shards.
    """

    world_size: int
    units: tuple[Unit, ...]
    parameter_bytes: int
    optimizer_bytes: int
    update_bytes: int


class _Added(NamedTuple):
    """What is alive in a slot beside what it has in one process."""

    gathered: int
    sent: int = 0


def with_buckets(profile: MemoryProfile) -> MemoryProfile:
    """The costs on a rank of DDP, from those of one process: a second copy of all gradients, and a part of a third."""
    if profile.bucket_bytes:
        return profile
    copied = min(profile.gradient_bytes, BUCKET_BYTES)
    return replace(profile, bucket_bytes=profile.gradient_bytes, update_bytes=max(profile.update_bytes, copied))


def sharded(profile: MemoryProfile, shards: Shards, reduce: When) -> MemoryProfile:
    """The costs on a rank of FSDP2.

    Every unit but the root is a block of the profile. Blocks are not grouped: in a group all would be whole at once.

    Args:
        profile: Of the whole model in one process.
        reduce: How often gradients are summed. A step of one micro-batch is one of "each".

    Raises:
        OptionError: A unit is no block.
    """
    units = _by_slot(profile, shards)
    forward, backward = _forward(units, shards), _backward(units, shards)
    summed = sum(unit.shard_bytes for unit in shards.units)
    kept = sum(unit.kept_bytes for unit in shards.units) if reduce == "after" else summed
    slots, gathered = [], []
    for number, slot in enumerate(profile.slots):
        after = [unit for unit in units[number + 1 :] if unit is not None]
        slots.append(_slot(slot, forward[number], backward[number], after, reduce))
        gathered.append(Gathered(forward[number].gathered, backward[number].gathered, backward[number].sent))
    seconds = _seconds_to_gather(shards, profile.device)
    sending = _seconds_to_send(shards, profile.device)
    per_micro_batch = seconds + (sending if reduce == "each" else 0.0)
    return replace(
        profile,
        parameter_bytes=shards.parameter_bytes,
        optimizer_bytes=shards.optimizer_bytes,
        gradient_bytes=kept,
        update_bytes=max(0, summed + shards.update_bytes - kept),
        slots=tuple(slots),
        gathered=tuple(gathered),
        whole_gradients=reduce == "after",
        micro_seconds=tuple((size, known + per_micro_batch) for size, known in profile.micro_seconds),
        update_seconds=profile.update_seconds / shards.world_size + (sending if reduce == "after" else 0.0),
    )


def _by_slot(profile: MemoryProfile, shards: Shards) -> list[Unit | None]:
    """The unit of each slot; None where only the root is whole."""
    by_name = {unit.name: unit for unit in shards.units if unit.name}
    found = [by_name.get(slot.name or "") for slot in profile.slots]
    if missing := set(by_name) - {slot.name for slot in profile.slots}:
        raise OptionError(
            f"The modules {format_names(sorted(missing))} are sharded by themselves, but are not called as modules, or "
            f"are inside one another, and what that takes is not known. Shard blocks that are called, and the model: "
            f"fully_shard(block) for each, then fully_shard(model); or give micro_batch_size= and leave the budget out."
        )
    return found


def _forward(units: Sequence[Unit | None], shards: Shards) -> list[_Added]:
    several, root = shards.world_size > 1, shards.units[0]
    whole, received, found = root.gathered_bytes, root.gathered_bytes * several, []
    for unit in units:
        if unit is None:
            found.append(_Added(whole + received))
            continue
        size = unit.gathered_bytes
        coming, received = whole + received + size * several, size * several
        found.append(_Added(max(coming, whole + size + received)))
    return found


def _backward(units: Sequence[Unit | None], shards: Shards) -> list[_Added]:
    several, root = shards.world_size > 1, shards.units[0]
    called = [number for number, unit in enumerate(units) if unit is not None]
    whole = root.gathered_bytes

    def received_before(number: int) -> int:
        before = next((units[other] for other in reversed(called) if other < number), None)
        return before.gathered_bytes if before is not None and several else 0

    found: list[_Added] = []
    sent, coming = 0, received_before(len(units))
    for number in reversed(range(len(units))):
        unit = units[number]
        if unit is None:
            found.append(_Added(whole + coming, sent))
            continue
        size = unit.gathered_bytes
        arriving, coming = coming, received_before(number)
        gathered = whole + size + max(arriving, coming)
        # Its parameters are let go of before its gradients are sent, and what was sent before them too.
        found.append(_Added(gathered, max(sent, whole + coming + unit.sent_bytes - gathered)))
        sent = unit.sent_bytes
    # At last the root sends: its parameters are gone then.
    end = found[-1]
    found[-1] = end._replace(sent=max(end.sent, root.sent_bytes - end.gathered))
    return found[::-1]


def _slot(slot: Slot, forward: _Added, backward: _Added, after: Sequence[Unit], reduce: When) -> Slot:
    """The slot with what is whole in it.

    Args:
        after: The units that come after it, whose gradients exist in its backward.
    """
    traced = sum(unit.traced_bytes for unit in after)
    kept, shard = sum(unit.kept_bytes for unit in after), sum(unit.shard_bytes for unit in after)
    here, with_sent = backward.gathered, backward.gathered + backward.sent
    if reduce == "each":
        # Each micro-batch makes gradients anew, and those of the units after it are shards.
        first, later = shard - traced + with_sent, with_sent - traced
        backward_later, pending_later = slot.backward_first, slot.pending_first
    else:
        # The last micro-batch sends the gradients of the units after it, and keeps their shards.
        first, later = kept - traced + here, max(here, with_sent + shard - kept)
        backward_later, pending_later = slot.backward, slot.pending
    return replace(
        slot,
        forward=_plus(slot.forward, forward.gathered),
        backward=_plus(backward_later, later),
        backward_first=_plus(slot.backward_first, first),
        pending=_plus(pending_later, later),
        pending_first=_plus(slot.pending_first, first),
        follows=False,
    )


def _plus(line: Line, num_bytes: int) -> Line:
    return Line(line.fixed + num_bytes, line.per_sample)


def _seconds_to_gather(shards: Shards, device: str) -> float:
    """Of all units, in forward and backward; the root once."""
    sizes = [unit.gathered_bytes * (2 if unit.name else 1) for unit in shards.units]
    return sum(sizes) * (1 - 1 / shards.world_size) / LINK_BYTES_PER_SECOND[device]


def _seconds_to_send(shards: Shards, device: str) -> float:
    return sum(unit.sent_bytes for unit in shards.units) * (1 - 1 / shards.world_size) / LINK_BYTES_PER_SECOND[device]
