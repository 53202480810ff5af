"""Weights of micro-batches: they add up to that of the batch, and are right when nothing in a micro-batch counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bigbatch as bb
from bigbatch.batch.cutting import lay_out
from bigbatch.batch.sizes import micro_batch_sizes, spans
from bigbatch.batch.weighing import Weigher, has_ignored_labels, labels_of
from tests.batch.test_structure import Frozen, Typed

LABELS = torch.tensor([[1, 2, -100], [-100, 2, 3], [-100, -100, -100], [0, -100, -100]])
BATCH = {"x": torch.zeros(4, 3), "labels": LABELS}


def parts_of(batch: Any, micro_batch_size: int) -> list[tuple[Any, int]]:
    layout = lay_out(batch)
    sizes = micro_batch_sizes(layout.num_samples, micro_batch_size)
    return [(layout.cut(start, length), length) for start, length in spans(sizes)]


def weights(weight: Any, batch: Any = BATCH, micro_batch_size: int = 1) -> list[float]:
    return [by_term[None] for by_term in Weigher(weight).weigh(parts_of(batch, micro_batch_size))]


def test_samples_are_the_default():
    assert weights(None, micro_batch_size=3) == weights("samples", micro_batch_size=3) == [3.0, 1.0]


def test_tokens_are_labels_that_are_not_ignored():
    assert weights("tokens") == [2.0, 2.0, 0.0, 1.0]
    assert weights("tokens", micro_batch_size=3) == [4.0, 1.0]


def test_next_tokens_leave_the_first_column_out():
    """The last row has a label, but none that is predicted."""
    assert weights("next_tokens") == [1.0, 2.0, 0.0, 0.0]


def test_tokens_are_no_next_tokens():
    """Control: the first label of a row is what tells them apart."""
    assert sum(weights("tokens")) == 5
    assert sum(weights("next_tokens")) == 3


def test_labels_of_any_shape_are_counted():
    assert weights("tokens", {"labels": torch.tensor([1, -100, 3])}) == [1.0, 0.0, 1.0]
    assert weights("tokens", {"labels": torch.full((2, 3, 4), 7)}) == [12.0, 12.0]
    assert weights("next_tokens", {"labels": torch.full((2, 3, 4), 7)}) == [8.0, 8.0]


@pytest.mark.parametrize("number", [2, 2.5, torch.tensor(2.5), torch.tensor([2]), np.float32(2.5), Fraction(5, 2)])
def test_a_function_may_return_any_number(number):
    assert weights(lambda batch: number) == [float(number)] * 4


def test_a_comparison_counts_for_one():
    assert weights(lambda batch: bool(batch["labels"][0, 0] > 0)) == [1.0, 0.0, 0.0, 0.0]


def test_a_function_gets_the_micro_batch():
    seen = []

    weights(lambda batch: seen.append(batch["labels"]) or 1, micro_batch_size=3)

    assert [len(labels) for labels in seen] == [3, 1]
    assert torch.equal(torch.cat(seen), LABELS)


def test_each_term_may_have_a_weight_of_its_own():
    found = Weigher({"a": "tokens", "b": None, "c": lambda batch: 0.5}).weigh(parts_of(BATCH, 3))

    assert found == [{"a": 4.0, "b": 3.0, "c": 0.5}, {"a": 1.0, "b": 1.0, "c": 0.5}]


def test_tensors_are_read_in_one_go(monkeypatch):
    """Each read would make the host wait for the device."""
    reads = []
    to_list = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or to_list(tensor))

    Weigher({"a": "tokens", "b": "next_tokens"}).weigh(parts_of(BATCH, 1))

    assert reads == [(8,)]


def test_samples_need_no_look_at_the_micro_batches():
    assert Weigher("samples").weigh([(object(), 3)]) == [{None: 3.0}]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.lists(st.sampled_from([-100, 0, 1, 7]), min_size=3, max_size=3), min_size=1, max_size=9),
    st.integers(1, 10),
    st.sampled_from(["samples", "tokens", "next_tokens"]),
)
def test_weights_of_any_cut_add_up(labels, micro_batch_size, weight):
    batch = {"labels": torch.tensor(labels)}

    assert sum(weights(weight, batch, micro_batch_size)) == sum(weights(weight, batch, len(labels)))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (-1, "weight returned -1; a weight is finite and not negative"),
        (-0.5, "weight returned -0.5;"),
        (math.nan, "weight returned nan;"),
        (math.inf, "weight returned inf;"),
        (torch.tensor(-2), "weight returned -2.0;"),
        (torch.tensor(math.nan), "weight returned nan;"),
        (torch.ones(2), r"weight returned a tensor of shape \(2,\); it is one number"),
        (torch.ones(0), r"weight returned a tensor of shape \(0,\)"),
        (None, r"weight returned None \(NoneType\); it is one number per micro-batch"),
        ("3", r"weight returned '3' \(str\)"),
        ([1], r"weight returned \[1\] \(list\)"),
        (1j, r"weight returned 1j \(complex\)"),
        (torch.tensor(1j), "weight returned .*1.*j"),
        (np.ones(2), "weight returned"),
        (np.array(["a"]), "weight returned"),
    ],
)
def test_what_is_no_weight_is_refused(returned, message):
    with pytest.raises(bb.LossError, match=message):
        weights(lambda batch: returned)


def test_a_bad_weight_names_its_term():
    with pytest.raises(bb.LossError, match="weight returned -1 for the term 'policy'"):
        Weigher({"policy": lambda batch: -1}).weigh(parts_of(BATCH, 2))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("token", r"weight is 'token'; it is \"samples\", \"tokens\", \"next_tokens\", a function"),
        (5, "weight is 5; it is"),
        (["samples"], r"weight is \['samples'\]; it is"),
        ({}, r"weight=\{\} names no term; give a weight for each"),
        ({"a": "rows"}, "weight for the term 'a' is 'rows'"),
        ({"a": {"b": "samples"}}, "weight for the term 'a' is {'b'"),
    ],
)
def test_a_weight_that_there_is_not_is_refused(weight, message):
    with pytest.raises(bb.OptionError, match=message):
        Weigher(weight)


@pytest.mark.parametrize(
    "batch",
    [
        BATCH,
        {"inputs": {"deep": [torch.zeros(4), Typed(torch.zeros(4), {"labels": LABELS})]}},
        ({"labels": LABELS}, torch.zeros(4)),
        Frozen(torch.zeros(4), {"labels": LABELS}),
    ],
)
def test_labels_are_found_wherever_they_are(batch):
    assert labels_of(batch) is LABELS


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4), LABELS), "the batch has none. Name the targets 'labels' .* or give a function: weight="),
        ({"label": LABELS}, "the batch has none"),
        (LABELS, "the batch has none"),
        ({"a": {"labels": LABELS}, "b": [{"labels": LABELS}]}, r"the batch has \['a.labels', 'b.0.labels'\]"),
        ({"labels": LABELS, "b": {"labels": None}}, r"\['b.labels', 'labels'\]"),
    ],
)
def test_labels_that_are_not_one_leaf_are_refused(batch, message):
    with pytest.raises(bb.BatchError, match=message):
        labels_of(batch)


@pytest.mark.parametrize("labels", [LABELS.numpy(), LABELS.tolist(), None])
def test_labels_that_are_no_tensor_are_refused_by_their_kind(labels):
    """That a leaf named labels is there, and still not taken, needs a word."""
    with pytest.raises(bb.BatchError, match="ndarray|list|NoneType"):
        labels_of({"labels": labels, "x": torch.zeros(4)})


def test_next_tokens_of_labels_in_one_dimension_are_refused():
    """They have no next token; an IndexError from inside would not say so."""
    with pytest.raises((bb.BatchError, bb.LossError), match=r"labels.*\(4?1?,\)"):
        weights("next_tokens", {"labels": torch.tensor([1, 2, -100, 3])})


def test_ignored_labels_are_seen():
    assert has_ignored_labels(BATCH)
    assert has_ignored_labels((torch.zeros(2), Typed(1, {"labels": LABELS})))
    assert has_ignored_labels({"targets": LABELS})  # whatever they are called
    assert has_ignored_labels((LABELS,))


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": LABELS.clamp(min=0)},
        {"labels": LABELS.float()},  # a regression to -100 is no padding
        {"labels": LABELS.tolist()},
        {"labels": LABELS.to("meta")},
    ],
)
def test_nothing_else_is_taken_for_ignored_labels(batch):
    assert not has_ignored_labels(batch)


def test_a_mapping_is_weights_by_term():
    """Control: a function that happens to be a mapping is not called."""

    class Both(dict):
        def __call__(self, batch: Any) -> int:
            raise AssertionError

    found = Weigher(Both(a="samples")).weigh([(None, 2)])

    assert found == [{"a": 2.0}]
    assert isinstance(found[0], Mapping)
