"""What a loss function may return, and that each kind of term is put together as in the one big batch."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.stepping.losses import terms_of
from tests.reference import assert_same_gradients, big_batch_gradients, big_batch_loss, gradient_error, gradients

NUM_SAMPLES = 10
ONE = torch.tensor(1.5)


def named(returned: Any) -> list[tuple[str, str]]:
    return [(term.name, term.kind) for term in terms_of(returned)]


@pytest.mark.parametrize(
    ("returned", "terms"),
    [
        (ONE, [("loss", "mean")]),
        (bb.Ratio(ONE, 2), [("loss", "ratio")]),
        (bb.Sum(ONE), [("loss", "sum")]),
        (bb.Constant(ONE), [("loss", "constant")]),
        ((ONE, bb.Sum(ONE)), [("0", "mean"), ("1", "sum")]),
        ([bb.Constant(ONE)], [("0", "constant")]),
        ({"a": ONE, 2: bb.Ratio(ONE, ONE)}, [("a", "mean"), ("2", "ratio")]),
        (OrderedDict(b=ONE, a=ONE), [("b", "mean"), ("a", "mean")]),
    ],
)
def test_terms_have_a_name_and_a_kind(returned, terms):
    assert named(returned) == terms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_may_have_any_precision(dtype):
    (term,) = terms_of(ONE.to(dtype))

    assert term.value.dtype == dtype


@pytest.mark.parametrize("denominator", [2, 2.0, 0, torch.tensor(2), torch.tensor(2.0), torch.tensor(True)])
def test_a_denominator_may_be_any_number(denominator):
    (term,) = terms_of(bb.Ratio(ONE, denominator))

    assert float(term.denominator) == float(denominator)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned a NoneType for the term 'loss'; return a 0-d tensor"),
        (1.5, "returned a float"),
        ((), "returned no term; return a 0-d tensor, or a dict or tuple"),
        ({"a": ONE, "b": None}, "returned a NoneType for the term 'b'"),
        ((ONE, {"a": ONE}), "returned a dict for the term '1'"),
        (torch.ones(3), r"'loss' of the loss has shape \(3,\);.*\.mean\(\)"),
        ({"a": torch.ones(1)}, r"'a' of the loss has shape \(1,\)"),
        (torch.tensor(1), "dtype torch.int64"),
        (torch.tensor(1j), "dtype torch.complex64"),
        (bb.Sum(torch.ones(2)), r"shape \(2,\)"),
        (bb.Constant(None), "is a NoneType, None; it is a 0-d tensor"),
        (bb.Ratio(torch.ones(2), 1), r"shape \(2,\)"),
        (bb.Ratio(ONE, torch.ones(2)), r"denominator of the term 'loss' has shape \(2,\)"),
        (bb.Ratio(ONE, torch.tensor(1.0, requires_grad=True)), "needs a gradient.*detach.*WholeBatchLoss"),
        (bb.Ratio(ONE, True), "denominator of the term 'loss' is True"),
        (bb.Ratio(ONE, [1]), r"denominator of the term 'loss' is \[1\]"),
        (np.ones(()), "returned a ndarray"),
    ],
)
def test_what_is_no_loss_is_refused(returned, message):
    with pytest.raises(bb.LossError, match=message):
        terms_of(returned)


@pytest.mark.parametrize("kind", [bb.Ratio, bb.Sum, bb.Constant])
def test_terms_are_frozen(kind):
    term = kind(ONE, 1) if kind is bb.Ratio else kind(ONE)

    with pytest.raises(dataclasses.FrozenInstanceError):
        term.term = ONE


# ----- put together


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def make_batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (NUM_SAMPLES,), generator=draw)
    return {"x": torch.randn(NUM_SAMPLES, 3, generator=draw, dtype=torch.float64) * 3, "labels": labels}


CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)


def rows(model: Any, batch: Any, weighted: bool = False) -> Tensor:
    weight = CLASS_WEIGHTS if weighted else None
    return F.cross_entropy(model(batch["x"]), batch["labels"], weight=weight, reduction="none")


def penalty(model: Any) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), start=torch.zeros((), dtype=torch.float64))


def class_weighted(model: Any, batch: Any) -> bb.Ratio:
    return bb.Ratio(rows(model, batch, weighted=True).sum(), CLASS_WEIGHTS[batch["labels"]].sum())


# Ours beside the plain loss of the whole batch.
LOSSES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Tensor]]] = {
    "mean": (lambda m, b: rows(m, b).mean(), lambda m, b: rows(m, b).mean()),
    "sum": (lambda m, b: bb.Sum(rows(m, b).sum()), lambda m, b: rows(m, b).sum()),
    "ratio": (
        class_weighted,
        lambda m, b: F.cross_entropy(m(b["x"]), b["labels"], weight=CLASS_WEIGHTS),
    ),
    "ratio of a count": (
        lambda m, b: bb.Ratio(rows(m, b)[b["labels"] > 0].sum(), int((b["labels"] > 0).sum())),
        lambda m, b: rows(m, b)[b["labels"] > 0].mean(),
    ),
    "mean and constant": (
        lambda m, b: (rows(m, b).mean(), bb.Constant(penalty(m))),
        lambda m, b: rows(m, b).mean() + penalty(m),
    ),
    "two ratios": (
        lambda m, b: {"a": class_weighted(m, b), "b": bb.Ratio(m(b["x"]).square().sum(), b["x"].abs().sum())},
        lambda m, b: (
            F.cross_entropy(m(b["x"]), b["labels"], weight=CLASS_WEIGHTS)
            + m(b["x"]).square().sum() / b["x"].abs().sum()
        ),
    ),
    "constant alone": (lambda m, b: bb.Constant(penalty(m)), lambda m, b: penalty(m)),
    "negative": (lambda m, b: -rows(m, b).mean(), lambda m, b: -rows(m, b).mean()),
}
micro_sizes = pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 9, 10, 20, None])
every_loss = pytest.mark.parametrize(("loss_fn", "plain"), LOSSES.values(), ids=LOSSES)


@every_loss
@micro_sizes
def test_terms_are_put_together_as_in_the_big_batch(loss_fn, plain, micro_batch_size):
    model, batch = make_model(), make_batch()

    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=micro_batch_size)

    assert_same_gradients(gradients(model), big_batch_gradients(model, plain, batch))
    assert float(result.loss) == pytest.approx(big_batch_loss(model, plain, batch), rel=1e-13)
    assert float(sum(result.terms.values())) == pytest.approx(float(result.loss), rel=1e-13)


@every_loss
@pytest.mark.parametrize("micro_batch_size", [4, None])
def test_what_was_in_grad_before_is_added_to_and_not_corrected(loss_fn, plain, micro_batch_size):
    """The correction of a late denominator is for the gradient of this step alone."""
    model, batch = make_model(), make_batch()
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 3.0 + number)
    before = gradients(model)

    bb.accumulate(model, loss_fn, batch, micro_batch_size=micro_batch_size)

    added = {name: None if grad is None else grad - before[name] for name, grad in gradients(model).items()}
    assert_same_gradients(added, big_batch_gradients(model, plain, batch), tolerance=1e-11)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("ratio", lambda m, b: rows(m, b, weighted=True).sum() / CLASS_WEIGHTS[b["labels"]].sum()),
        ("ratio of a count", lambda m, b: rows(m, b)[b["labels"] > 0].sum() / max(int((b["labels"] > 0).sum()), 1)),
        ("sum", lambda m, b: rows(m, b).sum()),
        ("mean and constant", lambda m, b: (rows(m, b).mean(), bb.Sum(penalty(m)))),
        ("two ratios", lambda m, b: bb.Ratio(class_weighted(m, b).numerator + m(b["x"]).square().sum(), 10)),
    ],
)
def test_the_wrong_kind_of_term_is_outside_the_tolerance(name, mistake):
    """Control: each term returned as a kind that it is not."""
    model, batch = make_model(), make_batch()

    bb.accumulate(model, mistake, batch, micro_batch_size=3)

    assert gradient_error(gradients(model), big_batch_gradients(model, LOSSES[name][1], batch)) > 1e-2


def test_a_constant_is_backpropagated_once():
    calls = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
            calls.append(float(grad_outputs[0]))
            return grad_outputs[0]

    def loss_fn(model: Any, batch: Any) -> Any:
        return rows(model, batch).mean(), bb.Constant(Noted.apply(penalty(model)))

    result = bb.accumulate(make_model(), loss_fn, make_batch(), micro_batch_size=3)

    assert calls == [1.0]
    assert float(result.terms["1"]) == pytest.approx(float(penalty(make_model()).detach()))


@pytest.mark.parametrize("order", [[0, 1, 2, 1, 0], [1, 0, 0, 2, 0], [0, 0, 0, 0, 2]])
def test_micro_batches_in_which_nothing_counts(order):
    """A denominator of 0 in some, also in the first, on which the provisional one rests."""
    labels = torch.tensor(order)
    batch = {"x": torch.randn(5, 3, dtype=torch.float64), "labels": labels}
    model = make_model()

    bb.accumulate(model, LOSSES["ratio of a count"][0], batch, micro_batch_size=1)

    assert_same_gradients(gradients(model), big_batch_gradients(model, LOSSES["ratio of a count"][1], batch))


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e5, 1e12])
def test_denominators_of_any_size(scale):
    model, batch = make_model(), make_batch()

    def loss_fn(model: Any, batch: Any) -> Any:
        return bb.Ratio(rows(model, batch).sum() * scale, len(batch["x"]) * scale)

    bb.accumulate(model, loss_fn, batch, micro_batch_size=3)

    assert_same_gradients(gradients(model), big_batch_gradients(model, LOSSES["mean"][1], batch))


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_a_late_denominator_neither_overflows_nor_vanishes_in_fp16(factor):
    """Backward is divided by a denominator of about the right size: of the sum alone fp16 would hold nothing."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batch = {"x": torch.randn(64, 3), "labels": torch.randint(0, 2, (64,))}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loss_fn(model: Any, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch["x"]).float(), batch["labels"], reduction="none").sum() * factor
        return bb.Ratio(loss, len(batch["x"]) * factor)

    bb.accumulate(model, loss_fn, batch, micro_batch_size=3, precision=scaler)

    found = {name: grad / scaler.get_scale() for name, grad in gradients(model).items() if grad is not None}
    expected = big_batch_gradients(model, lambda m, b: F.cross_entropy(m(b["x"]), b["labels"]), batch)
    assert gradient_error(found, expected) < 1e-2


def test_terms_are_told_by_name():
    model, batch = make_model(), make_batch()

    def loss_fn(model: Any, batch: Any) -> Any:
        return {
            "ce": rows(model, batch).mean(),
            "l2": bb.Constant(penalty(model)),
            "weighted": class_weighted(model, batch),
        }

    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=3)

    assert list(result.terms) == ["ce", "l2", "weighted"]
    plain = F.cross_entropy(model(batch["x"]), batch["labels"], weight=CLASS_WEIGHTS)
    assert float(result.terms["weighted"]) == pytest.approx(float(plain.detach()), rel=1e-13)
    assert all(term.shape == () and not term.requires_grad for term in result.terms.values())


def test_the_weight_is_what_the_first_term_is_over():
    batch = make_batch()

    assert float(bb.accumulate(make_model(), LOSSES["mean"][0], batch, micro_batch_size=3).weight) == NUM_SAMPLES
    found = bb.accumulate(make_model(), class_weighted, batch, micro_batch_size=3).weight
    assert float(found) == pytest.approx(float(CLASS_WEIGHTS[batch["labels"]].sum()), rel=1e-13)


def test_each_mean_may_have_a_weight_of_its_own():
    """Tokens for one term, samples for the other, in one dict."""
    labels = torch.tensor([[1, -100, 2], [-100, -100, 0], [1, 1, 1], [-100, 2, -100]])
    batch = {"x": torch.randn(4, 3, 3, dtype=torch.float64), "labels": labels}
    model = make_model()

    def loss_fn(model: Any, batch: Any) -> Any:
        tokens = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())
        return {"tokens": tokens, "samples": model(batch["x"]).square().sum((1, 2)).mean()}

    bb.accumulate(model, loss_fn, batch, micro_batch_size=1, weight={"tokens": "tokens", "samples": "samples"})

    assert_same_gradients(gradients(model), big_batch_gradients(model, lambda m, b: sum(loss_fn(m, b).values()), batch))


def test_the_loss_of_many_micro_batches_is_added_up_wide():
    """In fp16 the losses of 500 micro-batches would have three digits."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    x = torch.linspace(1, 2, 500).unsqueeze(1)

    result = bb.accumulate(model, lambda m, b: m(b).square().mean().half(), x, micro_batch_size=1)

    assert float(result.loss) == pytest.approx(float(x.square().mean()), rel=1e-4)


@pytest.mark.parametrize("batch_norm", ["merge", "native", "frozen"])
@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_a_loss_may_call_a_model_with_batch_norm_twice(batch_norm, micro_batch_size):
    """Siamese networks and consistency losses; torch lets them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    pairs = torch.randn(8, 2, 3, dtype=torch.float64)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch[:, 0]) - model(batch[:, 1])).square().mean()

    result = bb.accumulate(model, loss_fn, pairs, micro_batch_size=micro_batch_size, batch_norm=batch_norm)

    assert math.isfinite(float(result.loss))
    if micro_batch_size == 8 and batch_norm != "frozen":
        torch.manual_seed(0)
        fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        assert_same_gradients(gradients(model), big_batch_gradients(fresh, loss_fn, pairs))


# A parameter beside the model, such as a temperature.


def _with_temperature(kind: str) -> tuple[Any, nn.Parameter, nn.Module, Any]:
    torch.manual_seed(0)
    model, temperature = nn.Linear(4, 3).double(), nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    batch = {"x": torch.randn(10, 4).double(), "w": torch.rand(10).double(), "y": torch.randint(0, 3, (10,))}

    def loss_fn(model: Any, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch["x"]) * temperature, batch["y"], reduction="none")
        ratio = bb.Ratio((losses * batch["w"]).sum(), batch["w"].sum())
        return ratio if kind == "ratio" else ratio.numerator / ratio.denominator

    return loss_fn, temperature, model, batch


def _truth() -> Tensor:
    loss_fn, temperature, model, batch = _with_temperature("mean")
    return torch.autograd.grad(loss_fn(model, batch), temperature)[0]


def test_a_parameter_beside_the_model_that_could_not_be_corrected_is_refused():
    """It would get a gradient that is off by the factor that is known only at the end."""
    loss_fn, temperature, model, batch = _with_temperature("ratio")
    temperature.grad = torch.tensor(7.0, dtype=torch.float64)

    with pytest.raises(bb.GradientError, match=r"not in the model, of shape \(\).*parameters=\["):
        bb.accumulate(model, loss_fn, batch, micro_batch_size=3)

    assert float(temperature.grad) == 7.0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", ["named", "one micro-batch", "known weight"])
def test_a_parameter_beside_the_model_gets_its_gradient(way):
    loss_fn, temperature, model, batch = _with_temperature("mean" if way == "known weight" else "ratio")
    options: dict[str, Any] = {
        "named": {"micro_batch_size": 3, "parameters": [*model.parameters(), temperature]},
        "one micro-batch": {},
        "known weight": {"micro_batch_size": 3, "weight": lambda batch: batch["w"].sum()},
    }[way]

    bb.accumulate(model, loss_fn, batch, **options)

    assert temperature.grad is not None
    torch.testing.assert_close(temperature.grad, _truth(), rtol=1e-12, atol=0)
