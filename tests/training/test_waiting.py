"""Time that goes into waiting for data, and what to do about it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from bigbatch.reporting.panel import PlainLines
from bigbatch.reporting.text import closing
from bigbatch.training.loop import Run
from bigbatch.training.waiting import Waiting, advice
from tests.training.tiny import Points, network, tiny_task


class Slow(Points):
    """Each batch takes 5 ms to load."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(0.005)
        return [self[index] for index in indices]


def test_waiting_is_told_apart_from_work():
    def batches():
        for i in range(6):
            time.sleep(0.5 if i == 0 else 0.03)  # the first one is the start of the workers
            yield i

    waiting, seen = Waiting(), []
    for batch in waiting.timed(batches()):
        seen.append(batch)
        time.sleep(0.02)

    assert seen == list(range(6))
    assert 0.4 < waiting.share < 0.75  # 150 of 270 ms
    assert 0.15 <= waiting.seconds < 0.5
    assert waiting.last_seconds >= 0.03
    assert Waiting().share == 0.0


@pytest.mark.parametrize(
    ("share", "num_workers", "expected"),
    [
        (0.05, 0, ""),
        (0.06, 0, "waited for data 6 % of the time. Load it with --workers 4 (now 0), half of the cores"),
        (0.5, 3, "persistent_workers=True), and pin_memory=True for CUDA"),
        (0.5, 4, "make a sample cheaper"),
    ],
)
def test_advice_comes_from_5_percent_on(share, num_workers, expected):
    found = advice(share, num_workers, num_cores=8)

    assert expected in found
    assert bool(found) == bool(expected)


def test_a_run_that_waits_says_so_and_what_to_do():
    lines: list[str] = []
    task = tiny_task(train_data=lambda: Slow(50), eval_data=None, evaluate=None)
    records = list(Run(task).steps(3))
    result = Run(task, listeners=[PlainLines(lines.append, seconds_between=0.0)]).train()

    assert all(record.data_seconds >= 0.005 for record in records)
    assert result.data_share > 0.2
    assert "waiting" in lines[-1]
    assert lines[-1].find(" for data") > 0
    assert closing(result, [])[-1] == result.data_advice != ""
    assert records[-1].as_dict()["data_share"] == records[-1].data_share > 0


def test_a_run_that_does_not_wait_gives_no_advice():
    """Control."""

    def slow_loss(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.05)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    result = Run(tiny_task(model=network, loss_fn=slow_loss, eval_data=None, evaluate=None, epochs=2)).train()

    assert result.data_share < 0.05
    assert result.data_advice == ""
