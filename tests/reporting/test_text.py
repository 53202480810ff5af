from __future__ import annotations

import dataclasses

import pytest

from bigbatch.reporting.comparison_text import peaks_text, runs_text, steps_text
from bigbatch.reporting.text import closing, direct_line, identity, opening, peak_line, preflight_text
from bigbatch.training.comparison import RunsComparison, StepsComparison
from bigbatch.training.events import RunInfo, RunResult
from bigbatch.training.preflight import Check, Preflight

MIB = 2**20
RESULT = RunResult(
    task="digits",
    device="cpu",
    batch_size=512,
    micro_batch_sizes=(256, 256),
    num_steps=80,
    num_skipped=0,
    exactness="approximate",
    loss=0.01,
    metrics={"accuracy": 0.9911, "loss": 0.03},
    budget_bytes=64 * MIB,
    peak_bytes=60 * MIB,
    peak_step=3,
    seconds=12.0,
    fit_seconds=2.0,
    samples_per_second=2993.3,
)


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([64] * 8, 1, "64 × 8 × 1 = 512"),
        ([64] * 4, 2, "64 × 4 × 2 = 512"),
        ([60] * 8 + [32], 1, "60 × 9 × 1 = 512, the last holds 32"),
        ([3, 3, 3], 1, "3 × 3 × 1 = 9"),
        ([4, 3, 3], 1, "4 × 3 × 1 = 10, the last 2 hold 3"),
        ([7], 1, "7 × 1 × 1 = 7"),
        ([4, 9, 30], 1, "4 to 30 samples in 3 micro-batches × 1 = 43"),
    ],
)
def test_the_identity_is_honest_about_a_rest(sizes, ranks, expected):
    assert identity(sizes, ranks) == expected


def test_the_opening_says_what_will_be_done():
    info = RunInfo("digits", "cpu", 517_394, 898, 512, 40, 80, 0, 64 * MIB)

    line = "digits: 898 samples, 517,394 parameters, batch 512, 40 epochs = 80 steps on cpu, budget 64.00 MiB"
    assert opening(info) == line


def test_the_closing_says_how_it_went():
    lines = closing(RESULT, ["runs/a/model.safetensors"])

    assert lines == [
        "accuracy 99.11 %, loss 0.03",
        "peak 60.00 MiB (counted bytes of a real steady step), inside the budget of 64.00 MiB",
        "80 steps in 12.0 s, 2,993 samples/s",
        "equal to the big batch: approximately (BatchNorm saw the statistics of micro-batches)",
        "files: runs/a/model.safetensors",
    ]


def test_the_closing_advises_a_batch_size():
    lines = closing(dataclasses.replace(RESULT, noise_scale=912.0), [])

    assert any("a batch of about 910 would still be used well" in line for line in lines)
    assert not any("noise scale" in line for line in closing(RESULT, []))


def test_the_closing_of_a_bad_run_hides_nothing():
    bad = dataclasses.replace(RESULT, metrics={}, loss=None, num_skipped=80, peak_bytes=65 * MIB, exactness="exact")

    lines = closing(bad, [])

    assert lines[0] == "no result"
    assert "OVER the budget of 64.00 MiB" in lines[1]
    assert lines[2].startswith("80 steps, 80 of them skipped")


def test_a_peak_that_was_not_counted_is_not_made_up():
    assert peak_line(None, 64, num_steps=1) == "peak not counted: no steady step of a full batch among 1"
    assert peak_line(5 * MIB, None).endswith("no budget given")
    assert "allocator" in peak_line(5 * MIB, None, device="cuda")


def test_the_direct_peak_is_told_beside_the_budget():
    assert direct_line(int(213.4 * MIB), 64 * MIB) == "the direct big batch would need 213.40 MiB: 3.3 × the budget"
    assert direct_line(MIB, None) == "the direct big batch would need 1.00 MiB"
    assert direct_line(None, MIB).endswith("it is out of memory")
    assert peaks_text(60 * MIB, 213 * MIB, 64 * MIB).count("\n") == 1


def test_steps_are_held_to_their_bound():
    found = StepsComparison("digits with GroupNorm", 10, 256, 1.03e-15, "head.bias", "exact")

    assert steps_text(found) == (
        "  digits with GroupNorm, float64, 10 optimizer steps in micro-batches of 256: "
        "largest relative difference of a parameter 1.0e-15 (head.bias), allowed 1e-10: ok"
    )
    assert steps_text(dataclasses.replace(found, difference=1e-9)).endswith("allowed 1e-10: OUTSIDE")
    assert steps_text(dataclasses.replace(found, exactness="approximate")).endswith("approximate, so held to no bound")
    assert " in micro-batches of 171 (the run took 512 at once, which would show nothing): " in steps_text(
        dataclasses.replace(found, micro_batch_size=171, whole=512)
    )
    assert steps_text(dataclasses.replace(found, micro_batch_size=1, whole=1)) == (
        "  digits with GroupNorm: a batch of 1 cannot be cut, so there is nothing to compare"
    )


def test_runs_are_told_with_their_difference():
    found = RunsComparison(0.171, "stem.0.weight", cut={"accuracy": 0.9944}, direct={"accuracy": 0.9956})

    first, second = runs_text(found, "approximate").splitlines()

    assert first == "  this run is approximate: its first gradient differs by 1.7e-01 (stem.0.weight)"
    assert second == ("  accuracy: 99.44 % here, 99.56 % directly, 0.12 points apart (approximate), allowed 0.5: ok")
    far = dataclasses.replace(found, cut={"accuracy": 0.9})
    assert runs_text(far, "approximate").endswith("9.56 points apart (approximate), allowed 0.5: OUTSIDE")


def test_a_preflight_ends_with_its_verdict():
    fine, wrong = Check("loss falls", "ok", "2 to 1"), Check("memory", "wrong", "9 of 8", "Make it smaller.")

    assert preflight_text(Preflight(50, (fine,))).splitlines()[1:] == [
        "pre-flight of 50 steps",
        "loss falls  ok  2 to 1",
        "go",
    ]
    assert preflight_text(Preflight(50, (fine, wrong))).splitlines()[-2:] == [
        "memory: Make it smaller.",
        "no go: memory",
    ]
