"""Logical batches: cut by us, collated, split by the user, or ready; the gradient is that of the whole."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.batch.logical import Pieces, pieces_of
from bigbatch.batch.weighing import Weigher
from tests.reference import (
    accumulate_by_hand,
    assert_same_gradients,
    big_batch_gradients,
    big_batch_loss,
    gradient_error,
    gradients,
)

NUM_SAMPLES = 10
X = torch.linspace(-1, 1, NUM_SAMPLES * 3, dtype=torch.float64).reshape(NUM_SAMPLES, 3).sin()
Y = torch.arange(NUM_SAMPLES, dtype=torch.float64).unsqueeze(1)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def cut_at(*ends: int) -> list[tuple[Tensor, Tensor]]:
    starts = (0, *ends)
    return [(X[a:b], Y[a:b]) for a, b in zip(starts, (*ends, NUM_SAMPLES), strict=True)]


def pieces(batch: Any, micro_batch_size: int | None = 4, **options: Any) -> Pieces:
    return pieces_of(batch, micro_batch_size, bb.StepOptions(**options), Weigher(options.get("weight")))


def assert_is_the_big_batch(batch: Any, *, micro_batch_size: int | None = None, **options: Any) -> bb.StepResult:
    model = make_model()
    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=micro_batch_size, **options)
    assert_same_gradients(gradients(model), big_batch_gradients(model, loss_fn, (X, Y)))
    assert float(result.loss) == pytest.approx(big_batch_loss(model, loss_fn, (X, Y)), rel=1e-13)
    return result


UNEVEN = pytest.mark.parametrize("ends", [(), (3,), (1, 2, 9), (9,), tuple(range(1, 10))])


# ----- cut by us


def test_pieces_know_their_samples_and_weights():
    found = pieces((X, Y))

    assert [piece.num_samples for piece in found.pieces] == [4, 4, 2]
    assert [piece.weights for piece in found.pieces] == [{None: 4.0}, {None: 4.0}, {None: 2.0}]
    assert (found.count, found.totals) == (3, {None: 10.0})


@pytest.mark.parametrize("micro_batch_size", [None, 10, 99])
def test_a_batch_that_fits_is_passed_on_as_it_is(micro_batch_size):
    batch = [X, Y]

    (piece,) = pieces(batch, micro_batch_size).pieces

    assert piece.micro_batch is batch


# ----- collate


def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*samples, strict=True)
    return torch.stack(xs), torch.stack(ys)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 10, 99, None])
@pytest.mark.parametrize("kind", [list, tuple])
def test_collated_samples_are_the_big_batch(micro_batch_size, kind):
    samples = kind(zip(X, Y, strict=True))

    result = assert_is_the_big_batch(samples, micro_batch_size=micro_batch_size, collate=collate)

    assert sum(result.micro_batch_sizes) == NUM_SAMPLES


def test_collate_pads_each_micro_batch_by_itself():
    """Its use: a micro-batch is as long as its longest sample, not as that of the batch."""
    samples = [torch.ones(length) for length in (1, 2, 9, 3, 3)]

    found = pieces(samples, 2, collate=lambda some: nn.utils.rnn.pad_sequence(some, batch_first=True))

    assert [tuple(piece.micro_batch.shape) for piece in found.pieces] == [(2, 2), (2, 9), (1, 3)]
    assert [piece.num_samples for piece in found.pieces] == [2, 2, 1]


def test_collate_gets_a_list_of_its_own():
    samples = list(zip(X, Y, strict=True))

    def greedy(some: list[Any]) -> Any:
        assert type(some) is list
        collated = collate(some)
        some.clear()
        return collated

    assert_is_the_big_batch(samples, micro_batch_size=None, collate=greedy)
    assert len(samples) == NUM_SAMPLES


def test_collated_tokens_are_weighed_after_collating():
    labels = [torch.tensor([1, 2, 3]), torch.tensor([1]), torch.tensor([5, 6])]

    def pad(some: list[Tensor]) -> dict[str, Tensor]:
        return {"labels": nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=-100)}

    found = pieces(labels, 2, collate=pad, weight="tokens")

    assert [piece.weights[None] for piece in found.pieces] == [4.0, 2.0]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X, "With collate= a batch is a list of samples, but this is a Tensor"),
        ("samples", "this is a str"),
        ({"x": X}, "this is a dict"),
        (5, "this is a int"),
        (iter([X]), "this is a list_iterator"),
        ([], "The batch is empty: a list of 0 samples"),
        ((), "The batch is empty: a list of 0 samples"),
    ],
)
def test_with_collate_a_batch_is_a_list_of_samples(batch, message):
    with pytest.raises(bb.BatchError, match=message):
        pieces(batch, 2, collate=collate)


# ----- split


@UNEVEN
def test_a_split_of_ones_own_is_the_big_batch(ends):
    result = assert_is_the_big_batch((X, Y), micro_batch_size=3, split=lambda batch, size: cut_at(*ends))

    assert len(result.micro_batch_sizes) == len(ends) + 1


def test_split_gets_the_batch_and_the_size_and_may_be_a_generator():
    seen = []

    def split(batch: Any, micro_batch_size: int):
        seen.append((batch, micro_batch_size))
        yield from cut_at(4, 8)

    batch = object()
    found = pieces(batch, 4, split=split)

    assert seen == [(batch, 4)]
    assert found.count == 3


def test_split_may_return_a_logical_batch():
    found = pieces((X, Y), 4, split=lambda batch, size: bb.LogicalBatch(cut_at(4, 8), weight=10))

    assert found.totals == {None: 10.0}


def test_a_packed_sequence_is_split_by_its_owner():
    """What we refuse to cut, the user can."""
    sequences = [torch.ones(length, 3, dtype=torch.float64) * length for length in (4, 2, 1)]
    pack = nn.utils.rnn.pack_sequence
    lstm = nn.LSTM(3, 2).double()

    def split(batch: Any, micro_batch_size: int) -> list[Any]:
        unpacked = nn.utils.rnn.unpack_sequence(batch)
        return [
            pack(unpacked[i : i + micro_batch_size], enforce_sorted=False)
            for i in range(0, len(unpacked), micro_batch_size)
        ]

    def last_state(model: Any, batch: Any) -> Tensor:
        return model(batch)[1][0].square().sum(-1).mean()

    expected = big_batch_gradients(lstm, last_state, pack(sequences))
    bb.accumulate(lstm, last_state, pack(sequences), micro_batch_size=2, split=split, weight=lambda b: b.batch_sizes[0])

    assert_same_gradients(gradients(lstm), expected)


@pytest.mark.parametrize("returned", [None, "abc", b"ab", 5, {"x": X}, X, [1, 2], len])
def test_what_is_no_split_is_refused(returned):
    with pytest.raises(bb.BatchError, match="split returned|samples of a micro-batch cannot be counted"):
        pieces((X, Y), 4, split=lambda batch, size: returned)


def test_a_split_into_nothing_is_refused():
    with pytest.raises(bb.BatchError, match="empty: a LogicalBatch of 0 micro-batches"):
        pieces((X, Y), 4, split=lambda batch, size: [])


def test_split_needs_a_size():
    with pytest.raises(bb.BatchError, match="split= .* give micro_batch_size="):
        pieces((X, Y), None, split=lambda batch, size: [batch])


# ----- LogicalBatch


@UNEVEN
@pytest.mark.parametrize("weight", [None, NUM_SAMPLES, float(NUM_SAMPLES)])
@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_ready_micro_batches_are_the_big_batch(ends, weight, kind):
    assert_is_the_big_batch(bb.LogicalBatch(kind(cut_at(*ends)), weight=weight))


@pytest.mark.parametrize("ends", [(3,), (1, 2, 9)])
def test_a_mean_of_means_is_outside_the_tolerance(ends):
    """Control: the same uneven micro-batches, each counted alike."""
    model = make_model()
    parts = cut_at(*ends)

    accumulate_by_hand(model, loss_fn, parts, [1 / len(parts)] * len(parts))

    assert gradient_error(gradients(model), big_batch_gradients(model, loss_fn, (X, Y))) > 1e-2


def test_micro_batches_of_different_structure_are_fine():
    """They are ready: nobody cuts them along one layout."""
    parts = [(X[:4], Y[:4]), [X[4:], Y[4:], "the rest"]]

    assert_is_the_big_batch(bb.LogicalBatch(parts))


def test_a_list_may_be_used_again():
    batch = bb.LogicalBatch(cut_at(4), weight=NUM_SAMPLES)

    assert_is_the_big_batch(batch)
    assert_is_the_big_batch(batch)


def test_an_iterator_is_read_as_the_step_goes():
    order = []

    def ready():
        for number, part in enumerate(cut_at(4, 8)):
            order.append(f"read {number}")
            yield part

    def noted(model: Any, batch: Any) -> Tensor:
        order.append("forward")
        return loss_fn(model, batch)

    bb.accumulate(make_model(), noted, bb.LogicalBatch(ready(), weight=NUM_SAMPLES))

    assert order == ["read 0", "forward", "read 1", "forward", "read 2", "forward"]


def test_a_weight_by_term():
    def terms(model: Any, batch: Any) -> dict[str, Tensor]:
        return {"a": loss_fn(model, batch), "b": model(batch[0]).mean()}

    def plain(model: Any, batch: Any) -> Tensor:
        return sum(terms(model, batch).values(), start=torch.zeros((), dtype=torch.float64))

    model = make_model()
    weight = {"a": "samples", "b": lambda batch: len(batch[0])}

    bb.accumulate(model, terms, bb.LogicalBatch(iter(cut_at(3, 4)), weight=dict(a=10, b=10)), weight=weight)

    assert_same_gradients(gradients(model), big_batch_gradients(model, plain, (X, Y)))


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("weight", [9, 20, 0.1, -10, {"loss": 10}, {"a": 10, "b": 10}])
def test_a_weight_that_does_not_match_is_refused_and_nothing_moved(kind, weight):
    model = make_model()

    with pytest.raises(
        bb.LossError, match=r"add up to 10, but .* is |LogicalBatch.weight has weights for|is -10; a weight"
    ):
        bb.accumulate(model, loss_fn, bb.LogicalBatch(kind(cut_at(4)), weight=weight))

    assert gradients(model) == {"weight": None, "bias": None}


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("weight", ["10", [10], math.nan, math.inf, torch.ones(2)])
def test_a_weight_that_is_no_number_is_refused_and_nothing_moved(kind, weight):
    """NaN compares with nothing, so a check that weights add up lets it pass."""
    model = make_model()

    with pytest.raises(bb.BigBatchError, match="weight"):
        bb.accumulate(model, loss_fn, bb.LogicalBatch(kind(cut_at(4)), weight=weight))

    assert gradients(model) == {"weight": None, "bias": None}


def test_a_weight_of_nothing_is_refused():
    with pytest.raises(bb.LossError, match="weight is 0 over the whole batch"):
        bb.accumulate(make_model(), loss_fn, bb.LogicalBatch(iter(cut_at(4)), weight=0))


@pytest.mark.parametrize("micro_batches", [5, None, X, "abc", {"x": X}, [5], [None], [X[:0]]])
@pytest.mark.parametrize("weight", [None, 10])
def test_what_are_no_micro_batches_is_refused(micro_batches, weight):
    with pytest.raises(bb.BigBatchError, match="micro-batch"):
        bb.accumulate(make_model(), loss_fn, bb.LogicalBatch(micro_batches, weight=weight))


@pytest.mark.parametrize("micro_batches", [[], (), iter([]), (part for part in [])])
def test_no_micro_batches_are_refused(micro_batches):
    with pytest.raises(bb.BatchError, match="empty: a LogicalBatch of 0 micro-batches"):
        bb.accumulate(make_model(), loss_fn, bb.LogicalBatch(micro_batches))


def test_an_iterator_that_was_read_is_refused():
    model = make_model()
    batch = bb.LogicalBatch(iter(cut_at(4)), weight=NUM_SAMPLES)
    bb.accumulate(model, loss_fn, batch)
    before = copy.deepcopy(gradients(model))

    with pytest.raises(bb.BatchError, match="empty"):
        bb.accumulate(model, loss_fn, batch)

    assert_same_gradients(gradients(model), before, tolerance=0)


def test_samples_that_cannot_be_counted_need_a_weight():
    with pytest.raises(bb.BatchError, match="cannot be counted.*give weight=, a function"):
        pieces(bb.LogicalBatch([(torch.zeros(2), torch.zeros(3))]))

    found = pieces(bb.LogicalBatch([(torch.zeros(2), torch.zeros(3))]), weight=lambda batch: 2.5)
    assert [(piece.num_samples, piece.weights) for piece in found.pieces] == [(0, {None: 2.5})]


def test_an_error_of_an_iterator_is_that_of_the_user_and_nothing_moved():
    model = make_model()

    def broken():
        yield X[:4], Y[:4]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        bb.accumulate(model, loss_fn, bb.LogicalBatch(broken(), weight=10))

    assert gradients(model) == {"weight": None, "bias": None}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (bb.LogicalBatch([torch.zeros(1000)], weight=3.0), "LogicalBatch(1 micro-batch, weight=3.0)"),
        (bb.LogicalBatch([torch.zeros(1000)] * 2), "LogicalBatch(2 micro-batches, weight=None)"),
        (bb.LogicalBatch(iter([1])), "LogicalBatch(an iterator of micro-batches, weight=None)"),
    ],
)
def test_it_says_in_one_line_what_it_holds(batch, said):
    assert repr(batch) == said
