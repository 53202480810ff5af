from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from bigbatch.memory.fakes import fake_copy
from bigbatch.memory.measure import LiveBytes
from bigbatch.memory.trace import FakeRecorder, Recorder


def model_of(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def static_of(model: nn.Module) -> frozenset[int]:
    return frozenset(p.untyped_storage()._cdata for p in model.parameters())


def run(recorder: Recorder, model: nn.Module, x: torch.Tensor) -> None:
    with recorder.watching_modules():
        recorder.mark("micro-batch")
        with recorder.watching_saves():
            loss = model(x).square().sum()
        recorder.mark("backward")
        loss.backward()
        recorder.mark("end")


def test_modules_saves_and_loads_are_noted_in_their_order():
    model = model_of()
    recorder = Recorder(model, static_of(model))

    run(recorder, model, torch.randn(4, 8))

    kinds = [(event.kind, event.what) for event in recorder.events if event.kind in ("enter", "exit")]
    assert kinds == [
        ("enter", ""),
        *[(kind, name) for name in "012" for kind in ("enter", "exit")],
        ("exit", ""),
    ]
    saves = [event.what for event in recorder.events if event.kind == "save"]
    loads = [event.what for event in recorder.events if event.kind == "load"]
    assert saves == list(range(len(saves)))
    assert sorted(set(loads)) == saves
    assert loads[0] == saves[-1]  # backward begins at the end
    assert all(event.seconds >= 0 for event in recorder.events)


def test_parameters_cost_nothing_and_a_storage_has_one_number():
    model, x = model_of(), torch.randn(4, 8)
    recorder = Recorder(model, static_of(model))

    run(recorder, model, x)

    saved = [storage for event in recorder.events if event.kind == "save" for storage in event.storages]
    # The input, what tanh returned (saved by tanh and by the second layer), and what is squared.
    assert [s.num_bytes for s in sorted(set(saved))] == [128, 128, 128]
    assert len(saved) > 3
    # Control: without knowing what is static, the weight of the second layer counts too.
    other = Recorder(model, frozenset())
    run(other, model, x)
    assert 256 in {s.num_bytes for event in other.events if event.kind == "save" for s in event.storages}


def test_a_module_follows_the_one_whose_output_it_gets():
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.c(self.b(y) + y)

    model = Skips()
    recorder = Recorder(model, static_of(model))
    run(recorder, model, torch.randn(2, 8))

    assert {e.what: e.follows for e in recorder.events if e.kind == "enter"} == {
        "": False,
        "a": False,
        "b": True,
        "c": False,
    }


def test_hooks_are_gone_afterwards():
    model = model_of()
    run(Recorder(model, static_of(model)), model, torch.randn(2, 8))

    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_fake_tensors_are_counted_as_real_ones_are():
    model, x = model_of(), torch.randn(16, 8)
    live = LiveBytes()
    live.track(model, x)
    with live:
        loss = model(x).square().sum()
        loss.backward()
    peak, current = live.peak_bytes(), live.current_bytes()
    model.zero_grad()
    mode = FakeTensorMode()
    fake, fake_x = fake_copy((model, x), mode)
    recorder = FakeRecorder(fake, static_of(fake))
    recorder.track(fake, fake_x)
    with mode, recorder:
        run(recorder, fake, fake_x)

    assert max(event.peak_bytes for event in recorder.events) == peak
    assert recorder.events[-1].live_bytes == current == 2 * 576 + x.nbytes + loss.nbytes
    # Control: the peak is not there all the time.
    assert peak > current


def test_storages_are_rounded_up_to_blocks():
    model, mode = model_of(), FakeTensorMode()
    fake, x = fake_copy((model, torch.randn(3, 8)), mode)
    recorder = FakeRecorder(fake, static_of(fake), block_bytes=512)
    with mode, recorder:
        run(recorder, fake, x)

    assert {s.num_bytes for event in recorder.events for s in event.storages} == {512}


def test_numbers_are_answered_outside_of_the_loss_only():
    mode = FakeTensorMode()
    recorder = FakeRecorder(nn.Linear(1, 1), frozenset())
    with mode, recorder:
        step, flag = torch.empty(()), torch.empty(2).sum() == 0
        assert float(step) == 1000.0
        assert int(torch.ones((), dtype=torch.int64)) == 1000
        assert bool(flag) is False
        assert torch.equal(step, step + 1)
        with recorder.strictly(), pytest.raises(DataDependentOutputException):
            float(step)
        with recorder.strictly(), pytest.raises(DataDependentOutputException):
            bool(flag)
        assert float(step) == 1000.0


def test_operations_have_a_price():
    mode, model = FakeTensorMode(), model_of()
    fake, x = fake_copy((model, torch.randn(3, 8)), mode)
    recorder = FakeRecorder(fake, static_of(fake), lambda func, args, kwargs, result: float("addmm" in str(func)))
    with mode, recorder:
        run(recorder, fake, x)

    assert sum(event.seconds for event in recorder.events) == 2.0
