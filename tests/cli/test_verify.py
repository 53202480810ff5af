from __future__ import annotations

import pytest

from bigbatch.cli.main import main

TASKS = """
import torch
from tests.training.tiny import network, tiny_task

good = tiny_task(name="good", batch_size=10, optimizer=lambda model: torch.optim.AdamW(model.parameters()))
normed = tiny_task(name="normed", batch_size=10, model=lambda: network(norm=True))
collated = tiny_task(
    name="collated", batch_size=10, collate=lambda samples: tuple(map(torch.stack, zip(*samples, strict=True)))
)

def deep():
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    return tiny_task(name="deep", model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 16), *layers))

def summed():
    return tiny_task(
        loss_fn=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    )
"""


@pytest.fixture
def verify(tmp_path, monkeypatch, capsys):
    """Runs ``bigbatch verify tasks_to_verify.py:NAME ...``; gives exit code, output and errors."""
    (tmp_path / "tasks_to_verify.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)

    def run(name, *options):
        code = main(["verify", f"tasks_to_verify.py:{name}", "--device", "cpu", "--threads", "1", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_what_is_equal_exits_with_0_and_a_table(verify):
    code, out, _ = verify("good", "--micro-batch-size", "4")

    assert code == 0
    assert out.startswith("good: the cut batch and the whole batch at once, in float64: equal up to rounding\n")
    assert "cut: 4 × 3 × 1 = 10, the last holds 2" in out
    assert "relative difference of the gradient" in out
    assert "Found" not in out


@pytest.mark.parametrize(("name", "found"), [("summed", "bb.Sum(loss)"), ("normed", "BatchNorm: the layer ['1'] sees")])
def test_what_is_not_equal_exits_with_1_and_says_why(verify, name, found):
    code, out, _ = verify(name, "--batch-size", "8")

    assert code == 1
    assert "NOT equal" in out
    assert found in out.partition("Found:")[2]


def test_the_ten_worst_are_shown(verify):
    _, out, _ = verify("deep")

    assert out.count(".weight ") + out.count(".bias ") == 10
    assert "and 8 more, which are closer" in out


def test_a_task_with_collate_is_verified(verify):
    assert verify("collated")[0] == 0


def test_an_error_is_a_message(verify):
    code, out, err = verify("good", "--micro-batch-size", "10")

    assert (code, out) == (1, "")
    assert err.startswith("bigbatch: micro_batch_size=10 cuts nothing")
