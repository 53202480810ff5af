"""Running out of memory in the middle of a step: what is finished is kept where that is exact, and only there."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from bigbatch.stepping import keeping
from bigbatch.stepping.keeping import Part
from tests.reference import Gradients, RecordingSGD, big_batch_gradients, gradient_error, gradients
from tests.torture.worlds import LowRank

BATCH_SIZE, SIZE = 12, 4
Batch = dict[str, Tensor]


class FailAt(TorchDispatchMode):
    """The n-th operation in the forwards and backwards of a step runs out of memory; with 0 they are counted."""

    def __init__(self, *numbers: int):
        super().__init__()
        self.numbers, self.count = numbers, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise all of dynamo is imported, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.numbers:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """A small language model whose head is its embedding, and whose block is used twice."""

    def __init__(self, *, dropout: float = 0.0, recompute: bool | None = None, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=sparse)
        self.norm = nn.LayerNorm(8)
        self.mixer = nn.Linear(8, 24)
        self.dropout = nn.Dropout(dropout)
        self.recompute = recompute  # None, or use_reentrant
        self.head = nn.Linear(8, 11, bias=False)
        if not sparse:
            self.head.weight = self.embedding.weight

    def block(self, h: Tensor) -> Tensor:
        q, k, v = self.mixer(self.norm(h)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        return h + self.dropout(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for _ in range(2):
            h = (
                self.block(h)
                if self.recompute is None
                else checkpoint(self.block, h, use_reentrant=self.recompute, preserve_rng_state=False)
            )
        return self.head(h)


def mlp(between: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), between or nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))


def low_rank() -> nn.Module:
    return nn.Sequential(LowRank(6), nn.Tanh(), nn.Linear(6, 4))


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def token_loss(model: nn.Module, batch: Batch) -> bb.Ratio:
    losses = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum", ignore_index=-100)
    return bb.Ratio(losses, (batch["y"] != -100).sum())


def token_mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def class_batch() -> Batch:
    return {"x": torch.randn(BATCH_SIZE, 6), "y": torch.randint(0, 4, (BATCH_SIZE,))}


def token_batch() -> Batch:
    x = torch.randint(0, 11, (BATCH_SIZE, 5))
    y = torch.where(torch.arange(5) < torch.randint(1, 6, (BATCH_SIZE, 1)), x, -100)
    return {"x": x, "y": y, "labels": y}


@dataclass(frozen=True)
class Net:
    make: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    make_batch: Callable[[], Batch]
    tolerance: float = 1e-5
    scaled: bool = False
    weight: str = "samples"
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)  # pyright: ignore[reportPrivateImportUsage]
        scaler.scale(torch.ones(()))  # a failure while it is made leaves it unusable, which is another matter
        return {"weight": self.weight, "precision": scaler if self.scaled else "fp32", **dict(self.more)}


NETS = {
    "mlp": Net(mlp, class_loss, class_batch),
    "frozen": Net(low_rank, class_loss, class_batch),
    "tied": Net(Tied, token_mean, token_batch, weight="tokens"),
    "late": Net(Tied, token_loss, token_batch),
    "scaled": Net(mlp, class_loss, class_batch, tolerance=2e-2, scaled=True),
    "recomputed": Net(lambda: Tied(recompute=False), token_loss, token_batch),
    "sparse": Net(lambda: Tied(sparse=True), token_loss, token_batch),
}


def dense(found: Gradients) -> Gradients:
    return {name: None if gradient is None else gradient.to_dense() for name, gradient in found.items()}


class Attacked:
    """A step of a net under attack, and what it must be."""

    def __init__(self, net: Net):
        torch.manual_seed(0)
        self.net, self.model, self.batch = net, net.make(), net.make_batch()
        self.batch["index"] = torch.arange(BATCH_SIZE)
        self.plain: dict[tuple[int, ...], Gradients] = {}
        self.on_forward: Callable[[], None] = lambda: None
        self.truth = dense(big_batch_gradients(self.model, self._mean, self.batch))

    def _mean(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = self.net.loss_fn(model, batch)
        return loss.numerator / loss.denominator if isinstance(loss, bb.Ratio) else loss  # pyright: ignore

    def run(self, *numbers: int, size: int = SIZE) -> None:
        """Make the step while these operations fail."""
        self.model.zero_grad()
        self.ran: list[tuple[int, int]] = []  # first sample and length of each forward
        self.mode = FailAt(*numbers)
        self.landed: list[Part] = []
        trained = RecordingSGD(self.model)
        step = bb.Step(self.model, self._watched, trained, micro_batch_size=size, **self.net.options)
        run = step.accumulator.run

        def run_under_attack(*args: Any, **keywords: Any) -> Any:
            keeping = step.accumulator.keeping
            with self.mode:
                done = run(*args, **keywords)
            self.landed = keeping.landed if keeping else []
            return done

        step.accumulator.run = run_under_attack  # pyright: ignore[reportAttributeAccessIssue]
        self.result = step(self.batch)
        self.found = dense(trained.seen[0])

    def _watched(self, model: nn.Module, batch: Batch) -> Any:
        with torch._C._DisableTorchDispatch():
            self.on_forward()
            self.ran.append((int(batch["index"][0]), len(batch["index"])))
        return self.net.loss_fn(model, batch)

    def accumulated(self, sizes: tuple[int, ...]) -> Gradients:
        """What undisturbed micro-batches of these sizes add up to."""
        if sizes not in self.plain:
            parts = zip(*(value.split(sizes) for value in self.batch.values()), strict=True)
            model = copy.deepcopy(self.model)
            optimizer = RecordingSGD(model)
            step = bb.Step(model, self.net.loss_fn, optimizer, **self.net.options)
            step(bb.LogicalBatch([dict(zip(self.batch, part, strict=True)) for part in parts]))
            self.plain[sizes] = dense(optimizer.seen[0])
        return self.plain[sizes]

    def assert_exact(self) -> None:
        """Near the big batch in float64, and bit by bit what its own micro-batches add up to."""
        assert sum(self.result.micro_batch_sizes) == BATCH_SIZE
        error = gradient_error(self.found, self.truth)
        assert error < self.net.tolerance, (self.mode.numbers, error)
        for name, p in self.model.named_parameters():
            sizes = self._sizes_of(p)
            expected, found = self.accumulated(sizes)[name], self.found[name]
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert torch.equal(found, expected), (self.mode.numbers, name, sizes)

    def _sizes_of(self, p: Tensor) -> tuple[int, ...]:
        """Those that were reported, but for the samples whose gradient this parameter has from one backward."""
        whole = [part for part in self.landed if any(p is other for other in part.parameters or ())]
        sizes, start = [], 0
        for size in self.result.micro_batch_sizes:
            inside = next((part for part in whole if part.start <= start < part.stop), None)
            if inside is None or inside.start == start:
                sizes.append(size if inside is None else inside.stop - inside.start)
            start += size
        return tuple(sizes)


@pytest.fixture(autouse=True)
def _many_recoveries(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.ERROR, logger="bigbatch")
    yield
    gc.unfreeze()


def attack_at(net: Net, num_points: int) -> Counter[str]:
    """Let so many operations of a step fail, one at a time; how often what happened."""
    attacked, seen = Attacked(net), Counter[str]()
    attacked.run()
    gc.freeze()  # each recovery collects garbage, among all that is imported by now
    for number in range(1, attacked.mode.count + 1, math.ceil(attacked.mode.count / num_points)):
        attacked.run(number)
        attacked.assert_exact()
        sizes = attacked.result.micro_batch_sizes
        seen["tried again"] += attacked.result.retries > 0
        seen["began anew"] += attacked.result.retries > 1
        seen["kept"] += sizes[0] == SIZE
        seen["landed"] += bool(attacked.landed)
        if sizes[0] == SIZE:
            # Each forward that was finished has run once; that of the failed micro-batch had perhaps begun.
            finished = [place for place in attacked.ran if sizes[0] == place[1]]
            assert len(finished) == len(set(finished))
            assert len(attacked.ran) <= len(sizes) + 1
    return seen


@pytest.mark.parametrize("name", NETS)
def test_whatever_operation_fails_the_gradient_is_that_of_the_batch(name):
    seen = attack_at(NETS[name], num_points=25)

    assert seen["kept"] > 0.5 * seen["tried again"]
    assert seen["landed"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_of_all_operations_each(name):
    assert attack_at(NETS[name], num_points=1000)["landed"] >= 20


@pytest.mark.parametrize("name", ["mlp", "late"])
def test_a_second_failure_is_kept_from_too(name):
    """Also of the same micro-batch: then some parameters lack all of it, some a half, and some nothing."""
    attacked, seen = Attacked(NETS[name]), Counter[str]()
    attacked.run(size=6)
    count = attacked.mode.count  # of two micro-batches
    gc.freeze()
    for after in range(1, count, max(1, count // 30)):
        attacked.run(count - 6, count - 6 + after, size=6)
        attacked.assert_exact()
        seen["three sizes"] += len(set(attacked.result.micro_batch_sizes)) >= 3
        seen["landed twice"] += len(attacked.landed) >= 2

    assert min(seen["three sizes"], seen["landed twice"]) > 0, seen


def test_only_the_failed_micro_batch_is_cut_and_the_gradients_stay_where_they_are():
    """No copy of them is made."""
    attacked, places = Attacked(NETS["mlp"]), []
    attacked.run()
    number, parameter = attacked.mode.count - 25, next(attacked.model.parameters())
    attacked.on_forward = lambda: places.append(None if parameter.grad is None else parameter.grad.data_ptr())
    attacked.run(number)

    assert attacked.result.micro_batch_sizes == (4, 4, 2, 2)
    assert attacked.ran == [(0, 4), (4, 4), (8, 4), (8, 2), (10, 2)]
    assert attacked.result.retries == 1
    assert len(set(places[1:])) == 1
    assert abs(float(attacked.result.loss) - float(attacked._mean(attacked.model, attacked.batch).detach())) < 1e-6


def test_the_failed_micro_batch_for_all_parameters_again_counts_some_twice():
    """Control: what its backward has left in some parameters is a large part of the gradient."""
    attacked = Attacked(NETS["mlp"])
    attacked.run()
    wrong = []
    for number in range(1, attacked.mode.count):
        model, parts = (
            copy.deepcopy(attacked.model),
            [{k: v[i : i + 4] for k, v in attacked.batch.items()} for i in (0, 4, 8)],
        )
        with contextlib.suppress(torch.OutOfMemoryError), FailAt(number):
            while parts:
                (class_loss(model, parts[0]) / 3).backward()
                parts.pop(0)
        for part in parts:
            (class_loss(model, part) / 3).backward()
        wrong.append(gradient_error(gradients(model), attacked.truth) > 0.1)

    assert sum(wrong) > 0.15 * len(wrong)


class Nested(torch.autograd.Function):
    """Recomputes in backward and runs a backward of its own there, which adds to all that it reaches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), grads[0])
        return x.grad, None


class Shared(nn.Module):
    """The same layer twice, recomputed by hand: each backward adds to its gradients two times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(2):
            h = torch.tanh(Nested.apply(h, self.shared))  # pyright: ignore[reportArgumentType]
        return self.last(h)


@pytest.mark.parametrize(
    "net",
    [
        Net(Shared, class_loss, class_batch),
        Net(lambda: Tied(recompute=True), token_loss, token_batch),
    ],
    ids=["a backward inside the backward", "reentrant checkpoint"],
)
@pytest.mark.parametrize("is_seen", [True, False])
def test_where_a_gradient_may_be_half_there_the_step_begins_anew(net, is_seen, monkeypatch):
    """Where the graph does not show it, as of a node in C++, the first is noticed when it adds to what was left out."""
    if not is_seen:
        monkeypatch.setattr(keeping, "_may_be_nested", lambda gradients, landed: False)
    seen = attack_at(net, num_points=40)

    assert 0 < seen["kept"] < seen["tried again"]
    assert (seen["began anew"] > 0) != is_seen


class Adapters(nn.Module):
    """Layers that are recomputed by nodes with a backward of their own, behind a frozen layer: as adapters are trained.

    The graph of the loss ends at the output of the frozen layer, and shows none of their parameters.
    """

    def __init__(self, recompute: Callable[[nn.Module, Tensor], Tensor], *, branch: bool, shared: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.frozen, self.head = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 4).requires_grad_(False)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        self.layers = nn.ModuleList([layers[0]] * 3 if shared else layers)
        self.branch = nn.Linear(6, 8) if branch else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(x).requires_grad_()
        beside = self.branch(x) if self.branch is not None else 0.0
        for layer in self.layers:
            h = self.recompute(layer, h)
        return self.head(h + beside)


def reentrant(layer: nn.Module, h: Tensor) -> Any:
    return checkpoint(layer, h, use_reentrant=True, preserve_rng_state=False)


def nested(layer: nn.Module, h: Tensor) -> Any:
    return Nested.apply(h, layer)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("branch", "shared"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("recompute", [reentrant, nested])
def test_adapters_that_the_graph_does_not_show_get_their_whole_gradient(recompute, branch, shared):
    net = Net(lambda: Adapters(recompute, branch=branch, shared=shared), class_loss, class_batch)
    seen = attack_at(net, num_points=40)

    assert 0 < seen["kept"] < seen["tried again"]


def test_adapters_would_lose_a_part_of_their_gradient_if_nobody_looked_at_the_graph(monkeypatch):
    """Control for the test above."""
    monkeypatch.setattr(keeping, "_may_be_nested", lambda gradients, landed: False)
    attacked, errors = (
        Attacked(Net(lambda: Adapters(reentrant, branch=False, shared=False), class_loss, class_batch)),
        [],
    )
    attacked.run()
    gc.freeze()
    for number in range(1, attacked.mode.count + 1, 5):
        attacked.run(number)
        errors.append(gradient_error(attacked.found, attacked.truth))

    assert max(errors) > 1e-1


def test_autograd_adds_once_in_a_backward_to_a_parameter_that_is_used_twice():
    """What the module builds on; and the cases above are those where it does not."""
    for model, batch, more in ((Tied(), token_batch(), 1), (Shared(), class_batch(), 2)):
        parameter = model.shared.weight if isinstance(model, Shared) else model.embedding.weight
        versions = []
        for _ in range(3):
            logits = model(batch["x"])
            F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten()).backward()
            versions.append(parameter.grad._version)
        assert [b - a for a, b in itertools.pairwise(versions)] == [more, more]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(x)


def hooked(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = mlp()
        if kind == "parameter":
            model[0].weight.register_hook(lambda grad: grad * 2)
        else:
            model[1].register_full_backward_hook(lambda module, ours, theirs: None)
        return model

    return make


OLD_WAY = {
    "dropout": lambda: mlp(nn.Dropout(0.3)),
    "BatchNorm": lambda: mlp(nn.BatchNorm1d(8)),
    "InstanceNorm": lambda: mlp(
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())
    ),
    "a buffer": lambda: mlp(Counting()),
    "a hook of a parameter": hooked("parameter"),
    "a hook of a module": hooked("module"),
}


@pytest.mark.parametrize("name", OLD_WAY)
def test_what_forwards_leave_behind_is_undone_with_the_whole_attempt(name):
    """The step is then that of the smaller size, bit for bit, with its random numbers and buffers."""
    ends = []
    for numbers, size in (((), 2), ((110,), 4)):
        attacked = Attacked(Net(OLD_WAY[name], class_loss, class_batch))
        torch.manual_seed(5)
        attacked.run(*numbers, size=size)
        assert attacked.result.micro_batch_sizes == (2,) * 6
        assert attacked.result.retries == len(numbers)
        ends.append([*attacked.found.values(), *attacked.model.buffers(), torch.get_rng_state()])

    assert all(torch.equal(ours, plain) for plain, ours in zip(*ends, strict=True))


def test_batchnorm_that_is_frozen_or_in_eval_mode_does_not_hinder():
    frozen = dataclasses.replace(NETS["mlp"], make=lambda: mlp(nn.BatchNorm1d(8)), more=(("batch_norm", "frozen"),))
    evaluating = dataclasses.replace(NETS["mlp"], make=lambda: mlp(nn.BatchNorm1d(8)).eval())
    for net in (frozen, evaluating):
        attacked = Attacked(net)
        attacked.run(110)
        assert attacked.result.micro_batch_sizes in {(4, 4, 2, 2), (4, 2, 2, 2, 2)}


def test_denominators_of_several_terms_are_left_to_the_old_way():
    def two(model: nn.Module, batch: Batch) -> Any:
        return {"all": class_loss(model, batch), "late": bb.Ratio(model(batch["x"]).square().sum(), len(batch["x"]))}

    attacked = Attacked(NETS["mlp"])
    attacked.net = dataclasses.replace(NETS["mlp"], loss_fn=two)
    attacked.run(150)

    assert attacked.result.micro_batch_sizes == (2,) * 6


def test_when_nothing_fits_any_more_what_was_kept_is_dropped():
    attacked = Attacked(NETS["mlp"])
    attacked.run()
    before = copy.deepcopy(attacked.model.state_dict())
    with pytest.raises(bb.BudgetError, match="Nothing was moved"):
        attacked.run(*range(attacked.mode.count // 2, 10_000))

    assert all(p.grad is None for p in attacked.model.parameters())
    assert all(torch.equal(before[name], value) for name, value in attacked.model.state_dict().items())
    attacked.run()
    attacked.assert_exact()


def test_a_failure_after_the_last_micro_batch_begins_anew():
    """Gradients may have been corrected, unscaled or clipped by then."""

    class Fails(torch.optim.SGD):
        failures = 1

        def step(self, closure: Any = None) -> Any:
            if self.failures:
                self.failures -= 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().step(closure)

    model, batch = mlp(), class_batch()
    step = bb.Step(model, class_loss, Fails(model.parameters(), lr=0.1), micro_batch_size=4)

    assert step(batch).micro_batch_sizes == (2,) * 6
