"""``import bigbatch`` and ``bigbatch --help`` answer at once: neither loads torch."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

MAX_SECONDS = 0.2
IMPORT = "import bigbatch"
HELP = "from bigbatch.cli.main import main; assert main(['--help']) == 0"
TRAIN_HELP = HELP.replace("'--help'", "'train', '--help'")
VERIFY_HELP = HELP.replace("'--help'", "'verify', '--help'")
PLAN_HELP = HELP.replace("'--help'", "'plan', '--help'")
TORCH = "import torch"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fastest_seconds(code: str, num_runs: int = 5) -> float:
    """The shortest of some runs in fresh processes, with what Python itself takes.

    Other processes, a cold disk, and the first run that compiles only add time; the shortest is nearest to the cost.
    """

    def seconds(code: str) -> float:
        start = time.perf_counter()
        run(code)
        return time.perf_counter() - start

    return min(seconds(code) for _ in range(num_runs))


@pytest.mark.parametrize(
    "code",
    [IMPORT, HELP, TRAIN_HELP, VERIFY_HELP, PLAN_HELP],
    ids=["import", "--help", "train --help", "verify --help", "plan --help"],
)
def test_torch_is_not_loaded(code):
    loaded = run(code + "\nimport sys; print(); print(*sys.modules)").splitlines()[-1].split()

    assert "bigbatch" in loaded
    heavy = {"torch", "numpy", "sklearn", "transformers", "tensorboard", "matplotlib"}
    assert heavy.isdisjoint(loaded)


@pytest.mark.parametrize("code", [HELP, TRAIN_HELP], ids=["--help", "train --help"])
def test_help_helps(code):
    assert "usage" in run(code).lower()


@pytest.mark.parametrize("code", [IMPORT, HELP], ids=["import", "--help"])
def test_it_takes_less_than_a_fifth_of_a_second(code):
    assert fastest_seconds(code) <= MAX_SECONDS


def test_torch_takes_longer_than_that():
    """Control: loading torch would be seen by the bound above."""
    assert fastest_seconds(TORCH, num_runs=1) > MAX_SECONDS


def test_public_names_load_on_first_use():
    """A word loads no torch; a verb does."""
    code = "import sys, bigbatch as bb; bb.{}; print('torch' in sys.modules)"

    assert run(code.format("Plan")).strip() == "False"
    assert run(code.format("Step")).strip() == "True"
