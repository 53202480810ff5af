"""What holds for every test: one thread, a seed of its own, no network, and no gpu test without a gpu."""

from __future__ import annotations

import os

# Before torch is imported, and inherited by the processes that tests start. With -n 2 on two cores, torch's own threads
# wait for each other, and the order of a sum would depend on how many there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers alone, in any order and on any worker."""
    torch.manual_seed(0)
