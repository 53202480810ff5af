from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.training.evaluating import evaluate
from tests.training.tiny import Points, network, tiny_task
from tests.training.tiny import evaluate as tiny_evaluate

CPU = torch.device("cpu")


def results(task, model, batch_size):
    return evaluate(task, model, DataLoader(Points(37, seed=1), batch_size=batch_size), CPU)


@pytest.mark.parametrize("batch_size", [1, 5, 36, 37, 100])
def test_results_do_not_depend_on_the_batch_size(batch_size):
    task, model = tiny_task(), network(norm=True, dropout=0.5)
    points = Points(37, seed=1)
    model.eval()
    with torch.no_grad():
        logits = model(points.points)
    accuracy = (logits.argmax(1) == points.labels).double().mean().item()
    loss = torch.nn.functional.cross_entropy(logits.double(), points.labels).item()

    found = results(task, model, batch_size)

    assert found["accuracy"] == accuracy
    assert found["loss"] == pytest.approx(loss, rel=1e-6)


def test_a_mean_of_means_depends_on_it():
    """Control: the average over batches of 36 and 1 is another number."""
    task, model = tiny_task(), network()
    of_batches = [
        tiny_evaluate(model, batch)["loss"][0].item() / len(batch[1]) for batch in DataLoader(Points(37, seed=1), 36)
    ]

    assert sum(of_batches) / 2 != pytest.approx(results(task, model, 36)["loss"], rel=1e-3)


def test_modes_of_the_modules_are_left_as_they_were():
    model = network(dropout=0.5, norm=True)
    model[1].eval()

    results(tiny_task(), model, 8)

    assert [module.training for module in model] == [True, False, True, True, True]


def test_there_is_no_graph():
    seen = []

    def watching(model, batch):
        seen.append(torch.is_grad_enabled())
        return {"n": (model(batch[0]).sum(), 1)}

    results(tiny_task(evaluate=watching), network(), 20)

    assert seen == [False, False]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, r"evaluate\(model, micro_batch\) returned a float; it must return a dict of name: \(sum, count\)"),
        ({"accuracy": 0.5}, r"returned \{'accuracy': float\}"),
        ({"loss": (torch.ones(3), 3)}, r"gave 'loss' as a Tensor of shape \(3,\)"),
        ({"loss": ("a", 3)}, "gave 'loss' as a str"),
        ({"loss": (1.0, 0)}, r"counted 0 for 'loss' over all"),
    ],
)
def test_results_that_do_not_add_up_are_refused(returned, message):
    with pytest.raises(bb.TaskError, match=message):
        results(tiny_task(evaluate=lambda model, batch: returned), network(), 37)


def test_the_precision_is_that_of_the_training():
    dtypes = []

    def watching(model: nn.Module, batch):
        dtypes.append(model(batch[0]).dtype)
        return {"n": (1, 1)}

    results(tiny_task(evaluate=watching, precision="bf16"), network(), 37)

    assert dtypes == [torch.bfloat16]
