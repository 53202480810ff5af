"""How long micro-batches take, measured by making steps for real and undoing them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bigbatch.batch.logical import LogicalBatch
from bigbatch.batch.resizing import cut_batch_of, micro_batch_of
from bigbatch.memory.trace import Recorder
from bigbatch.planning.costs import Line, MemoryProfile, Part, Slot
from bigbatch.planning.slots import MicroBatch, SlotSeconds, micro_batches, seconds_before, seconds_of_slots
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.fitting.recording import apply_quietly, recorded
from bigbatch.stepping.fitting.trial import put_back_afterwards
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

_MOST_SECONDS = 10.0
"""No larger micro-batch is timed when those before took so long in all."""
_SAME_SPEED = 0.02
"""Where a sample gets faster by less than this from one size to the next, larger ones bring nothing."""
_CLOSE = 0.1
_QUICK_SECONDS = 0.2
_ENOUGH_SECONDS = 0.3
_MOST_TRIES = 10
_PAIRS = 3
_FEW_ROUNDS, _MOST_ROUNDS = 5, 25
_LONG_SECONDS = 1.0
_LEAST_SECONDS = 1e-9
_LEAST_SHARE, _MOST_SHARE = 0.2, 3.0
"""Of a second forward in the time of a first one; what is outside was disturbed."""

Sizes = tuple[int, int]


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
    everything = profile.recomputable
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
            times |= _again(clock, times)
            slots = _with_what_it_really_takes(clock, slots, everything, _two_sizes(times))
    return replace(
        profile,
        slots=tuple(slots),
        micro_seconds=tuple((size, max(seconds, _LEAST_SECONDS)) for size, seconds in sorted(times.items())),
        update_seconds=clock.update_seconds,
        timing="measured",
    )


def tried(step: Step, batch: Any, plans: Sequence[Plan], cuts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Seconds of a step under each of these plans, by round, tried in turns. The state is put back, bit for bit.

    Of each plan the sizes in its cut are run once in each round. Where rounds are short there are many of them.

    Args:
        cuts: By plan, samples in each micro-batch.
    """
    rounds: list[list[float]] = [[] for _ in plans]
    began = time.perf_counter()
    with put_back_afterwards(step), without_compiled_code(step.model):
        clock = _Clock(step, batch)
        for number in range(1, _MOST_ROUNDS + 1):
            for plan, cut, seconds in zip(plans, cuts, rounds, strict=True):
                with apply_quietly(plan, step.model):
                    seconds.append(clock.step_seconds(cut))
            spent = time.perf_counter() - began
            if spent > _MOST_SECONDS / 2 or (number >= _FEW_ROUNDS and spent > _LONG_SECONDS):
                break
    return rounds


class _Clock:
    """Runs micro-batches of a step."""

    def __init__(self, step: Step, batch: Any):
        self.model = step.model
        self._step = step
        self._batch = batch
        self.update_seconds = self.first_pass_seconds = 0.0
        self.spared_seconds = 0.0  # of a forward that is not made twice
        self._named = step.named_parameters()

    def run(self, size: int, *, num: int = 2, closely: bool = False) -> MicroBatch:
        """A step of so many micro-batches of this size; the record of the last."""
        step = self._step
        batch = self._batch_of(size, num)
        recorder = Recorder(step.model, frozenset(), step.accumulator.device)
        with recorded(step, recorder, closely=closely):
            step.attempt(batch, None, self._named)
        step.clear()
        found = micro_batches(recorder.events, (size,) * num)[-1]
        self.update_seconds = recorder.events[-1].seconds
        self.first_pass_seconds = seconds_before(recorder.events) / num if batch.whole is not None else 0.0
        two_passes = step.accumulator.two_passes
        has_kept = two_passes is not None and two_passes.has_kept
        self.spared_seconds = sum(event.seconds for event in found.forward) if has_kept else 0.0
        return found

    def step_seconds(self, cut: Sequence[int]) -> float:
        """Of a step of micro-batches of these sizes; each size is run once."""
        # A single micro-batch has no gradients beside it, and would not fit with them.
        num = min(2, len(cut))
        seconds = spared = 0.0
        for size, times in Counter(cut).items():
            seconds += times * (self.run(size, num=num).seconds + self.first_pass_seconds)
            spared = self.spared_seconds if size == cut[0] else spared
        return seconds - spared + self.update_seconds

    def _batch_of(self, size: int, num: int) -> LogicalBatch:
        options = self._step.options
        if num > 1 and self._step.accumulator.two_passes is not None:
            return cut_batch_of(self._batch, [size] * num, options)
        return LogicalBatch([micro_batch_of(self._batch, size, options)] * num)

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


def _again(clock: _Clock, times: dict[int, float]) -> dict[int, float]:
    """Times of the sizes that are nearly the fastest for a sample, from more tries that take turns."""
    best = min(seconds / size for size, seconds in times.items())
    close = {size: seconds for size, seconds in times.items() if seconds / size < (1 + _CLOSE) * best}
    began = time.perf_counter()
    for _ in range(_MOST_TRIES):
        if time.perf_counter() - began > _MOST_SECONDS / 4:
            break
        close = {size: min(seconds, clock.run(size).seconds) for size, seconds in close.items()}
    return close


def _two_sizes(times: dict[int, float]) -> Sizes:
    """The smallest that was timed, and the largest that takes no long time to try some times."""
    quick = [size for size, seconds in times.items() if seconds < _QUICK_SECONDS]
    return min(times), max(quick, default=min(times))


def _timed_slots(clock: _Clock, profile: MemoryProfile, sizes: tuple[int, int]) -> list[Slot]:
    """The slots with seconds that were measured."""
    blocks = {slot.name for slot in profile.slots if slot.name is not None}
    (size, small), (other_size, large) = [(size, _least(clock, size, blocks)) for size in sizes]
    if not len(small) == len(large) == len(profile.slots):
        return list(profile.slots)

    def line(seconds: float, other: float) -> Line:
        if size == other_size:
            return Line(0.0, min(seconds, other) / size)
        return Line.through((size, min(seconds, other)), (other_size, other))

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


def _with_what_it_really_takes(
    clock: _Clock, slots: list[Slot], everything: tuple[str, ...], sizes: Sizes
) -> list[Slot]:
    """The slots with recompute as slow as it is when all blocks are recomputed; the same for each word of ``keep``."""
    blocks = [slot.recompute_seconds for slot in slots if slot.may_recompute]
    real = {"": _real_seconds(clock, sizes, blocks, everything)}
    for word in dict.fromkeys(part.keep for slot in slots for part in slot.parts if part.keep):
        kept = {part.names[0]: part for slot in slots for part in slot.parts if part.keep == word}
        keep = tuple((name, word) for name in kept)
        real[word] = _real_seconds(clock, sizes, [part.recompute_seconds for part in kept.values()], tuple(kept), keep)
    return [
        replace(
            slot,
            forward_seconds=real[""].of(slot.forward_seconds),
            recompute_seconds=real[""].of(slot.recompute_seconds),
            parts=tuple(
                replace(part, recompute_seconds=real[part.keep].of(part.recompute_seconds)) for part in slot.parts
            ),
        )
        for slot in slots
    ]


class _Real(NamedTuple):
    """What recomputing a module really takes: a share of what its forward took, and something for each (hooks)."""

    share: float
    seconds: float

    def of(self, line: Line) -> Line:
        return Line(line.fixed * self.share + self.seconds, line.per_sample * self.share)


def _real_seconds(
    clock: _Clock, sizes: Sizes, expected: list[Line], names: tuple[str, ...], keep: tuple[tuple[str, str], ...] = ()
) -> _Real:
    """From what recomputing all of these adds to micro-batches of two sizes."""
    if not names:
        return _Real(1.0, 0.0)
    found = []
    for size in sizes:
        plan = Plan(micro_batch_size=size, recompute=names, keep=keep)
        found.append((sum(line.at(size) for line in expected), _added(clock, plan)))
    (one, added), (two, other_added) = found
    share = (other_added - added) / (two - one) if two > one else other_added / max(two, _LEAST_SECONDS)
    share = min(max(share, _LEAST_SHARE), _MOST_SHARE)
    return _Real(share, max(0.0, (added - share * one) / len(names)))


def _added(clock: _Clock, plan: Plan) -> float:
    """Seconds that a plan adds to a micro-batch."""
    size, plain, recomputed = plan.micro_batch_size, [], []
    for _ in range(_PAIRS):
        plain.append(clock.run(size).seconds)
        with apply_quietly(plan, clock.model):
            recomputed.append(clock.run(size).seconds)
    return max(0.0, min(recomputed) - min(plain))
