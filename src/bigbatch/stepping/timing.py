"""How long micro-batches take, measured by making steps for real and undoing them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigbatch.batch.logical import LogicalBatch
from bigbatch.batch.resizing import micro_batch_of
from bigbatch.memory.recompute import apply
from bigbatch.memory.trace import Recorder
from bigbatch.planning.costs import Line, MemoryProfile
from bigbatch.planning.slots import MicroBatch, micro_batches, seconds_of_slots
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.recording import recorded
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
_PAIRS = 3
_LEAST_SHARE, _MOST_SHARE = 0.2, 3.0
"""Of a second forward in the time of a first one; what is outside was disturbed."""


def timed(step: Step, batch: Any, profile: MemoryProfile, fits: Callable[[int, bool], bool], most: int) -> MemoryProfile:
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
        with apply(Plan(micro_batch_size=most, recompute=recomputed), step.model):
            times = _ladder(clock, smallest, most, lambda size: fits(size, bool(recomputed)))
            lines = _seconds_of_slots(clock, profile, (min(times), max(times)))
        if recomputed:
            times = {size: seconds - sum(line.at(size) for line, _ in lines) for size, seconds in times.items()}
            share = 1.0
        else:
            share = _share_of_forward(clock, lines, everything, sorted(times)[:2][-1])
    slots = tuple(
        replace(slot, forward_seconds=forward, recompute_seconds=Line(again.fixed * share, again.per_sample * share))
        for slot, (forward, again) in zip(profile.slots, lines, strict=True)
    )
    points = tuple((size, max(seconds, 1e-9)) for size, seconds in sorted(times.items()))
    return replace(
        profile, slots=slots, micro_seconds=points, update_seconds=clock.update_seconds, timing="measured"
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
    begin, times, size = time.perf_counter(), {}, smallest
    clock.run(size)  # what is made once is made here
    slower = 0
    while True:
        times[size] = clock.seconds(size)
        larger = min(2 * size, most)
        took = time.perf_counter() - begin
        if larger == size or not fits(larger) or took + 4 * times[size] > _MOST_SECONDS:
            return times
        before = times.get(size // 2)
        slower = slower + 1 if before is not None and times[size] / size > (1 - _SAME_SPEED) * before / (size // 2) else 0
        if slower == 2:
            return times
        size = larger


def _seconds_of_slots(clock: _Clock, profile: MemoryProfile, sizes: tuple[int, int]) -> list[tuple[Line, Line]]:
    """Of each slot the seconds of its forward, and of it up to the last save."""
    blocks = {slot.name for slot in profile.slots if slot.name is not None}
    measured = [_least(clock, size, blocks) for size in dict.fromkeys(sizes)]
    if any(len(found) != len(profile.slots) for found in measured):
        return [(slot.forward_seconds, slot.recompute_seconds) for slot in profile.slots]
    if len(measured) == 1:  # in proportion
        return [tuple(Line(0.0, seconds / sizes[0]) for seconds in slot) for slot in measured[0]]  # type: ignore[misc]
    return [
        tuple(Line.through((sizes[0], small), (sizes[1], large)) for small, large in zip(*both, strict=True))  # type: ignore[misc]
        for both in zip(*measured, strict=True)
    ]


def _least(clock: _Clock, size: int, blocks: set[str]) -> list[tuple[float, float]]:
    runs = [seconds_of_slots(clock.run(size, closely=True), blocks) for _ in range(2)]
    return [tuple(map(min, zip(*both, strict=True))) for both in zip(*runs, strict=True)]  # type: ignore[misc]


def _share_of_forward(
    clock: _Clock, lines: list[tuple[Line, Line]], everything: tuple[str, ...], size: int
) -> float:
    """What recomputing all blocks really adds, in terms of what their forwards took."""
    expected = sum(again.at(size) for _, again in lines)
    if not everything or expected <= 0:
        return 1.0
    added = []
    for _ in range(_PAIRS):
        plain = clock.run(size).seconds
        with apply(Plan(micro_batch_size=size, recompute=everything), clock.model):
            added.append(clock.run(size).seconds - plain)
    return min(max(statistics.median(added) / expected, _LEAST_SHARE), _MOST_SHARE)

