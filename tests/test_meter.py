"""The two meters of the benchmarks agree with what is computed by hand, and with each other."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bigbatch as bb
from benchmarks.planner.meter import Peak, peak_of, process_peak, storages_in
from bigbatch.tasks.shapes.gpt2 import Gpt2
from bigbatch.tasks.shapes.shape import class_loss, tokens

MB = 10**6
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def block(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MB // 4)


def build_known(held: int = 8) -> Callable[[], None]:
    """Its peak is what is held and 50 MB: 40 + 10, then 10 + 35, then 10 + 35 + 1."""
    resident = block(held)

    def step() -> None:
        first = block(40)
        second = block(10)
        del first
        third = block(35)
        fourth = block(1)
        del second, third, fourth, resident_of_step[1:]

    resident_of_step = [resident]
    return step


def training(num_samples: int = 4, *, extra: int = 0) -> tuple[Callable[[], None], tuple[Any, ...]]:
    """A step of AdamW on a small GPT-2, with so many MB more held while it runs, and what is there before."""
    torch.manual_seed(0)
    model = Gpt2(num_layers=6, width=256, num_heads=4, vocabulary=4096, length=256)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = tokens(num_samples, 256, 4096)

    def step() -> None:
        held = block(extra)
        class_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        del held

    return step, (model, optimizer, batch)


def build_training(num_samples: int = 4, *, extra: int = 0) -> Callable[[], None]:
    return training(num_samples, extra=extra)[0]


def test_allocated_blocks_are_added_up():
    held = block(8)
    peak = peak_of(build_known(0), held)

    assert peak == Peak(58 * MB, resident_bytes=8 * MB, unseen_bytes=0, above_bytes=50 * MB, largest_block=40 * MB)


def test_what_is_there_is_counted_once_however_often_it_is_found():
    model = nn.Linear(1000, 1000, bias=False)
    model.register_buffer("again", model.weight.detach()[:500])
    model.weight.grad = torch.ones(1000, 1000)

    peak = peak_of(lambda: None, model, [model.weight, {"view": model.weight.view(-1)}])

    assert peak.resident_bytes == peak.peak_bytes == 8 * MB


def test_a_block_from_before_that_goes_makes_room():
    held = [block(16), block(1)]

    def replace() -> None:
        if calls:
            del held[0]
            held.append(block(12))
        calls.append(1)

    calls: list[int] = []
    peak = peak_of(replace, held)

    assert (peak.resident_bytes, peak.above_bytes) == (17 * MB, 0)


def test_it_makes_no_room_before_it_goes():
    """Control: the same two, in the other order."""
    held = [block(16), block(1)]

    def replace() -> None:
        if calls:
            held.append(block(12))
            del held[0]
        calls.append(1)

    calls: list[int] = []

    assert peak_of(replace, held).above_bytes == 12 * MB


def test_a_block_that_an_earlier_recording_knew_has_its_own_size():
    """The recorder keeps the address of what came in an earlier recording, and says its old size when it goes."""
    for size in (32, 48, 64):
        held = [block(size)]
        peak = peak_of(lambda held=held: held.append(block(8)) or held.pop(0), held)
        assert peak.above_bytes == 8 * MB


def test_all_that_a_step_of_ours_keeps_is_found_in_it():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    batch = torch.randn(12, 64), torch.randint(5, (12,))
    step = bb.Step(model, class_loss, optimizer, micro_batch_size=5, max_grad_norm=1.0, ema=average)
    peak = peak_of(lambda: step(batch), step, batch)

    parts = [*model.parameters(), *average.parameters(), optimizer.state]
    assert peak.resident_bytes > sum(storage.nbytes() for storage in storages_in(parts))
    assert peak.unseen_bytes == 0


def test_what_a_step_keeps_to_itself_is_seen():
    kept: dict[str, torch.Tensor] = {}

    def step() -> None:
        if not kept:
            kept["cache"] = block(5)

    peak = peak_of(step)

    assert (peak.resident_bytes, peak.unseen_bytes, peak.peak_bytes) == (0, 5 * MB, 5 * MB)


def test_optimizer_state_that_is_made_in_the_first_step_is_there_in_the_second():
    step, resident = training(1)
    num_parameters = sum(parameter.numel() for parameter in resident[0].parameters())
    peak = peak_of(step, *resident)

    # Weights and two moments, and a few bytes of step counts and of the batch.
    assert 0 <= peak.resident_bytes - 3 * 4 * num_parameters < 10_000
    assert peak.unseen_bytes < 1000
    assert peak.above_bytes > 4 * num_parameters, "Gradients are made in the step."


def test_the_working_memory_of_a_kernel_is_seen():
    """oneDNN's convolutions copy into a layout of their own, in blocks of the same allocator."""
    conv, x = nn.Conv2d(16, 16, 3, padding=1, bias=False), torch.randn(2, 16, 32, 32, requires_grad=True)
    plain = 4 * (2 * 16 * 32 * 32)

    def step() -> None:
        F.conv2d(x, conv.weight, padding=1)

    assert peak_of(step, conv, x).above_bytes >= plain


@needs_proc
def test_a_process_holds_what_is_computed_by_hand():
    peak = process_peak(build_known)

    assert peak.peak_bytes == pytest.approx(58 * MB, abs=1 * MB)
    assert process_peak(functools.partial(build_known, 18)).peak_bytes == pytest.approx(68 * MB, abs=1 * MB)


def build_untouched() -> Callable[[], bool]:
    return lambda: torch.empty(10 * MB) is None


@needs_proc
def test_what_is_allocated_and_not_used_is_held_only_when_all_is_touched():
    assert peak_of(build_untouched()).peak_bytes == 40 * MB
    assert process_peak(build_untouched).peak_bytes < 1 * MB
    assert process_peak(build_untouched, touch_all=True).peak_bytes == pytest.approx(40 * MB, abs=1 * MB)


@pytest.mark.slow
@needs_proc
def test_the_two_meters_agree_and_notice_one_block_more():
    step, resident = training(8)
    counted = peak_of(step, *resident).peak_bytes
    in_process = process_peak(functools.partial(build_training, 8)).peak_bytes

    assert counted > 300 * MB
    assert in_process == pytest.approx(counted, rel=0.05)

    # Control: a tenth more is outside of that, and both say by how much.
    extra = counted // 10 // MB
    step, resident = training(8, extra=extra)
    assert peak_of(step, *resident).peak_bytes - counted == extra * MB
    more = process_peak(functools.partial(build_training, 8, extra=extra)).peak_bytes
    assert more - in_process == pytest.approx(extra * MB, abs=3 * MB)


@needs_proc
def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        process_peak(functools.partial(divmod, 1, 0))


def test_the_meter_imports_nothing_of_ours():
    source = Path(sys.modules[peak_of.__module__].__file__).read_text()

    assert "import bigbatch" not in source
    assert "from bigbatch" not in source
