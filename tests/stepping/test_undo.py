"""What a forward changes beside the gradients: kept when a step counts, put back when it does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.stepping.generators import Generators
from bigbatch.stepping.undo import Undo

NUM_FEATURES = 16


class InPlace(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Rebinding(nn.Module):
    """Puts a new tensor where its buffer is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(NUM_FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average * 0.9 + x.detach().mean(0) * 0.1
        return x


class Growing(nn.Module):
    """A table that is made larger when it is too small, as for rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = torch.arange(float(len(x)))
        return x


class Appearing(nn.Module):
    """A buffer that is None before the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().mean(0) if self.seen is None else self.seen + 1
        return x


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * 0.1


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(NUM_FEATURES, NUM_FEATURES))


def old_spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(NUM_FEATURES, NUM_FEATURES))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "in place": InPlace,
    "rebinding": Rebinding,
    "growing": Growing,
    "noise": Noisy,
    "dropout": lambda: nn.Dropout(0.5),
    "spectral norm": spectral,
    "spectral norm of old": old_spectral,
    "batch norm": lambda: nn.BatchNorm1d(NUM_FEATURES),
}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(KINDS[kind](), nn.Linear(NUM_FEATURES, 2))


def make_batch(num_samples: int = 9) -> Tensor:
    return torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(1))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class FailsAt:
    """Fails in the forward of the ``index``-th micro-batch, or after it in backward."""

    def __init__(self, index: int | None, where: str = "forward"):
        self.index, self.where, self.calls = index, where, 0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_fn(model, x)
        now = self.calls == self.index
        self.calls += 1
        if now and self.where == "forward":
            raise RuntimeError("as if")
        if now and self.where == "backward":
            loss.register_hook(_fail)
        if now and self.where == "not finite":
            return loss * torch.nan
        return loss


def _fail(_: Tensor) -> None:
    raise RuntimeError("as if")


def state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: tensor.clone() for name, tensor in model.named_buffers()}
    found |= {name: p.detach().clone() for name, p in model.named_parameters()}
    return {**found, "rng": torch.get_rng_state(), "gradients": [p.grad for p in model.parameters()]}


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    assert found.keys() == expected.keys()
    for name in found.keys() - set(but):
        if isinstance(expected[name], Tensor):
            assert torch.equal(found[name], expected[name]), name
        else:
            assert found[name] == expected[name], name


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_after_a_failure_all_is_as_it_was(kind, index, where):
    model = make_model(kind)
    before, tensors = state(model), [id(buffer) for buffer in model.buffers()]

    with pytest.raises(RuntimeError, match="as if"):
        bb.accumulate(model, FailsAt(index, where), make_batch(), micro_batch_size=3)

    assert_same(state(model), before)
    assert [id(buffer) for buffer in model.buffers()] == tensors


@pytest.mark.parametrize("kind", list(KINDS))
def test_after_good_steps_and_then_a_failure(kind):
    model = make_model(kind)
    failing = FailsAt(None)
    step = bb.Step(model, failing, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=3)
    for _ in range(3):
        step(make_batch())
    before = state(model)
    failing.index = failing.calls + 2

    with pytest.raises(RuntimeError, match="as if"):
        step(make_batch())

    assert_same(state(model), before)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_retry_is_the_step_that_would_have_been(kind):
    """Not a bit of a failed attempt is in the step after it."""
    ends = []
    for index in (None, 3 + 1):
        model = make_model(kind)
        failing = FailsAt(index)
        step = bb.Step(model, failing, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=3)
        step(make_batch())
        if index is not None:
            with pytest.raises(RuntimeError, match="as if"):
                step(make_batch())
        step(make_batch())
        ends.append(state(model))

    assert_same(*ends)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_good_step_keeps_what_the_forwards_did(kind):
    """As the loop written by hand in the same micro-batches; BatchNorm aside, which is merged."""
    ours, by_hand = make_model(kind), make_model(kind)
    torch.manual_seed(3)
    bb.accumulate(ours, loss_fn, make_batch(), micro_batch_size=3)
    after_ours = state(ours)
    torch.manual_seed(3)
    for part in make_batch().split(3):
        (loss_fn(by_hand, part) / 3).backward()

    skip = ("gradients", "0.running_mean", "0.running_var", "0.num_batches_tracked")
    assert_same(after_ours, state(by_hand), but=skip)


def test_something_does_change_in_each_kind():
    """Control: otherwise nothing would have to be put back."""
    for kind in KINDS:
        model = make_model(kind)
        before = state(model)
        loss_fn(model, make_batch())
        with pytest.raises(AssertionError):
            assert_same(state(model), before)


@pytest.mark.parametrize("kind", ["in place", "rebinding", "spectral norm", "batch norm"])
def test_a_skipped_step_puts_buffers_back_and_leaves_the_random_numbers(kind):
    """The next step must not draw the same dropout again."""
    model = nn.Sequential(make_model(kind), nn.Dropout(0.5), nn.Linear(2, 2))
    failing = FailsAt(None, "not finite")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bb.Step(model, failing, optimizer, micro_batch_size=3, on_non_finite="skip")
    step(make_batch())
    before = state(model)
    failing.index = failing.calls + 1

    assert step(make_batch()).skipped

    assert_same(state(model), before, but=("rng",))
    assert not torch.equal(state(model)["rng"], before["rng"])


@pytest.mark.parametrize("kind", ["in place", "noise", "batch norm"])
def test_a_step_that_is_not_finite_and_raises_puts_all_back(kind):
    model = make_model(kind)
    step = bb.Step(model, FailsAt(1, "not finite"), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=3)
    before = state(model)

    with pytest.raises(bb.NonFiniteError, match="micro-batch 2"):
        step(make_batch())

    assert_same(state(model), before)


def test_a_buffer_that_was_none_is_none_again():
    model = nn.Sequential(Appearing(), nn.Linear(NUM_FEATURES, 2))

    with pytest.raises(RuntimeError, match="as if"):
        bb.accumulate(model, FailsAt(1), make_batch(), micro_batch_size=3)

    assert model[0].seen is None


def test_a_buffer_that_changes_for_the_first_time_in_the_step_that_fails():
    """In eval mode spectral norm leaves its vectors alone; the first step in train mode changes them."""
    model = nn.Sequential(spectral(), nn.Linear(NUM_FEATURES, 2)).eval()
    failing = FailsAt(None)
    step = bb.Step(model, failing, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=3)
    for _ in range(3):
        step(make_batch())
    model.train()
    before = state(model)
    failing.index = failing.calls + 1

    with pytest.raises(RuntimeError, match="as if"):
        step(make_batch())

    assert_same(state(model), before)


def test_a_module_that_joins_the_model_after_the_step_was_made():
    model = nn.Sequential(nn.Identity(), nn.Linear(NUM_FEATURES, 2))
    failing = FailsAt(None)
    step = bb.Step(model, failing, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=3)
    step(make_batch())
    model[0] = InPlace()
    step(make_batch())
    failing.index = failing.calls + 1

    with pytest.raises(RuntimeError, match="as if"):
        step(make_batch())

    assert int(model[0].calls) == 3


def test_a_failing_collate_puts_the_random_numbers_back():
    """Augmentation draws them before the first forward."""

    def collate(samples: list[Tensor]) -> Tensor:
        noise = torch.rand(len(samples), NUM_FEATURES)
        if len(samples) == 1:
            raise RuntimeError("as if")
        return torch.stack(samples) + noise

    model = make_model("in place")
    before = state(model)

    with pytest.raises(RuntimeError, match="as if"):
        bb.accumulate(model, loss_fn, list(make_batch(7)), micro_batch_size=3, collate=collate)

    assert_same(state(model), before)


def test_what_is_copied_is_what_changes():
    """The first step copies all; later ones what is small or was seen to change, and no large table."""
    model = nn.Sequential(InPlace(), nn.Linear(2, 2))
    model.register_buffer("table", torch.zeros(100_000))
    undo = Undo(model)
    copies = []
    for _ in range(3):
        undo.take(torch.device("cpu"))
        model(torch.ones(1, 2))
        copies.append([buffer.name for buffer in undo._buffers if buffer._copy is not None])
        if len(copies) < 3:
            undo.let_go()

    assert copies == [["table", "calls"], ["calls"], ["calls"]]
    undo.restore()
    assert int(model[0].calls) == 2


def test_generators_notice_a_draw_and_put_it_back():
    before = torch.get_rng_state()
    generators = Generators(torch.device("cpu"))
    assert not generators.were_used()

    torch.rand(3)

    assert generators.were_used()
    generators.restore()
    assert torch.equal(torch.get_rng_state(), before)
    assert not generators.were_used()


@pytest.mark.parametrize(
    ("kind", "exactness"),
    [("noise", "same in distribution"), ("dropout", "same in distribution"), ("in place", "exact")],
)
def test_random_numbers_in_the_forward_are_told(kind, exactness):
    model = make_model(kind)

    assert bb.accumulate(model, loss_fn, make_batch(), micro_batch_size=3).exactness == exactness
    assert bb.accumulate(model, loss_fn, make_batch(), micro_batch_size=9).exactness == "exact"


def test_a_step_that_drew_random_numbers_says_so_once_and_nothing_else(caplog):
    """Once the docstring of another text had slipped into this one."""
    model = make_model("dropout")
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=3)
    for _ in range(2):
        step(make_batch())

    (said,) = caplog.messages
    assert said.startswith("The step is same in distribution: random numbers were drawn in the forward")
    assert said.endswith('dropout="per-sample" is exact.')


def test_random_numbers_of_the_users_own_weight_are_no_dropout():
    model = copy.deepcopy(make_model("in place"))

    def weight(part: Tensor) -> float:
        torch.rand(3)
        return float(len(part))

    assert bb.accumulate(model, loss_fn, make_batch(), micro_batch_size=3, weight=weight).exactness == "exact"
