from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.cli.main import main
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.search import undominated
from tests.training.tiny import Points, loss_fn

TASKS = """
import torch
from torch import nn
from tests.training.tiny import network, tiny_task

def deep():
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(2, 64), *blocks, nn.Linear(64, 3))

task = tiny_task(name="deep", model=deep, batch_size=50)
half = tiny_task(name="half", model=deep, batch_size=50, precision="bf16")

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x):
        return self.linear(x) * (1 if x.sum().item() > 0 else 2)

normed = tiny_task(name="normed", model=lambda: network(norm=True), batch_size=50)
exact = tiny_task(name="exact", model=lambda: network(norm=True), batch_size=50, batch_norm="exact")
depends = tiny_task(name="depends", model=Branching, batch_size=50)
"""
ESTIMATED = ("--device", "cpu", "--estimate")
BATCH, BUDGET = ("--batch-size", "4000"), ("--memory-budget", "8MiB")


@pytest.fixture(autouse=True)
def _in_a_folder_with_tasks(tmp_path, monkeypatch):
    (tmp_path / "plans_of_mine.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan(capsys):
    """Runs ``bigbatch plan NAME ...``; gives exit code, output and errors."""

    def run(name, *options):
        code = main(["plan", name, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def deep() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(2, 64), *blocks, nn.Linear(64, 3))


def planned_directly(**options):
    """The same by the public API, for the task of the file."""
    model = deep()
    batch = Points(50).points, Points(50).labels
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return bb.plan(
        model, loss_fn, batch, optimizer=optimizer, batch_size=4000, memory_budget="8MiB", calibrate=False, **options
    )


@pytest.mark.parametrize(("name", "is_measured"), [("normed", True), ("task", False)])
def test_how_far_batch_norm_turns_the_gradient_of_the_plan_is_measured(plan, name, is_measured):
    code, out, _ = plan(f"plans_of_mine.py:{name}", *BUDGET, *ESTIMATED, "--micro-batch-size", "4")

    words = " ".join(out.split())
    assert code == 0
    assert (
        bool(re.search(r"Measured: .* gradient of 16 samples .* of 4 has a cosine of 0\.\d\d\d", words)) == is_measured
    )


def test_a_task_is_planned(plan):
    code, out, err = plan("plans_of_mine.py:task", *BATCH, *BUDGET, *ESTIMATED)

    assert (code, err) == (0, "")
    assert re.search(r"deep \(Sequential, [\d,]+ parameters, fp32, AdamW\): batches of 4000 in 8.00 MiB on cpu", out)
    for title in ("Plan", "Memory at the peak, by kind", "Memory by module", "From the direct batch", "What limits"):
        assert f"\n{title}" in out
    assert "(estimated for a desktop processor)" in out
    assert not re.search(r" $", out, re.MULTILINE)


def test_the_plan_is_that_of_the_public_api(plan):
    code, out, _ = plan("plans_of_mine.py:task", *BATCH, *BUDGET, *ESTIMATED, "--json")

    found, expected = json.loads(out), planned_directly()
    assert code == 0
    assert bb.Plan.from_json(json.dumps(found["plan"])) == expected
    assert found["explanation"]["direct_bytes"] > 8 * 2**20 >= expected.peak_bytes
    profile = MemoryProfile.from_json(json.dumps(found["profile"]))
    assert bb.plan(profile, batch_size=4000, memory_budget="8MiB").micro_batch_size == expected.micro_batch_size


def test_what_is_held_stays(plan):
    names = "1,2+3"
    held = ("--micro-batch-size", "100", "--recompute", names)
    code, out, _ = plan("plans_of_mine.py:task", *BATCH, *BUDGET, *ESTIMATED, "--json", *held)

    found = json.loads(out)["plan"]
    assert code == 0
    assert (found["micro_batch_size"], found["recompute"]) == (100, ["1", ["2", "3"]])
    assert found["peak_bytes"] == planned_directly(micro_batch_size=100, recompute=("1", ("2", "3"))).peak_bytes


def test_the_options_of_the_task_are_priced(plan):
    """In bf16 products save half the bytes: the same micro-batch needs less."""
    peaks = {}
    for name in ("task", "half"):
        held = ("--micro-batch-size", "200", "--recompute", "none")
        _, out, _ = plan(f"plans_of_mine.py:{name}", *BATCH, *BUDGET, *ESTIMATED, "--json", *held)
        peaks[name] = json.loads(out)["plan"]["peak_bytes"]

    expected = planned_directly(micro_batch_size=200, recompute="none", precision="bf16").peak_bytes
    assert peaks["half"] == expected < peaks["task"]


def test_times_are_measured_where_the_model_can_run(plan):
    code, out, _ = plan("plans_of_mine.py:task", *BATCH, *BUDGET, "--device", "cpu")

    assert code == 0
    assert "(measured)" in out


def test_a_model_on_meta_is_planned_for_a_card(plan):
    options = ("--model-device", "meta", "--device-peak", "165TFLOPS,1008GB/s", "--json")
    # cuBLAS takes 64 MiB of it.
    code, out, _ = plan("plans_of_mine.py:task", *BATCH, "--memory-budget", "73MiB", *options)

    found = json.loads(out)
    assert code == 0
    assert found["times"] == "estimated for the peaks that were given"
    assert found["plan"]["peak_bytes"] <= 8 * 2**20


def test_a_shape_is_planned_without_weights(plan):
    code, out, err = plan("gpt2", "--size", "64", "--batch-size", "64", "--memory-budget", "2.5GiB", "--card", "4090")

    assert (code, err) == (0, "")
    assert "no dropout, AdamW; 64 tokens): batches of 64 in" in out
    assert "on cuda" in out
    assert "(estimated for rtx4090)" in out
    assert "blocks.0 to" in out


def test_when_nothing_fits_it_says_what_would_help(plan):
    code, out, err = plan("plans_of_mine.py:task", *BATCH, "--memory-budget", "3MiB", *ESTIMATED)

    assert (code, out) == (1, "")
    assert re.search(r"bigbatch: No plan fits in 3.00 MiB: .* Raise the budget by [\d.]+ [KM]iB.", err)
    assert re.search(r"What else would help, each by itself:\n(  .* saves about [\d.]+ [KM]iB, .*\n)+", err)
    assert "Traceback" not in err


def test_when_nothing_fits_the_json_says_so(plan):
    code, out, _ = plan("plans_of_mine.py:task", *BATCH, "--memory-budget", "3MiB", *ESTIMATED, "--json")

    found = json.loads(out)
    assert code == 1
    assert found["smallest_bytes"] > found["budget_bytes"] == 3 * 2**20
    assert all(relief["saved_bytes"] > 0 for relief in found["what_else"])
    code, *_ = plan("plans_of_mine.py:task", *BATCH, "--memory-budget", f"{found['smallest_bytes']}B", *ESTIMATED)
    assert code == 0, "the smallest budget works"


def test_when_exact_does_not_fit_merge_is_offered_with_its_cosine(plan):
    code, out, err = plan("plans_of_mine.py:exact", *BATCH, "--memory-budget", "500kB", *ESTIMATED, "--json")

    offer = r'batch_norm="merge" fits, in micro-batches of \d+ .* has a cosine of \d\.\d{3} to that'
    assert code == 1
    assert re.search(f"What else would help, each by itself:\n  {offer}", err)
    assert re.match(offer, json.loads(out)["offers"][0])


def test_a_model_whose_memory_depends_on_numbers_is_measured(plan):
    code, out, _ = plan("plans_of_mine.py:depends", "--memory-budget", "1MiB", "--device", "cpu")

    assert code == 0
    assert "Real steps were measured, and blocks are not told apart" in out
    assert re.search(r"time of a step +not known", out)


def test_such_a_model_on_meta_is_an_error(plan):
    code, _, err = plan("plans_of_mine.py:depends", "--memory-budget", "1MiB", "--model-device", "meta")

    assert code == 1
    assert "bigbatch: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonsense", (), "There is no task or shape 'nonsense'"),
        ("gpt2", (), "gpt2 has no batch size of its own; give one: --batch-size 64."),
        ("plans_of_mine.py:task", ("--size", "3"), "--size is for shapes"),
        ("gpt2", ("--device", "cpu", "--card", "rtx4090"), "--card rtx4090 does not go with --device cpu"),
        ("gpt2", ("--card", "rtx9999"), "There is no card 'rtx9999'"),
        ("gpt2", ("--frontier", "here.jpg"), "--frontier here.jpg: a picture ends with .png"),
        ("gpt2", ("--timeline", "here.html"), "--timeline here.html: a picture ends with .png"),
    ],
)
def test_what_cannot_be_is_said(plan, name, options, message):
    code, out, err = plan(name, "--memory-budget", "8GiB", *options)

    assert (code, out) == (1, "")
    assert err.startswith(f"bigbatch: {message}")


@pytest.mark.parametrize("options", [(), ("--memory-budget", "8GiB", "--card", "t4", "--device-peak", "1TFLOPS,1GB/s")])
def test_a_wrong_command_line_is_an_error_of_its_own(plan, options):
    code, _, err = plan("gpt2", "--batch-size", "64", *options)

    assert code == 2
    assert "memory-budget" in err or "--device-peak" in err


def test_pictures_are_written(plan, tmp_path):
    files = ("--frontier", "f.png", "--timeline", "t.png")
    code, _, err = plan("plans_of_mine.py:task", *BATCH, *BUDGET, *ESTIMATED, *files)

    assert (code, err) == (0, "")
    for name in ("f.png", "t.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_no_plan_of_the_picture_is_better_than_another_in_both():
    values = [(3, 1.0), (1, 3.0), (2, 2.0), (2, 2.5), (4, 1.0), (5, 0.5)]
    plans = [bb.Plan(micro_batch_size=1, peak_bytes=peak, step_seconds=seconds) for peak, seconds in values]

    kept = undominated(plans)

    assert [(plan.peak_bytes, plan.step_seconds) for plan in kept] == [(1, 3.0), (2, 2.0), (3, 1.0), (5, 0.5)]


def test_a_plan_for_ranks_of_ddp_counts_buckets_and_the_largest_share(plan):
    code, out, err = plan("plans_of_mine.py:task", *BATCH, *BUDGET, *ESTIMATED, "--world-size", "3")

    assert (code, err) == (0, "")
    assert re.search(r"batches of 4000 in 8.00 MiB on cpu on each of 3 ranks", out)
    assert re.search(r"micro × accumulation × ranks +\d+ × \d+ × 3 = 4000", out)
    assert re.search(r"\n +buckets +\d", out)


def test_a_plan_for_fsdp2_says_what_is_whole_and_how_gradients_are_summed(plan):
    ranks = ("--world-size", "4", "--parallel", "fsdp2")
    code, out, _ = plan("plans_of_mine.py:task", *BATCH, "--memory-budget", "2MiB", *ESTIMATED, *ranks)
    found = json.loads(
        plan("plans_of_mine.py:task", *BATCH, "--memory-budget", "2MiB", *ESTIMATED, *ranks, "--json")[1]
    )

    assert code == 0
    assert re.search(r"gradients +summed (once a step|in each micro-batch)", out)
    assert found["world_size"] == 4
    assert found["plan"]["reduce"] in ("after", "each")
    assert found["explanation"]["kinds"]["gathered"] > 0
    assert sum(found["explanation"]["kinds"].values()) == found["explanation"]["peak_bytes"]


def test_parallel_needs_several_ranks(plan):
    code, _, err = plan("plans_of_mine.py:task", *BATCH, *BUDGET, "--parallel", "fsdp2")

    assert code == 2
    assert "--world-size" in err
