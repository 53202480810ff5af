"""How long micro-batches take, measured by making steps for real and undoing them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigbatch.batch.logical import LogicalBatch
from bigbatch.batch.resizing import micro_batch_of
from bigbatch.memory.trace import Recorder
from bigbatch.planning.costs import Line, MemoryProfile, Part, Slot
from bigbatch.planning.slots import MicroBatch, SlotSeconds, micro_batches, seconds_of_slots
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.recording import apply_quietly, recorded
from bigbatch.stepping.trial import put_back_afterwards
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

_MOST_SECONDS = 20.0
"""No larger micro-batch is timed when those before took so long in all."""
_SAME_SPEED = 0.02
"""Where a sample gets faster by less than this from one size to the next, larger ones bring nothing."""
_ENOUGH_SECONDS = 0.3
_MOST_TRIES = 5
_PAIRS = 4
_LEAST_SECONDS = 1e-9
_LEAST_SHARE, _MOST_SHARE = 0.2, 5.0
"""Of a second forward in the time of a first one; what is outside was disturbed."""


def timed(
    step: Step, batch: Any, profile: MemoryProfile, fits: Callable[[int, bool], bool], most: int
) -> MemoryProfile:
    """The profile with times of this device in the place of estimates. The state of the step is put back, bit for bit.

    Sizes are doubled as long as they fit and a sample gets faster; each block is timed in the smallest and in the
    largest. What recompute costs beside a forward (random numbers, hooks) is seen with all blocks recomputed.

    Args:
        step: Whose model is run.
        batch: To make micro-batches of.
        profile: What was traced.
        fits: ``fits(size, recompute_all)``: whether a step with micro-batches of this size may be tried.
        most: The largest size.
    """
    everything = tuple(dict.fromkeys(slot.name for slot in profile.slots if slot.may_recompute and slot.name))
    smallest = min(profile.smallest_micro_batch, most)
    recomputed = everything if not fits(smallest, False) else ()
    if recomputed and not fits(smallest, True):
        return profile
    with put_back_afterwards(step), without_compiled_code(step.model):
        clock = _Clock(step, batch)
        with apply_quietly(Plan(micro_batch_size=most, recompute=recomputed), step.model):
            times = _ladder(clock, smallest, most, lambda size: fits(size, bool(recomputed)))
            slots = _timed_slots(clock, profile, (min(times), max(times)))
        if recomputed:
            again = [slot.forward_seconds for slot in slots if slot.may_recompute]
            times = {size: seconds - sum(line.at(size) for line in again) for size, seconds in times.items()}
        else:
            slots = _with_what_it_really_takes(clock, slots, everything, sorted(times)[:2][-1])
    return replace(
        profile,
        slots=tuple(slots),
        micro_seconds=tuple((size, max(seconds, _LEAST_SECONDS)) for size, seconds in sorted(times.items())),
        update_seconds=clock.update_seconds,
        timing="measured",
    )


class _Clock:
    """Runs micro-batches of a step."""

    def __init__(self, step: Step, batch: Any):
        self.model = step.model
        self._step = step
        self._batch = batch
        self.update_seconds = 0.0
        self._named = step.named_parameters()

    def run(self, size: int, *, closely: bool = False) -> MicroBatch:
        """A step of two micro-batches of this size; the record of the second."""
        step = self._step
        micro_batch = micro_batch_of(self._batch, size, step.options)
        recorder = Recorder(step.model, frozenset(), step.accumulator.device)
        with recorded(step, recorder, closely=closely):
            step.attempt(LogicalBatch([micro_batch, micro_batch]), None, self._named)
        step.clear()
        found = micro_batches(recorder.events, (size, size))[-1]
        self.update_seconds = recorder.events[-1].seconds
        return found

    def seconds(self, size: int) -> float:
        """The least of some tries."""
        begin, tries = time.perf_counter(), []
        while len(tries) < _MOST_TRIES and (not tries or time.perf_counter() - begin < _ENOUGH_SECONDS):
            tries.append(self.run(size).seconds)
        return min(tries)


def _ladder(clock: _Clock, smallest: int, most: int, fits: Callable[[int], bool]) -> dict[int, float]:
    """Seconds of micro-batches by size."""
    clock.run(smallest)  # what is made once is made here
    begin, size, num_slower = time.perf_counter(), smallest, 0
    times = {size: clock.seconds(size)}
    while num_slower < 2:
        larger = min(2 * size, most)
        took = time.perf_counter() - begin
        if larger == size or not fits(larger) or took + 4 * times[size] > _MOST_SECONDS:
            break
        times[larger] = clock.seconds(larger)
        gained = times[larger] / larger < (1 - _SAME_SPEED) * times[size] / size
        size, num_slower = larger, 0 if gained else num_slower + 1
    return times


def _timed_slots(clock: _Clock, profile: MemoryProfile, sizes: tuple[int, int]) -> list[Slot]:
    """The slots with seconds that were measured."""
    blocks = {slot.name for slot in profile.slots if slot.name is not None}
    (size, small), (other_size, large) = [(size, _least(clock, size, blocks)) for size in sizes]
    if not len(small) == len(large) == len(profile.slots):
        return list(profile.slots)

    def line(seconds: float, other: float) -> Line:
        if size == other_size:
            return Line(0.0, min(seconds, other) / size)
        return Line.through((size, seconds), (other_size, other))

    def of_part(slot: Slot, part: Part, one: SlotSeconds, two: SlotSeconds) -> Line:
        if not part.keep:
            return line(*(sum(found.children.get(name, 0.0) for name in part.names) for found in (one, two)))
        # Operations are not timed one by one: their part of the block is as estimated.
        left = [_ratio(part.recompute_seconds.at(n), slot.recompute_seconds.at(n)) for n in sizes]
        return line(one.recompute * left[0], two.recompute * left[1])

    return [
        replace(
            slot,
            forward_seconds=line(one.forward, two.forward),
            recompute_seconds=line(one.recompute, two.recompute),
            parts=tuple(replace(part, recompute_seconds=of_part(slot, part, one, two)) for part in slot.parts),
        )
        for slot, one, two in zip(profile.slots, small, large, strict=True)
    ]


def _ratio(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0


def _least(clock: _Clock, size: int, blocks: set[str]) -> list[SlotSeconds]:
    """What each slot took in the faster of two runs."""
    runs = [clock.run(size, closely=True) for _ in range(2)]
    return seconds_of_slots(min(runs, key=lambda micro_batch: micro_batch.seconds), blocks)


def _with_what_it_really_takes(clock: _Clock, slots: list[Slot], everything: tuple[str, ...], size: int) -> list[Slot]:
    """The slots with recompute as slow as it is when all blocks are recomputed; the same for each word of ``keep``."""
    expected = sum(slot.recompute_seconds.at(size) for slot in slots if slot.may_recompute)
    share = _share(clock, Plan(micro_batch_size=size, recompute=everything), expected)
    shares = {"": share}
    for word in dict.fromkeys(part.keep for slot in slots for part in slot.parts if part.keep):
        kept = {part.names[0]: part for slot in slots for part in slot.parts if part.keep == word}
        plan = Plan(micro_batch_size=size, recompute=tuple(kept), keep=tuple((name, word) for name in kept))
        shares[word] = _share(clock, plan, sum(part.recompute_seconds.at(size) for part in kept.values()))
    return [
        replace(
            slot,
            forward_seconds=_scaled(slot.forward_seconds, share),
            recompute_seconds=_scaled(slot.recompute_seconds, share),
            parts=tuple(
                replace(part, recompute_seconds=_scaled(part.recompute_seconds, shares[part.keep]))
                for part in slot.parts
            ),
        )
        for slot in slots
    ]


def _scaled(line: Line, share: float) -> Line:
    return Line(line.fixed * share, line.per_sample * share)


def _share(clock: _Clock, plan: Plan, expected: float) -> float:
    """What a plan really adds to a micro-batch, in terms of what was expected."""
    if not plan.recompute or expected <= 0:
        return 1.0
    size, plain, recomputed = plan.micro_batch_size, [], []
    for _ in range(_PAIRS):
        plain.append(clock.run(size).seconds)
        with apply_quietly(plan, clock.model):
            recomputed.append(clock.run(size).seconds)
    return min(max((min(recomputed) - min(plain)) / expected, _LEAST_SHARE), _MOST_SHARE)
