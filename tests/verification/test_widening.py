from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigbatch.verification.widening import Widened, switch_dropout_off, wide_batch, widened

HEADS = nn.MultiheadAttention(4, 2, dropout=0.5)
DROPS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of maps": lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "attention, by place": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
    "heads": lambda x: HEADS(x, x, x)[0],
}


@pytest.mark.parametrize("name", DROPS)
def test_no_dropout_draws(name):
    x, mode = torch.randn(3, 2, 4), Widened(torch.float64)
    with widened(mode):
        first, second = DROPS[name](x), DROPS[name](x)

    assert torch.equal(first, second)
    assert mode.switched_dropout_off


@pytest.mark.parametrize("name", DROPS)
def test_outside_they_draw(name):
    """Control."""
    x = torch.randn(3, 2, 4)

    assert not torch.equal(DROPS[name](x), DROPS[name](x))


def test_what_is_narrow_becomes_wide():
    weights = torch.tensor([0.1, 0.2])
    with widened(Widened(torch.float64)):
        found = [
            torch.ones(2) * weights,
            torch.ones(2, dtype=torch.float32),
            torch.ones(2).to(torch.bfloat16),
            torch.ones(2).half(),
            torch.arange(2).float(),
            weights + weights,
            F.softmax(torch.ones(2), 0, dtype=torch.float32),
        ]

    assert [t.dtype for t in found] == [torch.float64] * len(found)
    assert weights.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_whole_numbers_and_what_is_in_float32_already_stay():
    with widened(Widened(torch.float32)):
        assert (torch.arange(2) + 1).dtype == torch.int64
        assert torch.ones(2).half().dtype == torch.float32
        assert torch.ones(2, dtype=torch.float64).dtype == torch.float64


def test_a_batch_is_copied():
    given = {"x": torch.ones(2), "y": torch.arange(2), "name": "a"}
    copied = wide_batch(given, torch.float64)
    copied["y"].zero_()

    assert copied["x"].dtype == torch.float64
    assert given["y"].tolist() == [0, 1]
    assert copied["name"] == "a"


def test_layers_that_drop_are_named():
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0), nn.Dropout(0.1).eval(), nn.LSTM(2, 2, 2, dropout=0.3))

    assert switch_dropout_off(model) == ["0", "3"]
    assert model[3].dropout == 0.0
    assert switch_dropout_off(model) == []
