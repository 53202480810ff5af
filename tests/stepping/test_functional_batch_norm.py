"""A step says that it is not exact where ``F.batch_norm`` in a forward, and no layer, sees micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from bigbatch.stepping.normalization import functional
from tests.reference import assert_same_gradients, gradient_error, gradients

CHANNELS = 4
Norm = Callable[["Functional", Tensor], Tensor]


class Functional(nn.Module):
    """A convolution, a norm that is a function, and a mean over pixels; in float64."""

    def __init__(self, norm: Norm, *layers: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, CHANNELS, 2)
        self.layers = nn.Sequential(*layers)
        self.weight = nn.Parameter(torch.rand(CHANNELS) + 0.5)
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.register_buffer("var", torch.ones(CHANNELS))
        self.norm = norm
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self, self.layers(self.conv(x))).sin().flatten(1)


def by_batch(m: Functional, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, m.weight, training=True)


def by_batch_in_train_mode(m: Functional, x: Tensor) -> Tensor:
    return F.batch_norm(x, m.mean.clone(), m.var.clone(), m.weight, training=m.training)


def by_batch_recomputed(m: Functional, x: Tensor) -> Tensor:
    return checkpoint(lambda x: by_batch(m, x), x, use_reentrant=False)


def by_batch_and_viewed(m: Functional, x: Tensor) -> Tensor:
    """What comes after it looks like what comes after InstanceNorm."""
    return by_batch(m, x).flatten(2).transpose(1, 2)


def transposed(m: Functional, x: Tensor) -> Tensor:
    """One sample for the function, and all samples in its statistics."""
    return F.batch_norm(x.flatten(1).T[None], None, None, training=True)[0].T


def by_sample(m: Functional, x: Tensor) -> Tensor:
    return F.instance_norm(x, weight=m.weight)


def by_sample_by_hand(m: Functional, x: Tensor) -> Tensor:
    return F.batch_norm(x.reshape(1, -1, 3, 3), None, None, training=True).reshape(x.shape)


def by_running_statistics(m: Functional, x: Tensor) -> Tensor:
    return F.batch_norm(x, m.mean, m.var, m.weight)


COUPLED = [by_batch, by_batch_in_train_mode, by_batch_recomputed, by_batch_and_viewed, transposed]
APART = [by_sample, by_sample_by_hand, by_running_statistics]


def images(num_samples: int = 8) -> Tensor:
    return torch.randn(num_samples, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1).mean()


def step_of(model: nn.Module, micro_batch_size: int, **options: Any) -> bb.Step:
    return bb.Step(
        model, loss_fn, torch.optim.SGD(model.parameters(), 0.01), micro_batch_size=micro_batch_size, **options
    )


@pytest.mark.parametrize(("norm", "size"), [*((norm, 3) for norm in COUPLED), (by_batch, 1), (by_batch_and_viewed, 1)])
@pytest.mark.parametrize("policy", ["merge", "exact", "frozen", "native"])
def test_a_function_that_sees_micro_batches_is_named_once(norm, policy, size, caplog):
    step = step_of(Functional(norm), size, batch_norm=policy)

    assert [step(images()).exactness for _ in range(3)] == ["approximate"] * 3
    assert [r.message.startswith("The step is approximate: F.batch_norm") for r in caplog.records] == [True]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("norm", APART)
def test_functions_that_see_one_sample_or_none_are_exact(norm, size, caplog):
    step = step_of(Functional(norm), size)

    assert [step(images()).exactness for _ in range(2)] == ["exact"] * 2
    assert not caplog.records


@pytest.mark.parametrize("norm", [*COUPLED, *APART])
def test_the_gradient_is_that_of_the_big_batch_just_where_it_is_said(norm):
    model = Functional(norm)
    truth = copy.deepcopy(model)
    loss_fn(truth, images()).backward()

    exactness = bb.accumulate(model, loss_fn, images(), micro_batch_size=3).exactness

    assert (gradient_error(gradients(model), gradients(truth)) < 1e-12) == (exactness == "exact") == (norm in APART)


def test_one_micro_batch_is_exact():
    assert step_of(Functional(by_batch), 8)(images()).exactness == "exact"


@pytest.mark.parametrize(("norm", "expected"), [(by_batch, "approximate"), (by_sample, "exact")])
def test_layers_that_are_pooled_do_not_hide_it(norm, expected):
    step = step_of(Functional(norm, nn.BatchNorm2d(CHANNELS)), 3, batch_norm="exact")

    assert step(images(3)).exactness == "exact"  # all in one, where torch's own layer runs
    assert step(images()).exactness == expected


@pytest.mark.parametrize(("norm", "expected"), [(by_batch, "approximate"), (by_sample, "exact")])
def test_layers_that_are_frozen_do_not_hide_it(norm, expected):
    step = step_of(Functional(norm, nn.BatchNorm2d(CHANNELS)), 3, batch_norm="frozen")

    assert step(images()).exactness == expected


def test_layers_in_train_mode_are_named_themselves(caplog):
    step = step_of(Functional(by_batch, nn.BatchNorm2d(CHANNELS)), 3)

    assert step(images()).exactness == "approximate"
    assert caplog.messages[0].startswith("The step is approximate: BatchNorm")


def test_a_model_switched_between_train_and_eval_is_followed():
    model = Functional(by_batch_in_train_mode)
    step = step_of(model, 3)
    found = []
    for training in (False, True, False, True):
        model.train(training)
        found.append(step(images()).exactness)

    assert found == ["exact", "approximate"] * 2


def test_a_module_that_joins_the_model_is_looked_at():
    model = nn.Sequential(Functional(by_sample))
    step = step_of(model, 3)
    before = step(images()).exactness
    model.append(Functional(by_batch))
    model[1].conv = nn.Identity()
    model[1].forward = lambda x: by_batch(model[1], x.view(-1, CHANNELS, 3, 3)).flatten(1)

    assert (before, step(images()).exactness) == ("exact", "approximate")


def test_a_whole_batch_loss_may_normalise_by_the_batch_and_its_forward_may_not():
    def normalised(outputs: Tensor, batch: Any) -> Tensor:
        return F.batch_norm(outputs, None, None, training=True).sin().square().mean()

    loss = bb.WholeBatchLoss(lambda m, x: m(x), normalised)
    found = {}
    for norm in (by_sample, by_batch):
        model = Functional(norm)
        found[norm] = bb.accumulate(model, loss, images(), micro_batch_size=3).exactness
        if norm is by_sample:
            truth = Functional(norm)
            normalised(truth(images()), images()).backward()
            assert_same_gradients(gradients(model), gradients(truth))

    assert found == {by_sample: "exact", by_batch: "approximate"}


@pytest.mark.parametrize("layers", [(), (nn.BatchNorm2d(CHANNELS),)])
def test_the_graph_is_walked_once_and_not_in_later_steps(layers, monkeypatch):
    walks = []
    graph_of = functional.graph_of
    monkeypatch.setattr(functional, "graph_of", lambda values: walks.append(1) or graph_of(values))
    step = step_of(Functional(by_sample, *layers), 2)
    for _ in range(4):
        step(images())

    assert len(walks) == (0 if layers else 1)
