"""What a step says of itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bigbatch as bb

PLAN = bb.Plan(micro_batch_size=4, recompute=("0", ("1", "2")), peak_bytes=2**30, budget_bytes=2**31)


class Classifier(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def made(**how):
    model = Classifier()
    return bb.Step(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), torch.optim.SGD(model.parameters(), lr=0.1), **how
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "Step(Classifier, batch_size=None, micro_batch_size=None, plan: none)"),
        ({"micro_batch_size": 8}, "Step(Classifier, batch_size=None, micro_batch_size=8, plan: none)"),
        (
            {"batch_size": 64, "memory_budget": "8GiB"},
            "Step(Classifier, batch_size=64, micro_batch_size=None, plan: at the first batch, for 8.00 GiB)",
        ),
        (
            {"batch_size": 64, "plan": PLAN},
            "Step(Classifier, batch_size=64, micro_batch_size=4, "
            "plan: 3 modules recomputed, peak 1.00 GiB of 2.00 GiB)",
        ),
        (
            {"plan": bb.Plan(micro_batch_size=2)},
            "Step(Classifier, batch_size=None, micro_batch_size=2, plan: 0 modules recomputed)",
        ),
    ],
)
def test_a_step_says_in_one_line_what_it_will_run(how, said):
    assert repr(made(**how)) == said


def test_a_step_says_what_it_has_planned():
    step = made(memory_budget="1MiB")
    step((torch.randn(6, 3), torch.zeros(6, dtype=torch.long)))

    assert f"micro_batch_size={step.plan.micro_batch_size}, plan: 0 modules recomputed, peak " in repr(step)
    assert repr(step).endswith(" of 1.00 MiB)")
