"""Running out of memory in a step: the same step is made again in smaller micro-batches, and nothing is lost."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bigbatch as bb
from bigbatch.stepping.insisting import insist
from tests.reference import assert_same_weights

NUM_FEATURES = 5


class OutOfMemoryAt(torch.autograd.Function):
    """Runs out of memory in backward as long as there are more samples than ``limit``."""

    limit: int | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if OutOfMemoryAt.limit is not None and len(grads[0]) > OutOfMemoryAt.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return grads[0]


class Net(nn.Module):
    def __init__(self, *, norm: bool = False, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(OutOfMemoryAt.apply(self.dropout(self.norm(torch.tanh(self.first(x))))))  # pyright: ignore


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make_batch(num_samples: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, NUM_FEATURES, dtype=torch.float64), torch.randn(num_samples, 1, dtype=torch.float64)


def make_step(model: nn.Module, **options: Any) -> bb.Step:
    return bb.Step(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=0.01), **options)


@pytest.fixture(autouse=True)
def _no_limit_afterwards() -> Any:
    yield
    OutOfMemoryAt.limit = None


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "BatchNorm"])
def test_a_step_that_runs_out_of_memory_is_the_step_of_the_smaller_size(norm):
    """Of the failed attempt nothing is left: no gradient, no running statistics, no random numbers drawn."""
    failing = Net(norm=norm, dropout=0.3).double()
    smaller = copy.deepcopy(failing)
    batches = [make_batch() for _ in range(5)]
    recovering, undisturbed = make_step(failing, micro_batch_size=8), make_step(smaller, micro_batch_size=4)

    torch.manual_seed(7)
    for i, batch in enumerate(batches):
        OutOfMemoryAt.limit = 4 if i == 2 else None
        recovering.micro_batch_size = 8 if i == 2 else 4
        result = recovering(batch)
        assert (result.retries, result.micro_batch_sizes) == (int(i == 2), (4,) * 4)
    torch.manual_seed(7)
    OutOfMemoryAt.limit = None
    for batch in batches:
        undisturbed(batch)

    assert all(
        torch.equal(a, b) for a, b in zip(failing.state_dict().values(), smaller.state_dict().values(), strict=True)
    )
    assert recovering.num_steps == undisturbed.num_steps == 5


def test_zeroing_and_running_again_is_another_step():
    """Control: what a loop does that keeps the running statistics of the failed attempt."""
    model = Net(norm=True).double()
    by_hand, batch = copy.deepcopy(model), make_batch()
    OutOfMemoryAt.limit = 4
    with pytest.raises(torch.OutOfMemoryError):
        loss_fn(by_hand, batch).backward()
    OutOfMemoryAt.limit = None
    by_hand.zero_grad()
    truth = copy.deepcopy(model)
    for net in (by_hand, truth):
        loss_fn(net, batch).backward()

    assert (by_hand.norm.running_mean - truth.norm.running_mean).abs().max() > 1e-3


def test_the_smaller_size_is_remembered_and_announced_once(caplog):
    OutOfMemoryAt.limit = 3
    step = make_step(Net().double(), micro_batch_size=16)

    with caplog.at_level(logging.WARNING, logger="bigbatch"):
        results = [step(make_batch()) for _ in range(3)]

    assert [result.retries for result in results] == [3, 0, 0]
    assert step.micro_batch_size == 2
    said = [record.message for record in caplog.records if "Out of memory" in record.message]
    assert len(said) == 3
    assert "micro-batches of 16" in said[0]
    assert "made again with 8" in said[0]


def test_after_a_calm_the_size_before_is_tried_again():
    OutOfMemoryAt.limit = 4
    step = make_step(Net().double(), micro_batch_size=8, grow_after=3)
    sizes = []
    for i in range(9):
        if i == 5:
            OutOfMemoryAt.limit = None
        sizes.append(step(make_batch()).micro_batch_sizes[0])

    assert sizes == [4, 4, 4, 4, 4, 4, 4, 4, 8]  # tried in vain before step 4, and again before step 8


def test_when_not_even_one_sample_fits_nothing_has_moved():
    OutOfMemoryAt.limit = 0
    model = Net(norm=False, dropout=0.5).double()
    step = make_step(model, micro_batch_size=8)
    batch, before, rng = make_batch(), copy.deepcopy(model.state_dict()), torch.get_rng_state()

    with pytest.raises(bb.BudgetError, match=r"even with micro-batches of 1: CUDA out of memory.*Nothing was moved"):
        step(batch)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert not step.optimizers[0].state
    assert all(p.grad is None for p in model.parameters())
    assert step.num_steps == 0


def test_batch_norm_is_never_shrunk_to_one_sample():
    OutOfMemoryAt.limit = 1
    step = make_step(Net(norm=True).double(), micro_batch_size=8)

    with pytest.raises(bb.BudgetError, match="even with micro-batches of 2"):
        step(make_batch())


def test_raise_undoes_the_step_and_raises_what_happened():
    OutOfMemoryAt.limit = 4
    model = Net(norm=True).double()
    step = make_step(model, micro_batch_size=8, on_out_of_memory="raise")
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        step(make_batch())

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert step.micro_batch_size == 8


def test_a_batch_that_is_cut_already_is_not_cut_again():
    OutOfMemoryAt.limit = 4
    step = make_step(Net().double())
    x, y = make_batch()

    with pytest.raises(torch.OutOfMemoryError):
        step(bb.LogicalBatch([(x[:8], y[:8]), (x[8:], y[8:])]))


def test_another_error_is_not_taken_for_out_of_memory():
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("shapes cannot be multiplied, memory format")

    model = Net().double()
    step = bb.Step(model, broken, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=8)

    with pytest.raises(RuntimeError, match="shapes cannot"):
        step(make_batch())


class FailsInTheMiddle(torch.optim.AdamW):
    """Moves, and then runs out of memory, as many times as it is told to."""

    failures = 1

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result


@pytest.mark.parametrize("failing_step", [0, 2])
def test_out_of_memory_inside_the_optimizer_is_undone(failing_step):
    """At the first step the state that was created is taken away; at a later one it is put back."""
    model = Net().double()
    truth, batches = copy.deepcopy(model), [make_batch() for _ in range(4)]
    optimizer = FailsInTheMiddle(model.parameters(), lr=0.01)
    optimizer.failures = 0
    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=4)
    plain = make_step(truth, micro_batch_size=4)
    for i, batch in enumerate(batches):
        optimizer.failures = int(i == failing_step)
        assert step(batch).retries == int(i == failing_step)
        plain(batch)

    assert_same_weights(model, truth, tolerance=1e-12)


def test_a_large_optimizer_that_cannot_be_undone_says_so(monkeypatch):
    monkeypatch.setattr("bigbatch.stepping.optimizer_undo._MOST_BYTES", 10)
    model = Net().double()
    step = bb.Step(model, loss_fn, FailsInTheMiddle(model.parameters(), lr=0.01), micro_batch_size=4)

    with pytest.raises(bb.StateLostError, match="Go on from a saved state"):
        step(make_batch())


def test_what_must_be_done_is_tried_until_it_succeeds():
    tries = []

    def action() -> None:
        tries.append(1)
        if len(tries) < 4:
            raise MemoryError

    insist(action)

    assert len(tries) == 4


def test_an_error_that_is_not_about_memory_is_not_insisted_on():
    def action() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        insist(action)


def test_an_odd_batch_is_shrunk_to_one_sample_too():
    """Five samples by two are three micro-batches, and six there are not; by one they are five."""
    OutOfMemoryAt.limit = 1
    step = make_step(Net().double(), micro_batch_size=2)

    result = step(make_batch(5))

    assert (result.retries, result.micro_batch_sizes) == (1, (1,) * 5)


class CountsInPlainNumbers(torch.optim.Optimizer):
    """Keeps its step as an int, as SparseAdam does, and moves by it."""

    failures = 0

    def __init__(self, params: Any):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p -= 0.01 / state["step"] * p.grad
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_state_in_plain_numbers_is_put_back():
    model = Net().double()
    truth, batches = copy.deepcopy(model), [make_batch() for _ in range(6)]
    ours, plain = CountsInPlainNumbers(model.parameters()), CountsInPlainNumbers(truth.parameters())
    step = bb.Step(model, loss_fn, ours, micro_batch_size=4)
    undisturbed = bb.Step(truth, loss_fn, plain, micro_batch_size=4)
    for i, batch in enumerate(batches):
        ours.failures = int(i == 4)
        step(batch)
        undisturbed(batch)

    assert [s["step"] for s in ours.state.values()] == [6] * 4
    assert_same_weights(model, truth, tolerance=1e-12)


def test_state_that_was_loaded_since_is_what_is_put_back():
    model = Net().double()
    truth, batches = copy.deepcopy(model), [make_batch() for _ in range(5)]
    ours, plain = FailsInTheMiddle(model.parameters(), lr=0.01), FailsInTheMiddle(truth.parameters(), lr=0.01)
    ours.failures = plain.failures = 0
    step = bb.Step(model, loss_fn, ours, micro_batch_size=4)
    undisturbed = bb.Step(truth, loss_fn, plain, micro_batch_size=4)
    for i, batch in enumerate(batches):
        if i == 2:
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        ours.failures = int(i == 3)
        step(batch)
        undisturbed(batch)

    assert_same_weights(model, truth, tolerance=1e-12)
