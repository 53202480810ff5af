"""A run on several ranks, in processes: the same training as in one, and what is saved goes on on any number."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import bigbatch as bb
from bigbatch.training import data, resuming
from bigbatch.training.checkpoint import Checkpoints, newest, paths_in, verified
from bigbatch.training.events import Listener
from bigbatch.training.group import ALONE
from bigbatch.training.loop import Run
from bigbatch.training.resuming import resume
from bigbatch.training.saving import Saver
from bigbatch.training.sharding import once, one_by_one
from tests.training.processes import on_ranks
from tests.training.test_resume import assert_same, full_task, state_of
from tests.training.tiny import Points, network, tiny_task

ALLOWED = 1e-10
"""Relative to the loss of a step."""


class Doubled(Points):
    def __init__(self, num_samples, seed=0):
        super().__init__(num_samples, seed)
        self.points = self.points.double()


class Losses(Listener):
    """The loss and the learning rate of each step."""

    def __init__(self):
        self.losses = []
        self.rates = []

    def stepped(self, record):
        self.losses.append(float(record.result.loss))
        self.rates.append(record.learning_rate)


def exact_task(**changes):
    """In float64, and without anything random in the model; 53 samples in batches of 9, so the last one has 8."""
    fields = dict(
        model=lambda: network().double(),
        train_data=lambda: Doubled(53),
        eval_data=lambda: Doubled(37, seed=1),
        scheduler=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total),
        ema=AveragedModel,
        max_grad_norm=0.3,
        batch_size=9,
        eval_batch_size=5,
    )
    return tiny_task(**{**fields, **changes})


def trained(run, *, found=None, saver=None):
    """What a run did: losses, rates, the results of its evaluations, counts, weights."""
    seen = Losses()
    run.listeners.append(seen)
    if found is not None:
        resume(run, found)
    result = run.train(saver)
    return {
        "losses": seen.losses,
        "rates": seen.rates,
        "metrics": [epoch.metrics for epoch in result.epochs],
        "averaged": int(run.parts.options.ema.n_averaged) if run.parts.options.ema is not None else None,
        "scheduled": run.step.schedulers[0].last_epoch,
        "num_steps": (result.num_steps, result.num_ranks),
        "weights": [tensor.tolist() for tensor in one_by_one(once(run.parts.model).values())],
    }


def whole_run(group, micro_batch_size=2):
    return trained(Run(exact_task(), micro_batch_size=micro_batch_size, group=group))


def saved_in_the_middle(group, folder, step, task=None):
    """A run that is saved after so many steps, and ends."""
    run = Run(task or exact_task(), micro_batch_size=2, group=group)
    saver = Saver(Checkpoints(folder) if group.is_first else None, every=step)
    for record in run.steps(step):
        run.progress.add(record)
        if record.step % run._steps_per_epoch == 0:
            run.progress.epochs.append(run._end_epoch(record))
        saver.after_step(run)


def gone_on(group, folder, micro_batch_size=2, task=None):
    found = newest(folder)
    return trained(Run(task or exact_task(), micro_batch_size=micro_batch_size, group=group), found=found)


@pytest.fixture(scope="module")
def alone():
    """The run of one process that never stopped."""
    torch.manual_seed(0)
    return whole_run(ALONE)


def differences(found, expected, *, first=0):
    expected = expected["losses"][first:]
    assert len(found["losses"]) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found["losses"], expected, strict=True))


def test_three_ranks_make_the_run_of_one(alone):
    """Steps, schedule and average once each; results of the evaluation are equal to what the weights allow."""
    first, *others = on_ranks(3, whole_run)

    assert differences(first, alone) < ALLOWED
    assert first["rates"] == alone["rates"]
    assert (first["averaged"], first["scheduled"]) == (alone["averaged"], alone["scheduled"]) == (18, 18)
    assert first["num_steps"] == (18, 3)
    for found, expected in zip(first["metrics"], alone["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    assert all(other == first for other in others), "Weights, results and losses are those of rank 0, bit for bit."


def test_what_two_ranks_saved_goes_on_on_one_and_on_four(tmp_path, alone):
    """In the middle of an epoch, and with another cut: the losses of the run that never stopped."""
    on_ranks(2, saved_in_the_middle, tmp_path, 8)
    on_one = gone_on(ALONE, tmp_path, micro_batch_size=4)
    on_four = on_ranks(4, gone_on, tmp_path)

    for found in (on_one, *on_four):
        assert differences(found, alone, first=8) < ALLOWED
        assert found["rates"] == alone["rates"][8:]
        assert (found["averaged"], found["scheduled"]) == (18, 18)
    assert on_one["num_steps"] == (18, 1)
    assert on_four[0]["num_steps"] == (18, 4)


def dropping_task(dropout="per-sample"):
    return exact_task(
        model=lambda: network(dropout=0.3).double(), dropout=dropout, noise_scale=True, ema=None, epochs=2
    )


def dropping_run(group, dropout="per-sample"):
    run = Run(dropping_task(dropout), micro_batch_size=2, group=group)
    return {**trained(run), "noise_scale": run.step.noise_scale.value}


def dropping_run_saved_in_the_middle(group, folder, step):
    saved_in_the_middle(group, folder, step, dropping_task())


def test_with_dropout_by_sample_the_run_of_ranks_is_that_of_one_and_goes_on_on_one(tmp_path):
    """Each rank begins with random numbers of its own; masks are keyed by the seed of rank 0, which is saved."""
    alone = dropping_run(ALONE)
    found, *others = on_ranks(3, dropping_run)
    on_ranks(2, dropping_run_saved_in_the_middle, tmp_path, 8)
    on_one = gone_on(ALONE, tmp_path, task=dropping_task())
    native = on_ranks(2, dropping_run, "native")[0]

    assert differences(found, alone) < ALLOWED
    assert found["noise_scale"] is not None
    assert all(other["noise_scale"] == found["noise_scale"] for other in others)
    assert differences(on_one, alone, first=8) < ALLOWED
    assert differences(native, alone) > 1e-3, "Control: masks that torch draws."


def test_samples_seen_twice_are_outside_the_tolerance(alone, monkeypatch):
    """Control: shares that are made equal with samples that were seen, as other samplers make them for 2 ranks."""
    whole = data.LogicalBatches._order

    def padded(self, epoch):
        order = whole(self, epoch)
        return torch.cat([order, order[: -len(order) % 2]])

    monkeypatch.setattr(data.LogicalBatches, "_order", padded)

    assert differences(whole_run(ALONE), alone) > 1e6 * ALLOWED


def test_another_order_is_outside_the_tolerance(alone, monkeypatch):
    """Control: a run that goes on with an order of its own."""
    monkeypatch.setattr(data.LogicalBatches, "_order", lambda self, epoch: torch.arange(self.num_samples))

    assert differences(whole_run(ALONE), alone) > 1e6 * ALLOWED


def random_run(group, folder):
    """Dropout, running statistics, an average and augmentation: once whole, once saved and gone on, once more whole."""
    task = full_task(
        batch_size=17
    )  # so that no share, and no piece of one, is a single sample, which BatchNorm refuses
    Run(task, group=group)
    drawn = torch.rand(3).tolist()
    whole = Run(task, micro_batch_size=3, group=group)
    whole.train()
    expected = state_of(whole)

    again = Run(task, micro_batch_size=3, group=group)
    again.train()

    run = Run(task, micro_batch_size=3, group=group)
    saver = Saver(Checkpoints(folder, keep=99) if group.is_first else None, every=5)
    run.train(saver)
    torch.manual_seed(999)
    rest = Run(task, micro_batch_size=3, group=group)
    resume(rest, verified(paths_in(folder)[0]))
    rest.train()
    return drawn, expected, state_of(again), state_of(rest)


def test_each_rank_draws_numbers_of_its_own_and_goes_on_with_them(tmp_path):
    """With dropout: reproducible, and bit for bit that of the run that never stopped, on as many ranks."""
    ranks = on_ranks(2, random_run, tmp_path)

    (drawn, *_), (others_drawn, *_) = ranks
    assert drawn != others_drawn
    for _, expected, again, rest in ranks:
        assert_same(again, expected)
        assert_same(rest, expected)
    weights = [{name: v for name, v in expected.items() if "random" not in name} for _, expected, *_ in ranks]
    assert_same(weights[1], weights[0])


class Signalled(Listener):
    """Sends this process a signal after a step."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def stepped(self, record):
        if record.step == self.step:
            os.kill(os.getpid(), self.number)


def stopped(group, folder, rank, number):
    run = Run(exact_task(epochs=50), micro_batch_size=2, group=group)
    if group.rank == rank:
        run.listeners.append(Signalled(7, number))
    with pytest.raises(bb.RunStopped, match="Stopped by") as raised:
        run.train(Saver(Checkpoints(folder) if group.is_first else None))
    return run.progress.num_steps, raised.value.signal_number, str(raised.value)


def saved_by_the_clock(group, folder):
    """The clock of rank 1 never says so, and that of rank 0 always."""
    seconds = 0.0 if group.is_first else 1e9
    run = Run(exact_task(epochs=1), micro_batch_size=2, group=group)
    run.train(Saver(Checkpoints(folder, keep=99) if group.is_first else None, seconds_between=seconds))
    return [int(path.name[5:]) for path in paths_in(folder)]


def refused(group, folder):
    """A checkpoint that only rank 1 cannot read: nothing moves anywhere."""
    saved_in_the_middle(group, folder, 4)
    run = Run(exact_task(), micro_batch_size=2, group=group)
    before = state_of(run)
    if group.rank == 1:
        resuming._check_same = lambda *args: (_ for _ in ()).throw(bb.CheckpointError("It is broken here."))
    with pytest.raises(bb.CheckpointError, match="broken") as raised:
        resume(run, newest(folder))
    after = state_of(run)
    assert_same(after, before)
    return str(raised.value)


def failed_save(group, folder):
    """What rank 0 cannot write is an error on all ranks."""
    run = Run(exact_task(), micro_batch_size=2, group=group)
    checkpoints = Checkpoints(folder) if group.is_first else None
    if checkpoints is not None:
        checkpoints.save = lambda *args, **kwargs: (_ for _ in ()).throw(bb.CheckpointError("full", needed_bytes=7))
    with pytest.raises(bb.CheckpointError, match="full") as raised:
        run.train(Saver(checkpoints, every=2))
    return str(raised.value), raised.value.needed_bytes


def planned(group):
    """With a memory budget each rank plans for its share, on a copy without numbers; and how the batch is cut then."""
    said = []
    logging.getLogger("bigbatch").addFilter(lambda record: said.append(record.getMessage()))
    wide = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2000), torch.nn.Linear(2000, 3)).double()  # noqa: E731
    run = Run(exact_task(model=wide, ema=None, batch_size=40), memory_budget="2MiB", group=group)
    records = [record.result.micro_batch_sizes for record in run.steps(1)]
    return records, run.step.plan.to_json(), said


def what_ranks_do_together(group, folder):
    return {
        "planned": planned(group),
        "stopped": stopped(group, folder / "stopped", 1, signal.SIGTERM),
        "clock": saved_by_the_clock(group, folder / "clock"),
        "failed": failed_save(group, folder / "failed"),
        "refused": refused(group, folder / "refused"),
    }


def test_ranks_stop_save_and_fail_together(tmp_path):
    """One start of processes for all of it."""
    first, second = on_ranks(2, what_ranks_do_together, tmp_path)

    # Rank 1 is told in step 7; all of them hear of it at the end of step 8.
    step, number, message = first["stopped"]
    assert (step, number) == (8, signal.SIGTERM)
    assert "Stopped by SIGTERM after step 8 of 300, and saved in" in message
    assert second["stopped"] == first["stopped"]
    assert newest(tmp_path / "stopped").step == 8

    assert first["clock"] == [2, 4, 6]

    (sizes,), _, said = first["planned"]
    assert sum(sizes) == 20
    assert second["planned"][:2] == first["planned"][:2]
    assert said == second["planned"][2] == []

    assert first["failed"] == second["failed"] == ("full", 7)

    assert second["refused"] == "It is broken here."
    assert first["refused"] == "Rank 1 of 2: It is broken here."


def test_all_ranks_were_counted():
    """Control of the fixtures: 53 samples in batches of 9 are 6 steps an epoch, and shares of 3 ranks are uneven."""
    order = data.LogicalBatches(53, batch_size=9, epochs=1, seed=0)
    sizes = Counter(len(share.indices) for rank in range(3) for share in data.Shares(order, rank, 3))

    assert sizes == {3: 17, 2: 1}
