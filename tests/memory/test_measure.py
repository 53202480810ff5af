"""Counted bytes against torch's own allocator, as its profiler reports it, and against what must be."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.profiler import ProfilerActivity, profile

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes, bytes_in_use, count_peak_bytes
from tests.process_group import in_process_group_of_one

F64 = 8


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.rnn, self.head = kind(16, 32, num_layers=2, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 32), nn.Linear(32, 11, bias=False)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)))


def mlp() -> tuple[nn.Module, Tensor]:
    layers = nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)
    return nn.Sequential(*layers), torch.randn(16, 32)


def cnn() -> tuple[nn.Module, Tensor]:
    convolutions = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3)
    return nn.Sequential(*convolutions, nn.GroupNorm(4, 16), nn.Flatten(), nn.Linear(400, 5)), torch.randn(4, 3, 16, 16)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = dict(
    mlp=mlp,
    cnn=cnn,
    transformer=lambda: (Transformer(), torch.randint(0, 11, (4, 10))),
    lstm=lambda: (Recurrent(nn.LSTM), torch.randn(4, 10, 16)),
    gru=lambda: (Recurrent(nn.GRU), torch.randn(4, 10, 16)),
)
# Kernels of these ask for a workspace while they run, which is no storage and not counted.
HAVE_WORKSPACE = ("cnn", "lstm", "transformer")


def allocated(fn: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that the CPU allocator handed out in ``fn`` and did not get back, and the most there were."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn()
    results = profiler.profiler
    assert results is not None
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return current, peak


class Run:
    """A step in parts, so that each can be measured alone."""

    def __init__(self, kind: str):
        self.model, self.x = MODELS[kind]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.loss: list[Tensor] = []
        for _ in range(2):  # what is made once: optimizer state, tables of kernels
            self.forward()
            self.backward()
            self.step()

    def forward(self) -> None:
        self.loss.append(self.model(self.x).square().mean())

    def backward(self) -> None:
        self.loss.pop().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", MODELS)
def test_counted_bytes_are_those_of_the_allocator(kind, recompute):
    run, counted = Run(kind), Run(kind)
    # Of these each saves something for backward.
    names = tuple(name for name, module in run.model.named_children() if not isinstance(module, nn.Flatten))
    names = names if recompute else ()
    for each in (run, counted):
        bb.apply(bb.Plan(micro_batch_size=1, recompute=names), each.model)
    # The random state that each recomputed region keeps is made outside of any operation.
    unseen = dict(forward=len(names) * torch.get_rng_state().nbytes, step=0)
    unseen["backward"] = -unseen["forward"]
    live = LiveBytes()
    live.track(counted.model, counted.optimizer, counted.x)

    for part in ("forward", "backward", "step"):
        before = live.current_bytes()
        live.reset_peak()
        with live:
            getattr(counted, part)()
        kept, peak = allocated(getattr(run, part))
        assert live.current_bytes() - before == kept - unseen[part], part
        assert live.peak_bytes() - before <= peak + unseen["forward"], part
        if kind not in HAVE_WORKSPACE and not recompute:
            # Single numbers are wrapped into tensors of 4 or 8 bytes inside of kernels.
            assert live.peak_bytes() - before == pytest.approx(peak, abs=64), part


def test_control_what_modules_return_is_not_what_lives():
    run, outputs = Run("transformer"), []
    for module in run.model.modules():
        module.register_forward_hook(lambda _, __, output: outputs.append(output) if torch.is_tensor(output) else None)
    kept, _ = allocated(run.forward)

    assert abs(sum(output.nbytes for output in outputs) - kept) > 0.1 * kept


def test_everything_the_collector_knows_is_counted():
    """A walk over all live tensors, at a moment when none hides in a graph."""
    run = Run("transformer")
    run.forward()
    run.backward()  # gradients are there now
    live = LiveBytes()
    live.track(run.model, run.optimizer, run.x)
    tensors = [*run.model.parameters(), *(p.grad for p in run.model.parameters()), *run.model.buffers(), run.x]
    tensors += [inner for state in run.optimizer.state.values() for inner in state.values()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}

    assert live.current_bytes() == sum(storages.values())


def test_each_storage_is_counted_once_until_it_is_freed():
    with LiveBytes() as live:
        x = torch.zeros(10, dtype=torch.float64)
        view, detached = x[2:].view(2, 4), x.detach()
        y = x + 1
        assert live.current_bytes() == 20 * F64
        del x, view
        assert live.current_bytes() == 20 * F64
        del detached
        assert live.current_bytes() == 10 * F64
    del y
    assert (live.current_bytes(), live.peak_bytes()) == (0, 20 * F64)
    assert live.current_bytes("cuda") == live.peak_bytes("cuda") == 0


def test_the_peak_begins_again_where_it_is():
    with LiveBytes() as live:
        x = torch.zeros(10, dtype=torch.float64)
        torch.ones(100)
        live.reset_peak()
        assert live.peak_bytes() == x.nbytes
        _ = x + 1
        assert live.peak_bytes() == 2 * x.nbytes


def test_addresses_are_used_again_without_mixing_up_storages():
    with LiveBytes() as live:
        held = [torch.zeros(1)]
        for size in range(1, 400):
            held.append(torch.zeros(size, dtype=torch.float64))
            if size % 3:
                held.pop(size % len(held))
            assert live.current_bytes() == sum(t.nbytes for t in held)


def test_storages_in_cycles_are_let_go_by_the_collector():
    gc.disable()
    try:
        with LiveBytes() as live:
            cycle: list[Any] = [torch.zeros(10, dtype=torch.float64)]
            cycle.append(cycle)
            del cycle
            assert live.current_bytes() == 10 * F64
            gc.collect()
            assert live.current_bytes() == 0
    finally:
        gc.enable()


def test_resized_storages_have_their_new_size():
    with LiveBytes() as live:
        x = torch.zeros(100, dtype=torch.float64)
        x.untyped_storage().resize_(0)
        assert live.current_bytes() == 0
        x.resize_(7)
        assert live.current_bytes() == 7 * F64
        x.set_(torch.zeros(3, dtype=torch.float64))
        assert live.current_bytes() == 3 * F64
    assert live.peak_bytes() == 100 * F64


def test_inputs_that_nobody_tracked_are_counted_when_they_are_used():
    x = torch.zeros(10, dtype=torch.float64)
    with LiveBytes() as live:
        assert live.current_bytes() == 0
        y = torch.stack([x, x])
        assert live.current_bytes() == x.nbytes + y.nbytes


@dataclass
class Averages:
    shadow: list[Tensor]


class HomeMade:
    """An EMA as people write it."""

    def __init__(self, tensors: list[Tensor]):
        self.shadow = tensors

    def update(self) -> None: ...


def test_what_is_there_already_can_be_tracked_in_any_form():
    x = [torch.zeros(size, dtype=torch.float64) for size in range(8)]
    model = nn.Linear(4, 2, bias=False).double()
    model(torch.ones(1, 4).double()).sum().backward()
    model.register_buffer("table", x[1])
    model.plain = x[2]  # no buffer: an attribute
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    weight, grad, momentum = (8 * F64 for _ in range(3))

    for tracked, size in [
        ((x[3], {"a": [x[4], (x[5],)], "b": {x[4]}}), (3 + 4 + 5) * F64),
        ((Averages([x[6]]), HomeMade([x[7], x[7][:2]])), (6 + 7) * F64),
        ((model,), weight + grad + (1 + 2) * F64),
        ((optimizer,), weight + grad + momentum),
        ((model, optimizer, model, x[1]), weight + grad + momentum + (1 + 2) * F64),
        (([optimizer], dict(model=model)), weight + grad + momentum + (1 + 2) * F64),
        ((None, 3, "text", len, object()), 0),
    ]:
        live = LiveBytes()
        live.track(*tracked)
        assert live.current_bytes() == size, tracked


def test_an_averaged_model_is_another_copy():
    model = nn.Linear(4, 2)
    copies = AveragedModel(model), copy.deepcopy(model)
    live = LiveBytes()
    live.track(model, copies)

    assert live.current_bytes() == 3 * 10 * 4 + 8  # and the count of averages


def test_gradients_are_counted_wherever_they_come_from():
    """Stolen by AccumulateGrad, cloned by it, expanded, sparse."""
    shared, plain, table = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5)), nn.Embedding(9, 2, sparse=True)
    live = LiveBytes()
    live.track(shared, plain, table)
    before = live.current_bytes()

    with live:
        loss = (shared + plain).sum() + shared.sum() + table(torch.tensor([1, 2, 2])).sum()
        loss.backward()
        del loss
    grads = [shared.grad, plain.grad, table.weight.grad._values(), table.weight.grad._indices()]

    storages = {grad.untyped_storage()._cdata: grad.untyped_storage().nbytes() for grad in grads}
    assert live.current_bytes() - before == sum(storages.values())


def test_what_is_inside_a_tensor_subclass_is_counted():
    with LiveBytes() as live:
        parts = [torch.randn(3, 4), torch.randn(5, 4)]
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        before = live.current_bytes()
        doubled = jagged * 2

        assert before >= 2 * 8 * 4 * 4
        assert live.current_bytes() - before == doubled.values().nbytes


def test_a_distributed_tensor_is_counted_by_what_lies_here():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def check():
        weight = distribute_tensor(torch.zeros(6, 2), init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
        live = LiveBytes()
        live.track(weight)
        assert live.current_bytes() == 12 * 4
        with live:
            loss = weight.sin().sum()
            assert live.current_bytes() >= 12 * 4 + 4
            loss.backward()
            assert weight.grad.to_local().untyped_storage()._cdata in live._live

    in_process_group_of_one(check)


def test_it_counts_on_devices_that_are_not_there():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), LiveBytes() as live:
        x = torch.empty(1000, device="cuda")
        y = x * 2

        assert (live.current_bytes("cuda"), live.current_bytes("cpu")) == (x.nbytes + y.nbytes, 0)


def test_results_are_the_same_under_it():
    model, x = MODELS["transformer"]()
    twin = copy.deepcopy(model)
    for each, mode in ((model, LiveBytes()), (twin, None)):
        torch.manual_seed(1)
        if mode is not None:
            with mode:
                each(x).sum().backward()
        else:
            each(x).sum().backward()

    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_peak_of_a_block_is_known_also_after_an_error():
    x = torch.zeros(100, dtype=torch.float64)

    with pytest.raises(ValueError, match="mine"), count_peak_bytes("cpu", track=[x]) as found:  # noqa: PT012
        assert found.peak_bytes == 0
        _ = (x + 1) + 2
        raise ValueError("mine")

    assert found.peak_bytes == 3 * x.nbytes


def test_the_peak_grows_by_what_a_larger_batch_adds():
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    peaks = []
    for size in (10, 20, 30):
        x = torch.randn(size, 8)
        with count_peak_bytes(torch.device("cpu"), track=[model, x]) as found:
            model(x).sum().backward()
        model.zero_grad()
        peaks.append(found.peak_bytes)

    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 10 * (8 + 32 + 1) * 4


@pytest.mark.gpu
def test_on_cuda_the_allocator_is_asked():
    x = torch.zeros(2**20, device="cuda")
    with count_peak_bytes("cuda") as found:
        _ = x + 1
    assert 2 * x.nbytes <= found.peak_bytes <= torch.cuda.max_memory_allocated()
    assert bytes_in_use("cuda") == torch.cuda.memory_allocated()


def test_process_memory_is_that_of_this_process():
    before = bytes_in_use("cpu")
    big = torch.ones(2**26)

    assert bytes_in_use("cpu") - before == pytest.approx(big.nbytes, rel=0.3)


def test_the_interpreter_ends_in_silence():
    code = (
        "import torch\nfrom bigbatch.memory.measure import LiveBytes\nlive = LiveBytes()\nlive.__enter__()\n"
        "kept = [torch.ones(5, requires_grad=True) * 2 for _ in range(100)]\nkept.append(kept)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stderr) == (0, "")
