from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.tasks.finding import find_task
from bigbatch.training import ways
from bigbatch.training.bench import BenchListener, bench
from bigbatch.training.bench_result import BenchResult, BenchRow, Turn, loss_all_reached
from bigbatch.training.data import first_batch, train_loader
from bigbatch.training.ways import Way, find_ways
from bigbatch.values import Plan
from tests.training.tiny import Points, loss_fn, network, tiny_task

NONE = ("none",)


@pytest.fixture(autouse=True)
def _plans_on_estimated_times(monkeypatch):
    """Measuring takes seconds, and changes only which plan is chosen."""
    monkeypatch.setattr(ways, "_WORTH_TIMING", 0.0)


def deep() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    return nn.Sequential(nn.Linear(2, 64), *blocks, nn.Linear(64, 3))


def row_of(found: BenchResult, batch_size: int, micro_batch_size: int, recompute: str = "none") -> BenchRow:
    (row,) = (
        row
        for row in found.rows
        if (row.way.batch_size, row.way.plan.micro_batch_size, row.way.recompute)
        == (batch_size, micro_batch_size, recompute)
    )
    return row


def step_by_hand(task, micro_batch_size, **options):
    """A ``Step`` of the first batch with plain SGD of rate 1, which moves weights by the gradient; and that by name."""
    torch.manual_seed(task.seed)
    model = task.model()
    batch = first_batch(task, task.train_data())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = bb.Step(model, task.loss_fn, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    step.micro_batch_size = micro_batch_size
    step(batch)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def whole_by_hand(task):
    torch.manual_seed(task.seed)
    model = task.model()
    task.loss_fn(model, first_batch(task, task.train_data())).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def difference_by_hand(found, expected):
    """As DESIGN has it, written out in float64."""
    norms = {name: float(g.double().norm()) for name, g in expected.items()}
    floor = 1e-3 * math.sqrt(sum(n * n for n in norms.values())) / math.sqrt(len(norms))
    return {n: float((found[n].double() - expected[n].double()).norm()) / max(norms[n], floor) for n in norms}


def test_gradient_and_peak_of_a_row_are_those_of_a_step_run_by_hand():
    task = tiny_task(model=lambda: network(norm=True), train_data=lambda: Points(64))

    found = bench(task, micro_batch_sizes=[4], policies=NONE, num_rounds=1)
    row = row_of(found, 16, 4)
    expected = difference_by_hand(step_by_hand(task, 4), whole_by_hand(task))

    # Weights that move by the gradient keep it up to the rounding of the weights.
    assert row.differences == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert row.gradient_difference == max(row.differences.values()) > 0.05  # BatchNorm: not a comparison of zeros
    torch.manual_seed(task.seed)
    model = task.model()
    step = bb.Step(model, loss_fn, task.optimizer(model))
    batch = first_batch(task, task.train_data())
    assert row.peak_bytes == step.measure(batch, 4)
    assert row_of(found, 16, 16).peak_bytes == step.measure(batch, 16)
    assert row.exactness == "approximate"


def test_recomputed_row_is_checked_by_hand_too():
    task = tiny_task(model=deep, batch_size=1024, train_data=lambda: Points(1024))

    found = bench(task, micro_batch_sizes=[512], policies=("none", "all"), num_rounds=1)
    row = row_of(found, 1024, 512, "all")
    torch.manual_seed(task.seed)
    model = task.model()
    step = bb.Step(model, loss_fn, task.optimizer(model), plan=row.way.plan)

    assert len(row.way.plan.recompute) == 4
    assert row.peak_bytes == step.measure(first_batch(task, task.train_data()), 512)
    assert row.peak_bytes < (row_of(found, 1024, 512).peak_bytes or 0)
    assert (row.gradient_difference or 0.0) < 1e-5


def test_a_cut_is_the_big_batch_and_a_smaller_batch_is_not():
    """The second half is the control of the first: what is not the big batch is far outside."""
    found = bench(tiny_task(train_data=lambda: Points(64)), micro_batch_sizes=[5, 4], policies=NONE, num_rounds=4)
    whole, smaller = row_of(found, 16, 16), row_of(found, 8, 8)

    for size in (5, 4):
        cut = row_of(found, 16, size)
        assert (cut.gradient_difference or 0.0) < 1e-5
        assert [turn.loss for turn in cut.turns] == pytest.approx([turn.loss for turn in whole.turns], rel=1e-4)
    assert (smaller.gradient_difference or 0.0) > 0.01
    assert [turn.num_steps for turn in smaller.turns] == [2] * 4
    assert [turn.num_samples for turn in smaller.turns] == [turn.num_samples for turn in whole.turns] == [16] * 4
    assert smaller.turns[-1].loss != pytest.approx(whole.turns[-1].loss, rel=1e-4)


def test_losses_are_those_of_a_run_by_hand():
    task = tiny_task(train_data=lambda: Points(50))  # the fourth batch of an epoch has 2 samples
    found = bench(task, micro_batch_sizes=[4], policies=NONE, num_rounds=6)
    torch.manual_seed(task.seed)
    model = task.model()
    optimizer, losses = task.optimizer(model), []
    for _, batch in zip(range(6), train_loader(task, task.train_data()), strict=False):
        loss = loss_fn(model, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    row = row_of(found, 16, 4)

    assert [turn.loss for turn in row.turns] == pytest.approx(losses, rel=1e-4)
    assert [turn.is_full for turn in row.turns] == [True, True, True, False, True, True]
    assert found.num_rounds == 6
    assert found.reference == "the big batch at once, by autograd alone"
    assert all(0 < turn.optimizer_seconds < turn.seconds for turn in row.turns)


def test_what_runs_out_of_memory_says_so_and_the_bench_goes_on():
    def hungry(model, batch):
        if len(batch[0]) > 8:
            torch.empty(2**60, dtype=torch.uint8)  # more than any machine has: a real error of the allocator
        return loss_fn(model, batch)

    found = bench(
        tiny_task(train_data=lambda: Points(64), loss_fn=hungry), micro_batch_sizes=[8], policies=NONE, num_rounds=2
    )
    whole = row_of(found, 16, 16)

    assert (whole.outcome, whole.turns, whole.peak_bytes) == ("out of memory", (), None)
    assert "allocate" in whole.why
    assert [len(row.turns) for row in found.rows] == [0, 2, 2]
    assert (found.reference, row_of(found, 16, 8).differences) == (None, {})
    assert all(found.speed(row) is None for row in found.rows)


def test_where_the_big_batch_does_not_fit_at_once_its_gradient_is_that_with_all_blocks_recomputed():
    direct_failed = []

    def hungry_at_first(model, batch):
        if not direct_failed and len(batch[0]) == 64:
            direct_failed.append(True)
            torch.empty(2**60, dtype=torch.uint8)
        return loss_fn(model, batch)

    task = tiny_task(model=deep, batch_size=64, train_data=lambda: Points(64), loss_fn=hungry_at_first)
    # Plans are made of the same task while it has room.
    direct_failed.append(True)
    wanted = {"micro_batch_sizes": [16], "policies": ("all",)}
    listener = BenchListener()
    listener.found = lambda ways: direct_failed.clear()
    found = bench(task, num_rounds=1, listener=listener, **wanted)

    assert found.reference == "the big batch at once, with all blocks recomputed"
    assert [row.outcome for row in found.rows] == ["ran"] * 4
    assert 0.0 < (row_of(found, 64, 16, "all").gradient_difference or 0.0) < 1e-5


def test_an_error_that_is_not_about_memory_is_raised():
    def broken(model, batch):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        bench(tiny_task(loss_fn=broken), policies=NONE, num_rounds=1)


def test_a_loss_that_is_not_finite_ends_its_row_alone():
    def unlucky(model, batch):
        return loss_fn(model, batch) * (math.nan if len(batch[0]) == 4 else 1.0)

    found = bench(
        tiny_task(train_data=lambda: Points(64), loss_fn=unlucky), micro_batch_sizes=[4], policies=NONE, num_rounds=2
    )

    assert (row_of(found, 16, 4).outcome, row_of(found, 16, 4).turns) == ("not finite", ())
    assert [row.outcome for row in found.rows] == ["ran", "ran", "not finite"]


def test_rows_over_the_budget_are_marked_and_plans_are_within():
    task = tiny_task(model=deep, batch_size=256, train_data=lambda: Points(256))
    found = bench(task, memory_budget="3MiB", micro_batch_sizes=[64], num_rounds=1)
    planned = [row for row in found.rows if row.way.recompute == "planned" and row.outcome == "ran"]

    assert found.planned_bytes == found.budget_bytes == 3 * 2**20
    assert planned
    assert sum(row.way.is_chosen for row in found.rows) == 1
    assert not any(found.is_over_budget(row) for row in planned)
    assert found.is_over_budget(row_of(found, 256, 256))
    assert [row["is_over_budget"] for row in found.summaries()] == [*map(found.is_over_budget, found.rows)]


def test_what_no_plan_fits_is_a_row_that_says_what_it_needs():
    task = tiny_task(model=deep, batch_size=256, train_data=lambda: Points(256))
    found = find_ways(task, torch.device("cpu"), budget_bytes=2**20, micro_batch_sizes=[64], policies=("planned",))
    problems = [way.problem for way in found.ways if way.problem]

    assert problems
    assert all(problem.startswith("no plan fits in 1.00 MiB, it needs ") for problem in problems)


def test_without_a_budget_half_of_the_activations_are_planned_for():
    task = tiny_task(model=deep, batch_size=1024, train_data=lambda: Points(1024))
    found = find_ways(task, torch.device("cpu"))
    model = deep()
    state = 4 * sum(p.nbytes for p in model.parameters())  # with the gradient and the two averages of AdamW
    at_once = bb.Step(model, loss_fn, task.optimizer(model)).measure(first_batch(task, task.train_data()), 1024)
    keys = [(way.batch_size, way.plan.micro_batch_size, way.plan.recompute, way.plan.keep) for way in found.ways]

    assert found.planned_bytes == pytest.approx((state + at_once) / 2, rel=0.01)
    assert [way.problem for way in found.ways if way.problem] == []
    assert len(set(keys)) == len(keys)
    assert {key[1] for key in keys if key[0] == 1024} >= {1024, 256, 128}
    assert {way.recompute for way in found.ways} == {"none", "all", "planned"}
    assert "estimated times" in found.notes[0]


def test_a_model_that_cannot_be_traced_is_not_planned():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x):
            return self.linear(x) * (1 if x.sum().item() > 0 else 2)

    found = find_ways(tiny_task(model=Branching), torch.device("cpu"))

    assert {way.recompute for way in found.ways} == {"none"}
    assert [way.plan.micro_batch_size for way in found.ways] == [16, 8, 4, 2]
    assert "cannot be traced" in found.notes[0]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"smaller_batch_sizes": [6]}, "A smaller batch of 6 beside 16: it must divide it"),
        ({"smaller_batch_sizes": [16]}, "A smaller batch of 16 beside 16"),
        ({"micro_batch_sizes": [17]}, "Micro-batches of 17 do not go into a batch of 16"),
        ({"micro_batch_sizes": [0]}, "micro_batch_size=0"),
        ({"policies": ["some"]}, "recompute='some'; it is one of none, all, planned"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wanted, message):
    with pytest.raises(bb.OptionError, match=message):
        find_ways(tiny_task(), torch.device("cpu"), **wanted)


def test_when_time_is_over_three_ways_are_tried_and_one_round_made():
    heard = []

    class Ears(BenchListener):
        def tried(self, row):
            heard.append(row.way.plan.micro_batch_size)

        def rounded(self, number, most):
            heard.append((number, most))

    found = bench(tiny_task(), micro_batch_sizes=[4, 2], policies=NONE, num_rounds=5, seconds=0.0, listener=Ears())

    assert (found.num_rounds, found.asked_rounds) == (1, 5)
    assert heard == [16, 8, 4, 2, (1, 5)]
    assert [row.outcome for row in found.rows] == ["ran", "ran", "ran", "no time"]
    assert [len(row.turns) for row in found.rows] == [1, 1, 1, 0]


def row(*turns: Turn, micro_batch_size: int = 8) -> BenchRow:
    return BenchRow(Way(8, Plan(micro_batch_size=micro_batch_size), "none"), turns=turns)


def turn(number: int, seconds: float, loss: float, **others) -> Turn:
    fields = {"num_samples": 8, "weight": 80.0, "num_steps": 2, "optimizer_seconds": seconds / 4, **others}
    return Turn(round=number, seconds=seconds, loss=loss, **fields)


def test_numbers_of_a_row():
    first = row(turn(1, 9.0, 3.0), turn(2, 2.0, 2.0), turn(3, 4.0, 1.0), turn(4, 0.1, 0.5, is_full=False))
    other = row(turn(1, 1.0, 3.0), turn(2, 1.0, 2.5), turn(3, 1.0, 2.6), micro_batch_size=4)
    found = BenchResult("t", "cpu", 8, "tokens", (first, other), 4, 4, 1.0, target_loss=2.0)

    assert [t.round for t in first.timed_turns] == [2, 3]
    assert (first.step_seconds, first.samples_per_second, first.weight_per_second) == (1.5, 3.0, 30.0)
    assert first.optimizer_share == 0.25
    assert (found.speed(first), found.speed(other)) == (1.0, 3.0)  # 2 / 1 and 4 / 1, in turns
    assert (found.seconds_to_target(first), found.seconds_to_target(other)) == (11.0, None)
    assert loss_all_reached([first, other]) == 2.5
    assert found.summaries()[0]["tokens_per_second"] == 30.0


def test_json_has_no_bare_infinity():
    found = BenchResult("t", "cpu", 8, "samples", (dataclasses.replace(row(), differences={"w": math.inf}),), 0, 1, 1.0)

    (summary,) = json.loads(found.to_json(), parse_constant=pytest.fail)["summaries"]
    assert (summary["gradient_difference"], summary["samples_per_second"]) == ("Infinity", None)


def test_real_tokens_are_counted_where_the_mean_is_over_tokens():
    task = dataclasses.replace(find_task("text"), batch_size=8)
    found = bench(task, micro_batch_sizes=[2], policies=NONE, num_rounds=2)
    batch = first_batch(task, task.train_data())
    cut = row_of(found, 8, 2)

    assert found.unit == "tokens"
    assert cut.turns[0].weight == sum(len(sample) - 1 for sample in batch)  # without padding
    assert (cut.gradient_difference or 0.0) < 1e-4


@pytest.mark.gpu
def test_on_a_card_ways_take_turns_and_each_needs_what_it_needs_alone():
    task = tiny_task(model=deep, batch_size=1024, train_data=lambda: Points(2048))
    found = bench(task, device="cuda", micro_batch_sizes=[256], policies=NONE, num_rounds=2)
    torch.manual_seed(task.seed)
    model = task.model().cuda()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters())
    step = bb.Step(model, loss_fn, task.optimizer(model))
    alone = step.measure(first_batch(task, task.train_data()), 256) - before

    assert [len(row.turns) for row in found.rows] == [2, 2, 2]
    assert row_of(found, 1024, 256).peak_bytes == pytest.approx(alone, rel=0.05)
    assert (row_of(found, 1024, 256).gradient_difference or 0.0) < 1e-4
