from __future__ import annotations

import copy

import pytest
import torch

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes
from bigbatch.training.events import Listener
from bigbatch.training.loop import Run
from tests.training.tiny import Points, network, tiny_task


class Recorder(Listener):
    """Writes down what it hears, as a list of strings, and keeps the values."""

    def __init__(self):
        self.heard = []
        self.steps = []
        self.epochs = []

    def began(self, info):
        self.heard.append("began")

    def fitting(self, budget_bytes):
        self.heard.append("fitting")

    def fitted(self, plan):
        self.heard.append("fitted")

    def micro_batch(self, number, count):
        self.heard.append(f"{number}/{count}")

    def stepped(self, record):
        self.heard.append("stepped")
        self.steps.append(record)

    def evaluating(self):
        self.heard.append("evaluating")

    def epoch_ended(self, record):
        self.heard.append("epoch")
        self.epochs.append(record)

    def ended(self, result):
        self.heard.append("ended")

    def close(self):
        self.heard.append("close")


def float64_task(**changes):
    def data():
        points = Points(50)
        points.points = points.points.double()
        return points

    return tiny_task(model=lambda: network().double(), train_data=data, eval_data=None, evaluate=None, **changes)


def trained(task, **how):
    run = Run(task, **how)
    return run.train(), {name: p.detach().clone() for name, p in run.parts.model.named_parameters()}


@pytest.mark.parametrize("micro_batch_size", [1, 3, 16, 99])
def test_a_run_does_not_depend_on_the_micro_batch_size(micro_batch_size):
    expected, direct = trained(float64_task())

    found, cut = trained(float64_task(), micro_batch_size=micro_batch_size)

    assert found.loss == pytest.approx(expected.loss, rel=1e-10)
    for name, value in direct.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_another_seed_is_another_run():
    """Control: what the test above compares does differ when the run does."""
    expected, _ = trained(float64_task())

    found, _ = trained(float64_task(seed=1))

    assert found.loss != pytest.approx(expected.loss, rel=1e-4)


def test_a_run_can_be_repeated():
    task = tiny_task(model=lambda: network(dropout=0.5), train_data=lambda: Points(50, noisy=True))

    _, first = trained(task, micro_batch_size=5)
    torch.randn(3)
    _, second = trained(task, micro_batch_size=5)

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_listeners_hear_of_everything_in_order():
    recorder = Recorder()

    Run(tiny_task(epochs=2, batch_size=32), micro_batch_size=16, listeners=[recorder]).train()

    epoch = ["1/2", "2/2", "stepped", "1/2", "2/2", "stepped", "evaluating", "epoch"]
    assert recorder.heard == ["began", *epoch, *epoch, "ended", "close"]


def test_records_say_where_the_run_is():
    recorder = Recorder()

    result = Run(tiny_task(), listeners=[recorder]).train()

    assert [record.num_samples for record in recorder.steps] == [16, 16, 16, 2] * 3
    assert [record.epoch for record in recorder.steps] == [1] * 4 + [2] * 4 + [3] * 4
    assert [record.step for record in recorder.steps] == list(range(1, 13))
    assert [record.step for record in recorder.epochs] == [4, 8, 12]
    assert recorder.steps[-1].seconds_left == 0
    assert result.num_steps == 12
    assert result.metrics == recorder.epochs[-1].metrics


def test_the_loss_of_an_epoch_is_weighed_by_samples():
    """The last batch of an epoch holds 2 of 50 samples; a mean over batches would count it like one of 16."""
    recorder = Recorder()

    result = Run(tiny_task(epochs=1), listeners=[recorder]).train()

    losses = [float(record.result.loss) for record in recorder.steps]
    expected = sum(loss * n for loss, n in zip(losses, [16, 16, 16, 2], strict=True)) / 50
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.loss != pytest.approx(sum(losses) / 4, rel=1e-4)


def test_the_scheduler_knows_the_steps_of_the_whole_run():
    told = []

    def scheduler(optimizer, total_steps):
        told.append(total_steps)
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)

    recorder = Recorder()
    Run(tiny_task(scheduler=scheduler), micro_batch_size=3, listeners=[recorder]).train()

    rates = [record.learning_rate for record in recorder.steps]
    assert told == [12]
    assert rates == pytest.approx([1e-2 * (1 - i / 12) for i in range(12)])


def test_the_average_is_what_is_evaluated():
    class Still(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = copy.deepcopy(model)

        def forward(self, x):
            return self.module(x)

        def update_parameters(self, model):
            pass

    run = Run(tiny_task(ema=Still))
    untouched = run.evaluate()

    assert run.train().metrics == untouched
    assert Run(tiny_task()).train().metrics != untouched


def test_several_optimizers_and_schedulers():
    def optimizers(model):
        return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[4].parameters(), lr=1e-2)]

    def schedulers(made, total_steps):
        return [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0) for optimizer in made]

    run = Run(tiny_task(optimizer=optimizers, scheduler=schedulers), micro_batch_size=4)

    assert run.train().num_skipped == 0
    assert len(run.step.optimizers) == 2


def test_evaluation_is_every_few_epochs_and_at_the_end():
    recorder = Recorder()

    Run(tiny_task(epochs=5, evaluate_every=2), listeners=[recorder]).train()

    assert [bool(record.metrics) for record in recorder.epochs] == [False, True, False, True, True]


def test_the_micro_batch_size_is_found_for_a_budget():
    recorder = Recorder()
    direct = Run(tiny_task(model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 500), torch.nn.Linear(500, 3))))
    batch = next(iter(direct_batches(direct)))
    budget = (direct.step.measure(batch, 1) + direct.step.measure(batch, 16)) // 2

    run = Run(direct.task, memory_budget=budget, listeners=[recorder])
    result = run.train()

    assert recorder.heard[:3] == ["began", "fitting", "fitted"]
    assert 1 <= max(result.micro_batch_sizes) < 16
    assert result.budget_bytes == budget
    assert result.peak_bytes is not None
    assert result.peak_bytes <= budget


def direct_batches(run):
    from bigbatch.training.data import train_loader

    return train_loader(run.task, run.parts.train_data)


def test_the_peak_is_that_of_a_steady_step():
    """Counted in the second full batch, when the optimizer has its state, and confirmed by counting from outside."""
    run = Run(tiny_task(batch_size=50), micro_batch_size=10)
    peaks = []
    with LiveBytes() as live:
        for record in run.steps(4):
            peaks.append((record.peak_bytes, live.peak_bytes()))
            live.reset_peak()

    assert run.peak_step == 2
    assert peaks[0][0] is None
    # What lives beside the step, the loader's next batch for one, is only in the count from outside.
    assert peaks[1][0] <= peaks[1][1] <= 1.5 * peaks[1][0]


def test_a_run_without_a_steady_step_has_no_peak():
    result = Run(tiny_task(batch_size=50, epochs=1)).train()

    assert (result.num_steps, result.peak_bytes, result.peak_step) == (1, None, None)


def test_listeners_are_closed_when_the_run_fails():
    recorder = Recorder()

    def broken(model, batch):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Run(tiny_task(loss_fn=broken), listeners=[recorder]).train()

    assert recorder.heard[-1] == "close"


def test_skipped_steps_are_counted_and_leave_the_loss_alone():
    calls = []

    def sometimes_nan(model, batch):
        calls.append(1)
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * float("nan") if len(calls) == 2 else loss

    result = Run(tiny_task(loss_fn=sometimes_nan, on_non_finite="skip", epochs=1)).train()

    assert (result.num_skipped, result.num_steps) == (1, 4)
    assert result.loss == result.loss  # not NaN


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", lambda: None, r"model\(\) returned a NoneType; it must return a torch.nn.Module"),
        ("model", torch.nn.Identity, r"returned a Identity without a parameter to train"),
        ("train_data", lambda: iter([]), r"train_data\(\) returned a list_iterator"),
        ("eval_data", lambda: [], r"eval_data\(\) returned a list of 0 samples"),
    ],
)
def test_functions_that_return_something_else_are_refused(field, value, message):
    with pytest.raises(bb.TaskError, match=message):
        Run(tiny_task(**{field: value}))


def test_an_optimizer_function_that_returns_none_is_refused():
    with pytest.raises(bb.ArgumentError, match="optimizer is a NoneType"):
        Run(tiny_task(optimizer=lambda model: None))


def test_a_run_is_as_exact_as_its_weakest_step():
    """Its last batch holds 2 samples, which are one micro-batch and so exact, BatchNorm or not."""
    recorder = Recorder()

    result = Run(
        tiny_task(model=lambda: network(norm=True), epochs=1), micro_batch_size=8, listeners=[recorder]
    ).train()

    assert recorder.steps[-1].result.exactness == "exact"
    assert result.exactness == "approximate"


def test_a_batch_larger_than_the_data_is_told():
    with pytest.warns(bb.BigBatchWarning, match="batch_size=64, but there are 50 samples: each step sees 50"):
        run = Run(tiny_task(batch_size=64))

    assert [record.num_samples for record in run.steps()] == [50, 50, 50]


def test_every_run_begins_with_the_scaler_that_was_given():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    run = Run(tiny_task(precision=scaler))

    assert run.train().num_skipped > 0  # that scale overflows in fp16
    assert scaler.get_scale() == 2.0**40
