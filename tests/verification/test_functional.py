"""``F.batch_norm`` in a forward: a verdict, also where micro-batches of one sample are refused, and who calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch as bb


class Functional(nn.Module):
    def __init__(self, num_channels: int = 5):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, num_channels))
        self.bias = nn.Parameter(torch.linspace(-1, 1, num_channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=self.training)


def model_with(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), norm, nn.Tanh(), nn.Linear(5, 1))


def batch(num_samples: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_samples, 3, generator=generator), torch.randn(num_samples, 1, generator=generator)


def loss_fn(model: nn.Module, b: Any) -> Tensor:
    return (model(b[0]) - b[1]).square().mean()


@pytest.mark.parametrize("policy", ["merge", "exact", "frozen", "native"])
def test_the_verdict_names_the_module_and_the_remedy(policy):
    found = bb.verify(model_with(Functional()), loss_fn, batch(), batch_norm=policy)

    assert found.worst[1] > 1e-2
    assert found.cuts == ((5, 4), (3, 3, 3))
    (text,) = found.findings
    assert text.startswith("F.batch_norm in the forward of '1', a Functional, sees the statistics of each micro-batch")
    assert 'Write nn.BatchNorm layers and give batch_norm="exact"' in text
    assert text in str(found)


def test_the_same_model_with_a_layer_is_equal():
    """Control: the remedy, and that nothing else is wrong."""
    assert bb.verify(model_with(nn.BatchNorm1d(5)), loss_fn, batch(), batch_norm="exact").equal


@pytest.mark.parametrize(
    ("num_samples", "cuts"), [(4, ((2, 2),)), (5, ((3, 2),)), (7, ((4, 3),)), (13, ((7, 6), (5, 5, 3)))]
)
def test_no_cut_has_a_micro_batch_of_one(num_samples, cuts):
    found = bb.verify(model_with(Functional()), loss_fn, batch(num_samples))

    assert (found.cuts, found.equal) == (cuts, False)


@pytest.mark.parametrize("num_samples", [2, 3])
def test_a_batch_without_such_a_cut_is_refused(num_samples):
    with pytest.raises(bb.BatchError, match="give at least 4"):
        bb.verify(model_with(Functional()), loss_fn, batch(num_samples))


def test_a_size_that_was_given_is_not_changed():
    with pytest.raises(bb.BatchError, match="one value per channel"):
        bb.verify(model_with(Functional()), loss_fn, batch(), micro_batch_size=1)


def test_with_masks_of_dropout_the_cuts_are_the_same():
    model = model_with(nn.Sequential(Functional(), nn.Dropout(0.5)))
    found = bb.verify(model, loss_fn, batch(), dropout="per-sample")

    assert not found.equal
    assert "the forward of '1.0', a Functional," in found.findings[0]


def test_images_are_cut_into_single_ones():
    images = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(2)), batch(4)[1]
    model = nn.Sequential(nn.Conv2d(3, 2, 3), Functional(2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 1))
    found = bb.verify(model, loss_fn, images)

    assert found.cuts == ((3, 1), (1, 1, 1, 1))
    assert "'1', a Functional," in found.findings[0]


def test_a_function_in_the_loss_is_said_to_be_there():
    def normalised(model: nn.Module, b: Any) -> Tensor:
        return (F.batch_norm(model(b[0]), None, None, training=True) - b[1]).square().mean()

    found = bb.verify(model_with(nn.Identity()), normalised, batch())

    assert found.findings[0].startswith("F.batch_norm in the loss sees the statistics")


def test_it_is_named_beside_layers():
    found = bb.verify(model_with(nn.Sequential(nn.BatchNorm1d(5), Functional())), loss_fn, batch())

    assert [text[:12] for text in found.findings] == ["BatchNorm: t", "F.batch_norm"]


def test_the_forward_of_a_whole_batch_loss_is_looked_at_and_the_loss_is_not():
    def normalised(outputs: Tensor, b: Any) -> Tensor:
        return (F.batch_norm(outputs, None, None, training=True) - b[1]).square().mean()

    loss = bb.WholeBatchLoss(lambda m, b: m(b[0]), normalised)

    assert bb.verify(model_with(nn.Identity()), loss, batch()).equal
    assert "'1', a Functional," in bb.verify(model_with(Functional()), loss, batch()).findings[0]


def test_what_does_not_couple_is_not_named():
    """Running statistics, and a norm of each sample that is written as one of a single sample with more channels."""

    class BySample(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x.reshape(1, len(x), -1), None, None, training=True)[0]

    class Running(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, torch.zeros(5), torch.ones(5))

    for model in (model_with(Running()), model_with(BySample())):
        assert bb.verify(model, loss_fn, batch()).equal
        found = bb.verify(model, lambda m, b: loss_fn(m, b) * len(b[0]), batch())
        assert len(found.findings) == 1
        assert "bb.Sum(loss)" in found.findings[0]


def test_what_has_no_graph_for_a_step_to_look_at_is_found():
    """The data itself is normalised, and no gradient goes there: a step does not see it, and calls itself exact."""

    class OfData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_with(nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(F.batch_norm(x, None, None, training=True))

    assert bb.accumulate(OfData(), loss_fn, batch(), micro_batch_size=3).exactness == "exact"
    assert "the forward of OfData sees" in bb.verify(OfData(), loss_fn, batch()).findings[0]
