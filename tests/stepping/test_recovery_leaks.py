"""A run that runs out of memory again and again keeps nothing of it."""

from __future__ import annotations

import gc
import logging

import psutil
import pytest
import torch
from torch import Tensor, nn

import bigbatch as bb


@pytest.mark.slow
def test_a_thousand_steps_with_a_failure_every_ten_do_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="bigbatch")  # the captured messages would be what grows
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 8))
    index = 0

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = (model(batch[0]) - batch[1]).square().mean()
        if index % 10 == 0 and len(batch[0]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=32, grow_after=3)
    batch, process = (torch.randn(128, 64), torch.randn(128, 8)), psutil.Process()
    retries = before = 0
    for index in range(1100):
        retries += step(batch).retries
        if index == 100:
            gc.collect()
            before = process.memory_info().rss
    gc.collect()

    assert retries == 110
    assert process.memory_info().rss - before < 1_000_000
