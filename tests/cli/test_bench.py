from __future__ import annotations

import json
import re
import sys

import pytest

from bigbatch.cli.main import main
from bigbatch.training import ways

TASKS = """
from torch import nn
from tests.training.tiny import Points, loss_fn, tiny_task

def deep():
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    return nn.Sequential(nn.Linear(2, 64), *blocks, nn.Linear(64, 3))

task = tiny_task(name="deep", model=deep, batch_size=1024, train_data=lambda: Points(2048))
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_task(tmp_path, monkeypatch):
    (tmp_path / "benches_of_mine.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ways, "_WORTH_TIMING", 0.0)  # measuring takes seconds


@pytest.fixture
def bench(capsys):
    """Runs ``bigbatch bench NAME ...``; gives exit code, output and errors."""

    def run(name, *options):
        code = main(["bench", name, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_bench_prints_its_table_and_writes_it_with_json_and_pictures(bench, tmp_path):
    code, out, err = bench("benches_of_mine.py:task", "--memory-budget", "3MiB", "--rounds", "2", "--out", "here")
    found = json.loads((tmp_path / "here" / "bench.json").read_text())
    table = (tmp_path / "here" / "bench.txt").read_text()

    assert (code, err) == (0, "")
    assert table in out
    assert (found["task"], found["batch_size"], found["num_rounds"], found["budget_bytes"]) == (
        "deep",
        1024,
        2,
        3 << 20,
    )
    assert len(found["rows"]) == len(found["summaries"]) >= 7
    # A line of the table has the numbers of the JSON.
    numbers = found["summaries"][0]
    line = next(line for line in table.splitlines() if re.match(r" *1024 +1024 × 1 +none", line))
    assert f"{numbers['samples_per_second']:,.1f}" in line
    assert f"{numbers['peak_bytes'] / 2**20:.2f} MiB over" in line
    assert f"{numbers['gradient_difference']:.1e}" in line
    for name in ("memory.png", "loss.png"):
        assert (tmp_path / "here" / name).read_bytes().startswith(b"\x89PNG")


def test_options_reach_the_bench(bench, tmp_path):
    options = ["--batch-size", "64", "--micro-batch-sizes", "16, 8", "--smaller-batches", "32", "--recompute", "none"]
    code, out, _ = bench("benches_of_mine.py:task", *options, "--rounds", "1", "--no-pictures", "--target-loss", "0.1")
    (folder,) = (tmp_path / "runs").iterdir()
    found = json.loads((folder / "bench.json").read_text())

    assert code == 0
    assert folder.name.startswith("bench-deep-")
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.txt"]
    sizes = [(row["way"]["batch_size"], row["way"]["plan"]["micro_batch_size"]) for row in found["rows"]]
    assert sizes == [(64, 64), (32, 32), (64, 16), (64, 8)]
    assert found["planned_bytes"] is None
    assert "to loss 0.1" in out
    assert "not reached" in out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--micro-batch-sizes", "a"], 2, "these are whole numbers with commas between"),
        (["--recompute", "some"], 1, "recompute='some'; it is one of none, all, planned"),
        (["--image-size", "96"], 1, "has no variant image_size=96"),
        (["--memory-budget", "much"], 1, "'much' is no amount of memory"),
    ],
)
def test_options_that_cannot_be_are_refused(bench, tmp_path, options, code, message):
    found, _, err = bench("benches_of_mine.py:task", *options)

    assert found == code
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", err).split())
    assert not (tmp_path / "runs").exists()


def test_without_matplotlib_a_bench_says_so_first_and_draws_nothing(bench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError

    code, out, err = bench("benches_of_mine.py:task", "--recompute", "none", "--rounds", "1", "--out", "here")

    assert code == 0
    assert len(err.splitlines()) == 1
    assert 'pip install "bigbatch[plot]"' in err
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"bench.json", "bench.txt"}
    assert "bench.json" in out
    assert ".png" not in out
