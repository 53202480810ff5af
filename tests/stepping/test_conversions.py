"""BatchNorm replaced by normalization of one sample: what is carried over, what is refused, and that a cut is exact."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.errors import OptionError
from tests.reference import assert_same_gradients, big_batch_gradients, gradient_error, gradients

CONVERSIONS = {"group": bb.to_group_norm, "layer": bb.to_layer_norm, "instance": bb.to_instance_norm}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 48, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(48, eps=1e-3)
        self.body = nn.Sequential(nn.Conv2d(48, 6, 3), nn.BatchNorm2d(6, affine=False), nn.ReLU())
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(torch.relu(self.bn1(self.conv(x)))).mean((2, 3)))


def squared(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def images(num_samples=13):
    return dict(x=torch.randn(num_samples, 3, 6, 6).double() * 2 + 1, y=torch.randn(num_samples, 2).double())


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_after_conversion_any_cut_is_the_big_batch(kind):
    model, batch = CONVERSIONS[kind](Network().double()), images()
    expected = big_batch_gradients(model, squared, batch)

    result = bb.accumulate(model, squared, batch, micro_batch_size=4)

    assert result.exactness == "exact"
    assert_same_gradients(gradients(model), expected, tolerance=1e-12)


def test_before_conversion_it_is_far_from_it():
    """Control: BatchNorm in the same network, with the same cut."""
    model, batch = Network().double(), images()
    expected = big_batch_gradients(model, squared, batch)

    bb.accumulate(model, squared, batch, micro_batch_size=4)

    assert gradient_error(gradients(model), expected) > 1e-3


def test_each_kind_normalizes_what_its_name_says():
    def standardized(x, dims):
        return (x - x.mean(dims, keepdim=True)) / (x.var(dims, correction=0, keepdim=True) + 1e-3).sqrt()

    x = torch.randn(5, 48, 4, 4, dtype=torch.float64) * 3 + 7
    layer = nn.BatchNorm2d(48, eps=1e-3).double()
    by_group = standardized(x.view(5, 24, 2, 16), (2, 3)).view_as(x)

    torch.testing.assert_close(bb.to_group_norm(copy.deepcopy(layer))(x), by_group)
    torch.testing.assert_close(bb.to_layer_norm(copy.deepcopy(layer))(x), standardized(x, (1, 2, 3)))
    torch.testing.assert_close(bb.to_instance_norm(copy.deepcopy(layer))(x), standardized(x, (2, 3)))


def test_parameters_dtype_mode_and_names_are_carried_over():
    model = Network().to(torch.bfloat16)
    nn.init.normal_(model.bn1.weight)
    model.bn1.bias.requires_grad_(False)
    model.bn1.eval()
    before, names = dict(model.named_parameters()), [name for name, _ in model.named_modules()]

    assert bb.to_group_norm(model) is model

    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [name for name, _ in model.named_modules()] == names
    assert (model.bn1.training, model.body[1].training, model.bn1.eps) == (False, True, 1e-3)
    assert model.bn1.weight.dtype == torch.bfloat16
    assert model.body[1].weight is None
    assert not list(model.buffers())


def test_hooks_go_on_and_a_shared_layer_stays_shared():
    layer = nn.BatchNorm2d(4)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    model = bb.to_group_norm(nn.Sequential(layer, nn.ReLU(), layer))

    model(torch.randn(2, 4, 3, 3))

    assert model[0] is model[2]
    assert isinstance(model[0], nn.GroupNorm)
    assert seen == ["forward", "forward"]


@pytest.mark.parametrize(
    ("layer", "asked", "found"),
    [
        (nn.BatchNorm2d(64), 32, 32),
        (nn.BatchNorm2d(32), 32, 16),
        (nn.BatchNorm2d(1), 32, 1),
        (nn.BatchNorm2d(37), 32, 1),
        (nn.BatchNorm1d(64), 32, 8),
        (nn.BatchNorm1d(6), 32, 1),
        (nn.BatchNorm2d(64), 5, 4),
    ],
)
def test_the_number_of_groups_divides_the_channels_and_leaves_a_variance(layer, asked, found):
    converted = bb.to_group_norm(layer, num_groups=asked)

    assert isinstance(converted, nn.GroupNorm)
    assert converted.num_groups == found


class WithActivation(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("strange", "convert", "said"),
    [
        (WithActivation(6), bb.to_group_norm, r"body\.1 \(WithActivation\)"),
        (nn.LazyBatchNorm2d(), bb.to_layer_norm, r"body\.1 \(LazyBatchNorm2d\)"),
        (nn.BatchNorm1d(6), bb.to_instance_norm, r"body\.1 \(BatchNorm1d\) may get"),
        (nn.SyncBatchNorm(6), bb.to_instance_norm, r"body\.1 \(SyncBatchNorm\) may get"),
        (nn.BatchNorm1d(1), bb.to_group_norm, r"body\.1 \(BatchNorm1d\) has 1 channel"),
    ],
)
def test_a_layer_that_cannot_be_converted_is_named_and_nothing_changes(strange, convert, said):
    model = Network()
    model.body[1] = strange
    before = list(model.modules())

    with pytest.raises(OptionError, match=said):
        convert(model)

    assert list(model.modules()) == before


def test_a_model_without_batch_norm_is_told():
    with pytest.warns(bb.BigBatchWarning, match="no BatchNorm layer"):
        bb.to_group_norm(nn.Linear(2, 2))
