"""Malformed losses, weights and batches: each is a typed error with values, paths and a remedy, and nothing moved.

Each is tried in four ways: by ``accumulate``, by the first step of a run, by a later one (what is only looked at once
must still be put back), and by a later one in fp16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import bigbatch as bb
from tests.stepping.world import Switch, World, at_second, cut, good_loss, make_batch, refused, samples


@dataclasses.dataclass
class Bad:
    """One malformed input.

    Attributes:
        error: What it is refused with.
        message: What the message says.
        loss: Makes the loss function.
        batch: Makes the batch.
        options: Of the step. Functions among them are good at first where the step is a later one.
        only_later_if: Whether a good batch can go before, with these options.
        step_only: ``accumulate`` lets it pass.
        scaled: It is refused in fp16 too, where a gradient that is not finite is skipped.
    """

    error: type[bb.BigBatchError]
    message: str
    loss: Callable[[], Any] = lambda: good_loss
    batch: Callable[[], Any] = make_batch
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    only_later_if: bool = True
    step_only: bool = False
    scaled: bool = True


GOOD = {
    "weight": lambda batch: len(batch["x"]),
    "collate": default_collate,
    "split": cut,
}


def first_step(world: World, bad: Bad) -> Callable[[], Any]:
    step = world.step(bad.loss(), **bad.options)
    return lambda: step(bad.batch())


def run_later(world: World, bad: Bad, **more: Any) -> Callable[[], Any]:
    """Make a step, let it do a good one, and then break everything that is malformed."""
    switches = {name: Switch(GOOD[name], option) for name, option in bad.options.items() if callable(option)}
    loss = Switch(good_loss, bad.loss())
    step = world.step(loss, **bad.options | switches | more)
    step(samples() if "collate" in bad.options else make_batch())
    for switch in (loss, *switches.values()):
        switch.broken = True
    return lambda: step(bad.batch())


WAYS: dict[str, Callable[[World, Bad], Callable[[], Any]]] = {
    "accumulate": lambda world, bad: lambda: world.accumulate(bad.loss(), bad.batch(), **bad.options),
    "first step": first_step,
    "later step": run_later,
    "later step in fp16": lambda world, bad: run_later(world, bad, precision=world.scaler),
}


def returns(make: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """A loss function that returns what is made of a good loss."""
    return lambda: lambda model, batch: make(good_loss(model, batch))


class Output:
    """What models return that know their loss."""

    def __init__(self, loss: Tensor):
        self.loss = loss


def model_output(loss: Tensor) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=torch.zeros(2, 2))


def rows_of(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


RETURN_ONE = r"return a 0-d tensor \(a mean\), Ratio"
LOSSES = {
    "None": Bad(bb.LossError, rf"returned a NoneType for the term 'loss'; {RETURN_ONE}", returns(lambda loss: None)),
    "a text": Bad(bb.LossError, rf"returned a str .*{RETURN_ONE}", returns(lambda loss: "0.5")),
    "a float": Bad(bb.LossError, rf"returned a float .*{RETURN_ONE}", returns(lambda loss: loss.item())),
    "a NumPy number": Bad(bb.LossError, "returned a float32", returns(lambda loss: np.float32(0.5))),
    "a function": Bad(bb.LossError, "returned a builtin", returns(lambda loss: loss.backward.__call__ and len)),
    "a generator": Bad(bb.LossError, "returned a generator", returns(lambda loss: (loss for _ in range(1)))),
    "nothing in a dict": Bad(bb.LossError, "returned no term; return a 0-d tensor", returns(lambda loss: {})),
    "nothing in a tuple": Bad(bb.LossError, "returned no term", returns(lambda loss: ())),
    "a text in a list": Bad(
        bb.LossError, rf"returned a str for the term '1'.*{RETURN_ONE}", returns(lambda loss: [loss, "a"])
    ),
    "a dict in a dict": Bad(bb.LossError, "returned a dict for the term 'a'", returns(lambda loss: {"a": {"b": loss}})),
    "an output with a loss": Bad(bb.LossError, "returned a Output.* has .loss: return that", returns(Output)),
    "a model output": Bad(bb.LossError, r"has \.loss: return that|return .*\.loss", returns(model_output)),
    "one loss per sample": Bad(bb.LossError, r"has shape \(2,\);.*\.mean\(\).*Sum", lambda: rows_of),
    "a loss in one dimension": Bad(bb.LossError, r"has shape \(1,\);", returns(lambda loss: loss.reshape(1))),
    "a whole number": Bad(bb.LossError, r"dtype torch.int64; it is .*floating", returns(lambda loss: loss.long())),
    "a truth": Bad(bb.LossError, "dtype torch.bool", returns(lambda loss: loss > 0)),
    "a complex number": Bad(bb.LossError, "dtype torch.complex64", returns(lambda loss: loss + 0j)),
    "no graph": Bad(bb.LossError, r"does not depend on any parameter.*detach\(\)", returns(lambda loss: loss.detach())),
    "no graph in a constant": Bad(bb.LossError, "does not depend", returns(lambda loss: bb.Constant(torch.ones(())))),
    "names that read alike": Bad(bb.LossError, r"same name: \['1', '1'\]", returns(lambda loss: {1: loss, "1": loss})),
    "a class": Bad(bb.LossError, "returned a type", returns(lambda loss: bb.Sum)),
    "a sum of a number": Bad(bb.LossError, "is a float, 1.0; it is a 0-d tensor", returns(lambda loss: bb.Sum(1.0))),
    "a sum of a ratio": Bad(bb.LossError, "is a Ratio", returns(lambda loss: bb.Sum(bb.Ratio(loss, 1)))),
    "a ratio of vectors": Bad(bb.LossError, r"has shape \(2,\)", returns(lambda loss: bb.Ratio(loss.expand(2), 2))),
    "a ratio of a number": Bad(bb.LossError, "is a float", returns(lambda loss: bb.Ratio(1.0, 2))),
    "a denominator with a gradient": Bad(
        bb.LossError,
        r"denominator .* needs a gradient.*denominator\.detach\(\).*WholeBatchLoss",
        returns(lambda loss: bb.Ratio(loss, loss)),
    ),
    "a denominator per sample": Bad(
        bb.LossError, r"denominator .* has shape \(2,\)", returns(lambda loss: bb.Ratio(loss, torch.ones(2)))
    ),
    "a denominator of text": Bad(
        bb.LossError, "denominator .* is '2'; it is a number", returns(lambda loss: bb.Ratio(loss, "2"))
    ),
    "no denominator": Bad(bb.LossError, "denominator .* is None", returns(lambda loss: bb.Ratio(loss, None))),
    "a complex denominator": Bad(
        bb.LossError, "denominator .*(complex|1j)", returns(lambda loss: bb.Ratio(loss, torch.tensor(1 + 1j)))
    ),
    "a denominator of 0": Bad(
        bb.LossError, r"\[0.0, 0.0, 0.0\].*more than 0.*leave it out", returns(lambda loss: bb.Ratio(loss, 0))
    ),
    "a denominator below 0": Bad(
        bb.LossError, r"\[-1.0, -1.0, -1.0\].*not negative", returns(lambda loss: bb.Ratio(loss, -1))
    ),
    "a denominator of NaN": Bad(bb.LossError, r"\[nan, nan, nan\]", returns(lambda loss: bb.Ratio(loss, math.nan))),
    "one denominator below 0": Bad(
        bb.LossError,
        r"\[2.0, -1.0, 2.0\]",
        at_second(lambda m, b: bb.Ratio(good_loss(m, b), -1), lambda m, b: bb.Ratio(good_loss(m, b), 2)),
    ),
    "two denominators, one of 0": Bad(
        bb.LossError,
        r"denominators of the term 'b' are \[0.0",
        returns(lambda loss: {"a": bb.Ratio(loss, 2), "b": bb.Ratio(loss, 0)}),
    ),
    "None later": Bad(bb.LossError, "returned a NoneType", at_second(lambda model, batch: None)),
    "one loss per sample later": Bad(bb.LossError, r"has shape \(2,\)", at_second(rows_of)),
    "other terms later": Bad(
        bb.LossError,
        r"terms 'a' \(mean\), but for an earlier .* 'loss' \(mean\).*Return the same",
        at_second(lambda m, b: {"a": good_loss(m, b)}),
    ),
    "another kind later": Bad(
        bb.LossError,
        r"'loss' \(sum\), but for an earlier .* 'loss' \(mean\)",
        at_second(lambda m, b: bb.Sum(good_loss(m, b))),
    ),
    "a term less later": Bad(
        bb.LossError,
        r"'0' \(mean\), but for an earlier .*'0' \(mean\), '1' \(sum\)",
        at_second(lambda m, b: (good_loss(m, b),), lambda m, b: (good_loss(m, b), bb.Sum(m[0].weight.sum()))),
    ),
    "NaN": Bad(
        bb.NonFiniteError,
        "the term 'loss' of micro-batch 1.*Nothing was moved.*on_non_finite=",
        returns(lambda loss: loss * math.nan),
        step_only=True,
        scaled=False,
    ),
    "NaN later": Bad(
        bb.NonFiniteError,
        "the term 'loss' of micro-batch 2.*gradient of 0.weight",
        at_second(lambda m, b: good_loss(m, b) * math.nan),
        step_only=True,
        scaled=False,
    ),
    "inf later": Bad(
        bb.NonFiniteError,
        "the term 'loss' of micro-batch 2",
        at_second(lambda m, b: good_loss(m, b) + math.inf),
        step_only=True,
        scaled=False,
    ),
    "a gradient of NaN": Bad(
        bb.NonFiniteError,
        "Not finite: the gradient of",
        at_second(lambda m, b: good_loss(m, b) + (m[0].weight[0, 0] * 0).sqrt() * 0),
        step_only=True,
        scaled=False,
    ),
    "NaN in one term": Bad(
        bb.NonFiniteError,
        "the term 'b' of micro-batch 2",
        at_second(
            lambda m, b: {"a": good_loss(m, b), "b": m[0].weight.sum() * math.nan},
            lambda m, b: {"a": good_loss(m, b), "b": m[0].weight.sum()},
        ),
        step_only=True,
        scaled=False,
    ),
}


def weight(returned: Any) -> dict[str, Any]:
    return {"weight": lambda batch: returned}


WEIGHTS = {
    "negative": Bad(bb.LossError, "weight returned -1; a weight is finite and not negative", options=weight(-1)),
    "NaN": Bad(bb.LossError, "weight returned nan", options=weight(math.nan)),
    "infinite": Bad(bb.LossError, "weight returned inf", options=weight(math.inf)),
    "None": Bad(bb.LossError, r"weight returned None \(NoneType\); it is one number per", options=weight(None)),
    "a text": Bad(bb.LossError, r"weight returned '3' \(str\)", options=weight("3")),
    "one per sample": Bad(bb.LossError, r"tensor of shape \(2,\); it is one number", options=weight(torch.ones(2))),
    "one per sample, of NumPy": Bad(bb.LossError, "weight returned", options=weight(np.ones(2))),
    "complex": Bad(bb.LossError, "weight returned", options=weight(torch.tensor(1j))),
    "nothing at all": Bad(bb.LossError, "0 over the whole batch.*Leave such a batch out", options=weight(0)),
    "padding alone": Bad(
        bb.LossError,
        "0 over the whole batch",
        batch=lambda: {**make_batch(), "labels": torch.full((6,), -100)},
        options=dict(weight="tokens"),
    ),
    "not additive": Bad(
        bb.LossError,
        "add up to 3, but that of the whole batch is 1.*must add up",
        options=weight(1),
        only_later_if=False,
    ),
    "of no labels": Bad(
        bb.BatchError,
        r"the batch has none. Name the targets 'labels'.*weight=lambda",
        batch=lambda: {"x": torch.zeros(6, 3)},
        options=dict(weight="tokens"),
    ),
    "of two labels": Bad(
        bb.BatchError,
        r"\['inner.labels', 'labels'\]",
        batch=lambda: {**make_batch(), "inner": make_batch()},
        options=dict(weight="tokens"),
    ),
    "of labels without a next one": Bad(
        bb.BatchError, r"labels.*\(", options=dict(weight="next_tokens"), only_later_if=False
    ),
    "of another term": Bad(
        bb.LossError,
        r"weight has the terms \['a'\], but the loss has a mean named 'loss'.*Give its weight",
        options=dict(weight={"a": "samples"}),
        only_later_if=False,
    ),
}


def packed() -> Any:
    return nn.utils.rnn.pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)])


def with_x(x: Any) -> Callable[[], Any]:
    """A good batch with another ``x``."""
    return lambda: {**make_batch(), "x": x() if callable(x) else x}


def self_containing() -> Any:
    batch: dict[str, Any] = dict(make_batch())
    batch["self"] = [batch]
    return batch


def broken_loader() -> Iterator[Any]:
    yield from cut(make_batch())[:2]


class Hiding:
    """Holds a tensor where nobody looks."""

    def __init__(self) -> None:
        self.x = torch.zeros(6, 3)


BATCHES = {
    "None": Bad(bb.BatchError, "no samples to cut.*split=", batch=lambda: None, step_only=True),
    "a text": Bad(bb.BatchError, "no samples to cut", batch=lambda: "x"),
    "a number": Bad(bb.BatchError, "no samples to cut", batch=lambda: torch.tensor(3.0)),
    "nothing": Bad(bb.BatchError, "no samples to cut", batch=dict),
    "an empty list": Bad(bb.EmptyBatchError, "empty", batch=list),
    "no samples": Bad(
        bb.EmptyBatchError,
        r"empty: \['x', 'labels'\] have length 0",
        batch=lambda: cut(make_batch(), 6)[0] and {k: v[:0] for k, v in make_batch().items()},
    ),
    "ragged": Bad(
        bb.BatchError, r"\['x'\] has 5, \['labels'\] has 6.*batch_dims=\{'labels': 1\}", batch=with_x(torch.zeros(5, 3))
    ),
    "ragged deep inside": Bad(
        bb.BatchError,
        r"\['x.0', 'labels'\] has 6, \['x.1.deep'\] has 4",
        batch=with_x((torch.zeros(6), {"deep": torch.zeros(4)})),
    ),
    "a ragged list of samples": Bad(
        bb.BatchError, "has 3.*has 5.*collate=", batch=lambda: [torch.zeros(3), torch.zeros(5)]
    ),
    "sparse": Bad(
        bb.BatchError, "x is a sparse_coo tensor.*split=", batch=with_x(lambda: torch.zeros(6, 3).to_sparse())
    ),
    "nested": Bad(
        bb.BatchError,
        "x is a nested tensor.*split=",
        batch=with_x(lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)),
    ),
    "packed": Bad(bb.BatchError, "x is a PackedSequence.*split=.*batch_dims={'x': None}", batch=with_x(packed)),
    "hiding tensors": Bad(bb.BatchError, "x is a Hiding with tensors inside.*split=", batch=with_x(Hiding)),
    "containing itself": Bad(bb.BatchError, "contains itself", batch=self_containing),
    "a loader": Bad(bb.BatchError, "DataLoader", batch=lambda: DataLoader(samples())),
    "a generator": Bad(bb.BatchError, "generator", batch=lambda: (part for part in cut(make_batch()))),
    "an unknown path": Bad(
        bb.BatchError,
        r"batch_dims names \['y'\], but the batch has \['labels', 'x'\]",
        options=dict(batch_dims={"y": 1}),
        only_later_if=False,
    ),
    "a dimension that is not there": Bad(
        bb.BatchError,
        r"batch_dims\['x'\] is 2, but x has shape \(6, 3\).*from 0 to 1",
        options=dict(batch_dims={"x": 2}),
        only_later_if=False,
    ),
    "a dimension of the wrong length": Bad(
        bb.BatchError, r"\['x'\] has 3, \['labels'\] has 6", options=dict(batch_dims={"x": 1}), only_later_if=False
    ),
    "all shared": Bad(
        bb.BatchError, "no samples", options=dict(batch_dims={"x": None, "labels": None}), only_later_if=False
    ),
    "collated: no list": Bad(
        bb.BatchError, "a list of samples, but this is a dict", options=dict(collate=default_collate)
    ),
    "collated: a text": Bad(bb.BatchError, "this is a str", batch=lambda: "abc", options=dict(collate=default_collate)),
    "collated: empty": Bad(bb.EmptyBatchError, "empty: a list of 0", batch=list, options=dict(collate=default_collate)),
    "split: a text": Bad(
        bb.BatchError, "split returned a str; it returns a list", options=dict(split=lambda batch, size: "ab")
    ),
    "split: None": Bad(bb.BatchError, "split returned a NoneType", options=dict(split=lambda batch, size: None)),
    "split: a dict": Bad(bb.BatchError, "split returned a dict", options=dict(split=lambda batch, size: batch)),
    "split: a tensor": Bad(
        bb.BatchError, "split returned a Tensor", options=dict(split=lambda batch, size: batch["x"])
    ),
    "split: nothing": Bad(bb.EmptyBatchError, "empty: a LogicalBatch of 0", options=dict(split=lambda batch, size: [])),
    "split: numbers": Bad(
        bb.BatchError, "micro-batch cannot be counted", options=dict(split=lambda batch, size: [1, 2])
    ),
    "logical: empty": Bad(bb.EmptyBatchError, "empty: a LogicalBatch of 0", batch=lambda: bb.LogicalBatch([])),
    "logical: read before": Bad(
        bb.EmptyBatchError, "empty: a LogicalBatch of 0", batch=lambda: bb.LogicalBatch(iter([]))
    ),
    "logical: a number": Bad(
        bb.ArgumentError,
        r"given a int; it takes a list or an iterator.*LogicalBatch\(\[first",
        batch=lambda: bb.LogicalBatch(5),
    ),
    "logical: a tensor": Bad(
        bb.ArgumentError,
        "given a Tensor; it takes a list or an iterator of micro-batches",
        batch=lambda: bb.LogicalBatch(torch.zeros(6, 3)),
    ),
    "logical: ragged": Bad(
        bb.BatchError,
        r"cannot be counted.*\['x'\] has 2, \['labels'\] has 1",
        batch=lambda: bb.LogicalBatch([{"x": torch.zeros(2), "labels": torch.zeros(1)}]),
    ),
    "logical: wrong weight": Bad(
        bb.LossError, "add up to 6, but .* is 5", batch=lambda: bb.LogicalBatch(cut(make_batch()), weight=5)
    ),
    "logical: wrong weight at the end": Bad(
        bb.LossError, "add up to 4, but .* is 6", batch=lambda: bb.LogicalBatch(broken_loader(), weight=6)
    ),
    "logical: weight of another term": Bad(
        bb.LossError,
        r"LogicalBatch.weight has weights for \['a'\], but the step's weight has one",
        batch=lambda: bb.LogicalBatch(cut(make_batch()), weight={"a": 6}),
    ),
    "logical: weight of NaN": Bad(
        bb.LossError, "weight", batch=lambda: bb.LogicalBatch(iter(cut(make_batch())), weight=math.nan)
    ),
    "logical: weight of text": Bad(
        bb.LossError, "weight", batch=lambda: bb.LogicalBatch(cut(make_batch()), weight="6")
    ),
    "one value per channel": Bad(
        bb.BatchError,
        r"BatchNorm.* one value per channel.*batch of at least 2 samples.*batch_norm=\"frozen\"",
        batch=lambda: {k: v[:1] for k, v in make_batch().items()},
    ),
    "one value per channel later": Bad(
        bb.BatchError,
        r"one value per channel.*micro-batch 2 of 2, samples 5 to 5",
        batch=lambda: bb.LogicalBatch(cut(make_batch(), 5)),
    ),
}

CASES = {
    f"{table}: {name}": bad
    for table, cases in (("loss", LOSSES), ("weight", WEIGHTS), ("batch", BATCHES))
    for name, bad in cases.items()
}


def in_all_ways() -> Iterator[Any]:
    for name, bad in CASES.items():
        for way in WAYS:
            applies = not (way == "accumulate" and bad.step_only) and (way != "later step in fp16" or bad.scaled)
            if applies and (bad.only_later_if or "later" not in way):
                yield pytest.param(bad, WAYS[way], id=f"{name}, {way}")


@pytest.mark.parametrize(("bad", "way"), list(in_all_ways()))
def test_a_malformed_loss_weight_or_batch_is_refused_and_nothing_moved(bad, way):
    world = World()
    run = way(world, bad)
    before = world.state()

    refused(run, bad.error, bad.message)

    assert world.state() == before


@pytest.mark.parametrize("bad", [LOSSES["None later"], LOSSES["NaN later"], BATCHES["one value per channel later"]])
def test_after_a_refusal_the_run_goes_on_as_if_it_had_not_been(bad):
    worlds, results = [], []
    for breaks in (True, False):
        world, loss = World(), Switch(good_loss, bad.loss())
        step = world.step(loss, grad_norm=True)
        step(make_batch())
        if breaks:
            loss.broken = True
            refused(lambda step=step: step(bad.batch()), bad.error, bad.message)
            loss.broken = False
        results.append(step(make_batch()))
        worlds.append(world)

    assert worlds[0].state() == worlds[1].state()
    assert results[0].to_json() == results[1].to_json()


def test_a_name_that_is_not_finite_is_told_with_the_error():
    world = World()

    with pytest.raises(bb.NonFiniteError, match="Not finite") as found:
        world.step(LOSSES["NaN later"].loss())(make_batch())

    assert found.value.names[0] == "the term 'loss' of micro-batch 2"
    assert "the gradient of 4.bias" in found.value.names


def test_the_remedy_for_one_value_per_channel_is_not_what_was_given():
    """Five samples by two leave one over, and there is no cut by two at most that does not."""
    world = World()
    batch = {name: tensor[:5] for name, tensor in make_batch().items()}

    with pytest.raises(bb.BatchError, match="one value per channel") as found:
        world.step(micro_batch_size=2)(batch)

    assert "at least 2" not in str(found.value)


def test_a_weight_that_does_not_add_up_is_found_after_a_small_first_batch():
    """One micro-batch adds up to itself, so the first step that is cut is the one to look at."""
    world = World()
    step = world.step(weight=lambda batch: len(batch["x"]) ** 2)
    step({name: tensor[:2] for name, tensor in make_batch().items()})
    before = world.state()

    with pytest.raises(bb.LossError, match="add up to 12, but that of the whole batch is 36"):
        step(make_batch())

    assert world.state() == before
