"""Running statistics of data in batches, beside those that one pass of all of it leaves, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb


class Residual(nn.Module):
    """Four BatchNorm layers: one first, one behind it, one beside that, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())
        self.short = nn.Sequential(nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5, momentum=None))
        self.twice = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        x = self.first(x)
        x = (self.inner(x) + self.short(x)).mean((2, 3))
        return self.dropout(self.twice(self.twice(x) * 2 + 1))


def drifting(num_samples=23):
    """Each sample has a mean of its own, so that batches differ."""
    scale = torch.linspace(1, 5, num_samples).double().view(-1, 1, 1, 1)
    return torch.randn(num_samples, 2, 5, 5).double() * scale + scale.square()


def model_in_float64():
    return Residual().double()


def one_pass_of_all(model, x):
    """The plain way: reset, momentum=None, one forward in train mode; dropout is off, as it is in evaluation."""
    big = copy.deepcopy(model)
    for layer in big.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.reset_running_stats()
            layer.momentum = None
    big.train()
    big.dropout.eval()
    big(x)
    return dict(big.named_buffers())


def errors(model, expected):
    found = dict(model.named_buffers())
    return {
        name: float((found[name] - value).norm() / value.norm())
        for name, value in expected.items()
        if not name.endswith("num_batches_tracked")
    }


@pytest.mark.parametrize("sizes", [(23,), (8, 8, 7), (8, 8, 6, 1), (1,) * 23])
def test_statistics_are_those_of_one_pass_of_all_data(sizes):
    model, x = model_in_float64(), drifting()
    expected = one_pass_of_all(model, x)

    bb.recalibrate_batch_norm(model, list(x.split(list(sizes))))

    assert max(errors(model, expected).values()) <= 1e-12
    assert {int(value) for name, value in model.named_buffers() if name.endswith("tracked")} == {1, 2}


def test_one_pass_is_exact_for_the_first_layer_alone():
    model, x = model_in_float64(), drifting()
    expected = one_pass_of_all(model, x)

    bb.recalibrate_batch_norm(model, x.split(6), exact=False)

    off = errors(model, expected)
    assert max(off["first.1.running_mean"], off["first.1.running_var"]) <= 1e-12
    assert off["inner.1.running_var"] > 1e-4


def test_the_mean_of_variances_is_not_it():
    """Control: what people write, and torch's ``update_bn``."""
    model, x = model_in_float64(), drifting()
    expected = one_pass_of_all(model, x)

    torch.optim.swa_utils.update_bn(x.split(6), model)

    assert errors(model, expected)["first.1.running_var"] > 1e-2


def test_a_loader_that_shuffles_gives_the_same_in_each_pass_and_draws_nothing():
    model, x = model_in_float64(), drifting()
    expected = one_pass_of_all(model, x)
    loader = DataLoader(TensorDataset(x, torch.zeros(23)), batch_size=5, shuffle=True)
    before = torch.get_rng_state()

    bb.recalibrate_batch_norm(model, loader)

    assert max(errors(model, expected).values()) <= 1e-12
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_modes_and_frozen_layers_stay():
    model, x = model_in_float64(), drifting()
    model.short.eval()
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]

    bb.recalibrate_batch_norm(model, x.split(6))

    assert [module.training for module in model.modules()] == modes
    same = [name for name, value in model.state_dict().items() if torch.equal(value, state[name])]
    assert [name for name in state if "running" in name and name in same] == [
        "short.1.running_mean",
        "short.1.running_var",
    ]
    assert all(name in same for name, _ in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_batches_of_a_mapping_and_of_any_other_form():
    x = drifting()
    found = []
    for batches, forward in (
        ([dict(input=part) for part in x.split(6)], None),
        ([("a", part) for part in x.split(6)], lambda model, batch: model(batch[1])),
    ):
        model = nn.BatchNorm2d(2).double()
        bb.recalibrate_batch_norm(model, batches, forward=forward)
        found.append(model.running_var)

    torch.testing.assert_close(found[0], x.var((0, 2, 3)), rtol=1e-12, atol=0)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("batches", "error", "said"),
    [
        (lambda x: iter(x.split(6)), bb.BatchError, "read only once"),
        (lambda x: [], bb.LossError, "No BatchNorm layer was called"),
        (lambda x: [x, x[:, :1]], RuntimeError, "channels"),
        (lambda x: Shrinking(x), bb.BatchError, "second pass"),
    ],
)
def test_after_an_error_everything_is_as_before(batches, error, said):
    model, x = model_in_float64(), drifting()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.modules()]

    with pytest.raises(error, match=said):
        bb.recalibrate_batch_norm(model, batches(x))

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())


class Shrinking:
    """Gives less each time it is read."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        self.x = self.x[:-4]
        return iter(self.x.split(6))


def test_one_value_per_channel_has_no_variance():
    with pytest.raises(bb.BatchError, match="one value per channel"):
        bb.recalibrate_batch_norm(nn.BatchNorm1d(3), [torch.randn(1, 3)])


def test_a_model_without_such_layers_is_told():
    with pytest.warns(bb.BigBatchWarning, match="no BatchNorm layer"):
        bb.recalibrate_batch_norm(nn.Linear(2, 2), [])
