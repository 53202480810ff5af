from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from bigbatch.tasks.text import Gpt, Paragraphs, _padded, _pieces, text
from bigbatch.training.comparison import compare_steps
from bigbatch.training.loop import Run


def test_every_byte_but_the_first_is_a_target_once():
    paragraph = bytes(i % 251 for i in range(1200))

    pieces = _pieces(paragraph)

    assert [len(piece) for piece in pieces] == [513, 513, 176]
    assert bytes(token for piece in pieces for token in piece[1:].tolist()) == paragraph[1:]


@pytest.mark.parametrize("length", [2, 512, 513, 514, 1025])
def test_no_piece_is_without_a_target(length):
    pieces = _pieces(bytes(length))

    assert all(len(piece) >= 2 for piece in pieces)
    assert sum(len(piece) - 1 for piece in pieces) == length - 1


def test_the_data_are_two_parts_of_the_text_with_many_lengths():
    train, test = Paragraphs(train=True), Paragraphs(train=False)

    lengths = {len(sample) for sample in train.samples}
    assert len(train) > 7 * len(test) > 1000
    assert min(lengths) >= 2
    assert max(lengths) == 513
    assert len(lengths) > 100


def test_padding_is_no_target():
    batch = _padded([torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6])])

    assert batch["tokens"].tolist() == [[1, 2, 3], [5, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4], [6, -100, -100]]

    wider = _padded([torch.tensor([1, 2, 3, 4])], pad_to_multiple_of=5)
    assert wider["tokens"].tolist() == [[1, 2, 3, 0, 0]]
    assert wider["labels"].tolist() == [[2, 3, 4, -100, -100]]


def test_a_token_sees_only_what_came_before():
    model, tokens = Gpt(width=16).eval(), torch.randint(256, (2, 9))
    changed = tokens.clone()
    changed[:, 5:] = 0

    assert torch.allclose(model(tokens)[:, :5], model(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:], atol=1e-3)


def test_the_head_is_the_embedding():
    model = Gpt(width=16)

    assert model.head.weight is model.bytes.weight


def test_cut_steps_are_those_of_the_big_batch():
    """Ten steps in float64, weighed by tokens, although each micro-batch has its own number of them."""
    found = compare_steps(small(), micro_batch_size=6, num_steps=10)

    assert found.exactness == "exact"
    assert found.within


def test_weighing_by_samples_would_not_be():
    """Control."""
    with pytest.warns(UserWarning, match="Labels hold -100"):
        found = compare_steps(small(weight=None), micro_batch_size=6, num_steps=3)

    assert found.difference > 1e-6


def test_bits_per_byte_are_a_mean_over_bytes():
    task, model = small(), Gpt(width=16)
    samples = [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6])]
    nats = sum(F.cross_entropy(model(s[None, :-1])[0], s[1:], reduction="sum").item() for s in samples)

    assert task.evaluate is not None
    total, count = task.evaluate(model, _padded(samples))["bits_per_byte"]

    assert int(count) == 4
    assert float(total.detach()) == pytest.approx(nats / math.log(2), rel=1e-5)


def test_it_learns():
    run = Run(small(epochs=3, max_tokens=2000))
    paddings = [record.result.padding or (0.0, 1.0) for record in run.steps(2)]
    result = Run(small(epochs=3), micro_batch_size=32).train()

    assert all(after < 0.5 * before for before, after in paddings), "Micro-batches hold samples of like length."

    assert result.metrics["bits_per_byte"] < 6  # 8 before it has learned anything


def small(**changes):
    import dataclasses

    first = Paragraphs(train=True)
    first.samples = [sample for sample in first.samples if len(sample) <= 130][:160]
    fields = dict(
        model=lambda: Gpt(width=32), train_data=lambda: first, eval_data=lambda: first, batch_size=20, epochs=2
    )
    return dataclasses.replace(text(), **{**fields, **changes})
