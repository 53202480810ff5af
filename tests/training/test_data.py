from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.training.data import LogicalBatches, check_map_style, train_loader
from tests.training.tiny import Points, tiny_task


def batches_of(**changes):
    task = tiny_task(**changes)
    return list(train_loader(task, task.train_data()))


def equal(some, others):
    return all(
        torch.equal(a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_every_epoch_sees_every_sample_once():
    order = list(LogicalBatches(10, batch_size=4, epochs=3, seed=0))

    assert [len(indices) for _, indices in order] == [4, 4, 2] * 3
    for epoch in range(3):
        seen = [index for _, indices in order[3 * epoch : 3 * epoch + 3] for index in indices]
        assert Counter(seen) == Counter(range(10))


def test_epochs_and_seeds_have_orders_of_their_own():
    def first_epochs(seed):
        order = [indices for _, indices in LogicalBatches(50, batch_size=50, epochs=2, seed=seed)]
        return [*order, *([] if seed else first_epochs(1))]

    orders = first_epochs(0)

    assert len({tuple(order) for order in orders}) == 4


def test_large_seeds_differ_too():
    """Only 32 bits of a seed reach torch's generator on the host: 2**32 must not be the same as 0."""
    assert list(LogicalBatches(50, batch_size=50, epochs=1, seed=0)) != list(
        LogicalBatches(50, batch_size=50, epochs=1, seed=2**32)
    )


def test_augmentation_is_the_same_whatever_is_drawn_in_between():
    task = tiny_task(train_data=lambda: Points(50, noisy=True))
    undisturbed = list(train_loader(task, task.train_data()))

    disturbed = []
    for batch in train_loader(task, task.train_data()):
        torch.randn(7)
        disturbed.append(batch)

    assert equal(undisturbed, disturbed)
    assert not torch.equal(undisturbed[0][0], undisturbed[4][0])


def test_loading_draws_nothing_from_the_generator_of_the_model():
    before = torch.get_rng_state()

    batches_of(train_data=lambda: Points(50, noisy=True))

    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_does_not_depend_on_the_number_of_workers():
    def noisy():
        return Points(50, noisy=True)

    assert equal(batches_of(train_data=noisy), batches_of(train_data=noisy, num_workers=2))


def test_with_collate_a_batch_is_a_list_of_samples():
    batch = batches_of(collate=lambda samples: samples)[0]

    assert type(batch) is list
    assert len(batch) == 16
    assert type(batch[0]) is tuple


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(Points(8)), r"train_data\(\) returned a DataLoader; return the dataset itself"),
        (iter([1, 2]), "returned a list_iterator; a run needs a map-style dataset"),
        ({"x": 1}, "returned a dict"),
        (None, "returned a NoneType"),
        ([], r"returned a list of 0 samples"),
    ],
)
def test_data_that_has_no_order_is_refused(data, message):
    with pytest.raises(bb.TaskError, match=message):
        check_map_style(data, "train_data")


LEFT_OPEN = """
import sys
import psutil
from bigbatch.training.loop import Run
from tests.training.tiny import evaluate, loss_fn, tiny_task

def failing(model, batch, calls=[]):
    calls.append(1)
    return loss_fn(model, batch) if len(calls) < 3 else 1 / 0

def failing_evaluation(model, batch):
    return 1 / 0

def num_workers():
    return len(psutil.Process().children())

for what in ({"loss_fn": failing}, {"evaluate": failing_evaluation}):
    try:
        Run(tiny_task(num_workers=1, epochs=9, **what)).train()
    except ZeroDivisionError as error:
        sys.last_exc = error  # as in a notebook: its frames hold what they were going through
    print(num_workers())

nobody_goes_on = Run(tiny_task(num_workers=1)).steps()
next(nobody_goes_on)
print(num_workers())
"""


def test_a_process_with_workers_ends_however_its_runs_ended():
    """A loader that was left in the middle made it wait without end for its worker."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], cwd=root, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["0", "0", "1"]
