"""A rank that is killed, or fails where nobody can be told, ends the others soon, with an error that names it."""

from __future__ import annotations

import pytest

from tests.stepping import rank_cases as cases
from tests.stepping.workers import workers


@pytest.mark.parametrize(
    ("size", "victim", "where", "wrap", "reduce"),
    [
        (2, 1, "forward", "ddp", "after"),
        (3, 0, "backward", "ddp", "after"),
        (3, 1, "optimizer", "ddp", "after"),
        (2, 1, "backward", "ddp", "overlap"),
        (3, 2, "forward", "fsdp2", "after"),
    ],
)
def test_a_killed_rank_ends_the_others_with_its_number(size, victim, where, wrap, reduce):
    with workers(size) as ranks:
        found = ranks.answers(size, cases.killed_steps, where, victim, wrap, reduce, then_end=True)

    assert found.pop(victim) == (False, "the process is gone")
    for rank, (well, answer) in found.items():
        assert well, f"rank {rank}: {answer}"
        said, seconds = answer
        assert said.startswith(f"{victim}: Rank {victim} is gone: the process has ended"), said
        assert seconds <= 30


@pytest.mark.parametrize(("kind", "wrap", "reduce"), [("memory", "fsdp2", "after"), ("error", "ddp", "overlap")])
def test_a_rank_that_fails_inside_a_collective_step_ends_all_with_its_reason(kind, wrap, reduce):
    with workers(3) as ranks:
        found = ranks.answers(3, cases.left_steps, kind, wrap, reduce, then_end=True)
        ranks.processes[1].join()
        assert ranks.processes[1].exitcode == 7

    reason = {"memory": "OutOfMemoryError: CUDA out of memory.", "error": "KeyError: 'sample 17'."}[kind]
    for rank in (0, 2):
        assert found[rank][1].startswith(f"Rank 1 failed: {reason}"), found[rank][1]
