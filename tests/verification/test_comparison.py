from __future__ import annotations

import math

import pytest
import torch

from bigbatch.stepping.cosine import cosine
from bigbatch.verification.comparison import Comparison, relative_differences


def test_a_difference_is_relative_to_its_parameter():
    expected = {"b": torch.tensor([1000.0]), "a": torch.tensor([3.0, 4.0])}

    found = relative_differences({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1001.0])}, expected)

    assert found == {"a": pytest.approx(0.1), "b": pytest.approx(0.001)}
    assert list(found) == ["a", "b"]


def test_a_parameter_that_is_zero_in_truth_does_not_count_as_infinitely_far():
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}

    found = relative_differences({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-12])}, expected)

    assert 0 < found["b"] < 1e-8


def test_none_is_zeros():
    some = {"a": torch.tensor([3.0, 4.0]), "b": None}

    assert relative_differences({"a": some["a"], "b": torch.zeros(2)}, some) == {"a": 0.0, "b": 0.0}
    assert relative_differences({"a": None, "b": None}, some)["a"] == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_far(bad):
    """And not near, as every comparison with NaN would have it."""
    some = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    broken = {"a": torch.tensor([3.0, bad]), "b": torch.tensor([1.0])}

    assert relative_differences(broken, some) == {"a": math.inf, "b": 0.0}
    assert relative_differences(some, broken)["a"] == math.inf


def test_a_comparison_is_shown_as_lines():
    differences = {f"layer{i}.weight": 10.0**-i for i in range(12)}
    found = Comparison(differences, 0.5, ((3, 3, 2), (1,) * 8), findings=("A mean over tokens.",))
    lines = str(found).splitlines()

    assert lines[0] == "The cut batch and the whole batch at once, in float64: NOT equal"
    assert lines[1:3] == [
        "  cut: 3 micro-batches, at most 3 samples each",
        "  cut: 8 micro-batches, at most 1 sample each",
    ]
    assert "  layer0.weight  1.0e+00" in lines
    assert "  and 2 more, which are closer" in lines
    assert lines[-2:] == ["Found:", "  - A mean over tokens."]


def test_the_cosine_is_over_all_parameters_as_one_vector():
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0]), "c": None}
    other = {"a": torch.tensor([4.0]), "b": torch.tensor([0.0, -3.0]), "c": None}

    assert cosine(one, {name: None if value is None else 2 * value for name, value in one.items()}) == 1
    assert cosine(one, other) == 0.0
    assert cosine(one, {**other, "b": torch.tensor([0.0, 3.0])}) == pytest.approx(24 / 25)
    assert cosine(one, {**other, "b": torch.tensor([0.0, math.nan])}) == 0.0
