r"""The peak and the time of a step for any choice of micro-batch sizes and recomputed blocks, without running it.

Going forward, each slot puts storages on hold until its backward: what it saves; when it is recomputed, what goes into
it; nothing when it comes later in a group. A slot sees the bytes held before it and its own work. With a group $i..k$
recomputed as one, its backward sees, for each member $t$,

$$ \mathrm{held}(i) + |\mathrm{saved}(i..t)| + \mathrm{backward}(t), $$

where held$(i)$ counts up to the inputs of $i$: what later slots held is free by then. This is why a position counts,
and why a sum of saved bytes is no bound on the peak.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bigbatch.planning.chain import WHOLE, Chain, Segment
from bigbatch.planning.costs import MOST_WITH_MASKS, Line, MemoryProfile, mask_bytes
from bigbatch.planning.naming import segments_of
from bigbatch.planning.prices import Prices
from bigbatch.planning.seconds import part_seconds, recompute_seconds, seconds_without_recompute

Entries = Sequence[str | tuple[str, ...]]
"""What is recomputed, as in ``Plan.recompute``."""


class Move(NamedTuple):
    """A slot that is kept, or a segment that is recomputed.

    Attributes:
        last: Its last slot.
        need: The most bytes alive in its forward and its backward, beyond those held before it.
        gain: Bytes that it holds until its backward.
    """

    last: int
    need: int
    gain: int


class Phase:
    """A micro-batch of one size, as the first one of a step, as a later one, or as the larger of the two.

    Args:
        loss_bytes: Of a loss of the whole batch, computed when all of the first one is held.
    """

    def __init__(
        self,
        profile: MemoryProfile,
        chain: Chain,
        num_samples: int,
        *,
        is_first: bool,
        is_later: bool,
        loss_bytes: int = 0,
    ):
        self.chain = chain
        self._num_samples = num_samples
        self._bytes_of_bits: dict[int, int] = {0: 0}
        self._bytes_of_bit = {bit: _whole(line, num_samples) for bit, line in chain.line_of.items()}
        self._moves: dict[tuple[int, int], tuple[Move, list[Move]]] = {}
        gradients = profile.gradient_bytes

        def both(first: Line, later: Line) -> int:
            as_first = _whole(first, num_samples) if is_first else 0
            return max(as_first, gradients + _whole(later, num_samples)) if is_later else as_first

        slots = chain.slots
        self.passes = [both(slot.forward, slot.forward) for slot in slots]
        self.backward = [both(slot.backward_first, slot.backward) for slot in slots]
        # The last slot is no block: what it saves is there at its end.
        self.backward[-1] = max(self.backward[-1], loss_bytes if is_first else 0)
        self._pending = [both(slot.pending_first, slot.pending) for slot in slots]
        self._forward = [_whole(slot.forward, num_samples) for slot in slots]
        self._recompute = [_whole(slot.recompute, num_samples) for slot in slots]
        self.saved_own = [self._sum(lines) for lines in chain.saved_own]
        self._inputs_own = [self._sum(lines) for lines in chain.inputs_own]
        self._again_own = [self._sum(lines) for lines in chain.again_own]
        self.parts_own = [[self._sum(lines) for lines in parts] for parts in chain.parts_own]
        self._parts_again_own = [[self._sum(lines) for lines in parts] for parts in chain.parts_again_own]

    def _sum(self, lines: Sequence[Line]) -> int:
        return sum(_whole(line, self._num_samples) for line in lines)

    def _shared(self, bits: int) -> int:
        """Bytes of a set of shared storages."""
        found = self._bytes_of_bits.get(bits)
        if found is None:
            found, rest = 0, bits
            while rest:
                lowest = rest & -rest
                found, rest = found + self._bytes_of_bit[lowest], rest ^ lowest
            self._bytes_of_bits[bits] = found
        return found

    def moves(self, start: int, key: int) -> tuple[Move, list[Move]]:
        """From this slot on: to keep it, and to recompute each of ``Chain.choices`` that begin with it.

        Args:
            key: The shared storages that are held before (see ``Chain``).
        """
        place = start, key
        if place not in self._moves:
            whole = self._segments(start, key, self.chain.ends[start])
            parts = self.chain.choices[start][len(whole) :]
            self._moves[place] = self.keep(start, key), whole + [self._part(start, key, part) for _, _, part in parts]
        return self._moves[place]

    def move(self, segment: Segment, key: int) -> Move:
        """To recompute this."""
        if segment.part != WHOLE:
            return self._part(segment.first, key, segment.part)
        return self._segments(segment.first, key, (segment.last,))[0]

    def keep(self, slot: int, key: int) -> Move:
        """To recompute nothing of this slot."""
        gain = self.saved_own[slot] + self._shared(self.chain.saved_bits[slot] & ~key)
        return Move(slot, max(self.passes[slot], gain + self.backward[slot]), gain)

    def _segments(self, start: int, key: int, ends: Sequence[int]) -> list[Move]:
        """To recompute from this slot to each of these ends, ascending."""
        if not ends:
            return []
        chain, moves = self.chain, []
        gain = self._inputs_own[start] + self._shared(chain.inputs_bits[start] & ~key)
        held = key | chain.inputs_bits[start]
        passes, again, whole, backward = self.passes[start], 0, 0, 0
        for slot in range(start, ends[-1] + 1):
            if slot > start:
                passes = max(passes, gain + self.passes[slot])
            before = again
            again += self._again_own[start] if slot == start else self.saved_own[slot]
            again += self._shared(chain.saved_bits[slot] & ~held)
            held |= chain.saved_bits[slot]
            backward = max(backward, again + self.backward[slot])
            if slot in ends:
                # The last member stops at its last save; those before it run to their end.
                second = max(whole, before + self._recompute[slot]) + self._pending[slot]
                moves.append(Move(slot, max(passes, gain + max(second, backward)), gain))
            whole = max(whole, before + self._forward[slot])
        return moves

    def _part(self, slot: int, key: int, part: int) -> Move:
        """To recompute a part of this slot. In its backward all that it saves is there again, beside what was held."""
        bits = self.chain.parts_bits[slot][part]
        gain = self.parts_own[slot][part] + self._shared(bits & ~key)
        again = self._parts_again_own[slot][part] + self._shared(self.chain.saved_bits[slot] & ~(key | bits))
        return Move(slot, max(self.passes[slot], gain + again + self.backward[slot]), gain)

    def walk(self, segments: Sequence[Segment]) -> Iterator[tuple[int, int, Move]]:
        """Along the slots, with these segments recomputed: each first slot, the bytes held before it, and the move."""
        segment_of = {segment.first: segment for segment in segments}
        held, key, slot = 0, 0, 0
        while slot < len(self.chain.slots):
            segment = segment_of.get(slot)
            move = self.keep(slot, key) if segment is None else self.move(segment, key)
            yield slot, held, move
            key |= self.chain.saved_bits[slot] if segment is None else self.chain.held_bits(segment)
            held, slot = held + move.gain, move.last + 1

    def peak(self, segments: Sequence[Segment]) -> int:
        """The most bytes alive beyond what is resident, with these segments recomputed."""
        return max((held + move.need for _, held, move in self.walk(segments)), default=0)


class Simulation:
    """Steps of a batch that is cut in one way: bytes and seconds for any choice of recomputed blocks.

    Attributes:
        sizes: Samples in each micro-batch.
        phases: One, or two when the first micro-batch is larger than all later ones.
        fixed_bytes: What is alive at every moment: the resident bytes, the batch, and what a loss of all of it needs.
        outputs_bytes: The last of these.
        update_bytes: The most bytes beyond those of the update, or of a loss of the whole batch.
        loss_beside_first: Bytes of a loss of the whole batch, computed while all of the first micro-batch is held.
        workspace_bytes: What kernels need beyond counted storages.
        plain_seconds: Of a step that recomputes nothing.
    """

    def __init__(self, profile: MemoryProfile, sizes: Sequence[int], chain: Chain | None = None):
        self.sizes = tuple(sizes)
        self.chain = chain or Chain(profile)
        self._profile = profile
        first, later = sizes[0], max(sizes[1:], default=0)
        batch = _whole(profile.batch, sum(sizes) if profile.batch_is_whole else max(sizes))
        self.outputs_bytes, loss = self._of_whole_batch(profile)
        self.loss_beside_first = loss if profile.keeps_first else 0
        self.phases = [self.phase(first, is_first=True, is_later=later == first)]
        if later not in (0, first):
            self.phases.append(self.phase(later, is_first=False, is_later=True))
        self.fixed_bytes = profile.resident_bytes + batch + self.outputs_bytes
        self.update_bytes = max(profile.gradient_bytes + profile.update_bytes, loss)
        self.workspace_bytes = _whole(profile.workspace, max(sizes))
        self.plain_seconds = seconds_without_recompute(profile, sizes)
        forward, self._last_seconds = recompute_seconds(self.chain, sizes)
        self._seconds_before = [0.0]
        for seconds in forward:
            self._seconds_before.append(self._seconds_before[-1] + seconds)
        self._part_seconds = part_seconds(self.chain, sizes)

    def _of_whole_batch(self, profile: MemoryProfile) -> tuple[int, int]:
        """Bytes that a loss of the whole batch adds to all that is alive, and its own peak beyond what is fixed."""
        num_samples = sum(self.sizes)
        loss = math.ceil(profile.loss_bytes_at(num_samples))
        if len(self.sizes) == 1:
            return loss, 0  # beside all that the forward saved
        outputs = _whole(profile.outputs, num_samples)
        twice = self.sizes[1:] if profile.keeps_first else self.sizes
        entries = (_whole(line, size) for size in twice[:MOST_WITH_MASKS] for line in profile.masks)
        masks = sum(map(mask_bytes, entries))
        return outputs + masks, max(0, loss - outputs)

    def phase(self, num_samples: int, *, is_first: bool, is_later: bool) -> Phase:
        """A micro-batch of this size, in these steps."""
        loss = self.loss_beside_first
        return Phase(self._profile, self.chain, num_samples, is_first=is_first, is_later=is_later, loss_bytes=loss)

    @functools.cached_property
    def prices(self) -> tuple[Prices, ...]:
        """What it costs at least to stay within memory, by phase."""
        return tuple(Prices(self, phase) for phase in self.phases)

    def seconds_of(self, first: int, last: int, part: int = WHOLE) -> float:
        """Seconds that recomputing these slots as one, or a part of one, adds to a step."""
        if part != WHOLE:
            return self._part_seconds[first][part]
        return self._seconds_before[last] - self._seconds_before[first] + self._last_seconds[last]

    def whole_seconds_of(self, slot: int) -> float:
        """Seconds that a whole second forward of this slot adds to a step."""
        return self._seconds_before[slot + 1] - self._seconds_before[slot]

    def peak_of(self, segments: Sequence[Segment]) -> int:
        """Peak of a steady step in bytes, without workspace."""
        return self.fixed_bytes + max(self.update_bytes, *(phase.peak(segments) for phase in self.phases))

    def step_seconds_of(self, segments: Sequence[Segment]) -> float:
        """Seconds of a step."""
        return self.plain_seconds + sum(self.seconds_of(*segment) for segment in segments)


def peak_bytes(profile: MemoryProfile, sizes: Sequence[int], recompute: Entries = ()) -> int:
    """Peak of a steady step, in bytes, workspace of kernels not counted.

    Args:
        sizes: Samples in each micro-batch, as ``batch.sizes.micro_batch_sizes`` cuts them.
        recompute: Names of blocks, of parts of blocks, and groups of neighbours, as in ``Plan.recompute``.

    Raises:
        OptionError: ``recompute`` names what the profile does not have.
    """
    simulation = Simulation(profile, sizes)
    return simulation.peak_of(segments_of(simulation.chain, recompute))


def step_seconds(profile: MemoryProfile, sizes: Sequence[int], recompute: Entries = ()) -> float:
    """Seconds of a step; arguments and errors are those of ``peak_bytes``."""
    simulation = Simulation(profile, sizes)
    return simulation.step_seconds_of(segments_of(simulation.chain, recompute))


def _whole(line: Line, num_samples: int) -> int:
    """Bytes of a line, never less; what rounding left of a whole number is not a byte more."""
    return max(0, math.ceil(line.fixed + line.per_sample * num_samples - 1e-3))
