"""Ranks that run out of memory, get a NaN or are killed, in random places: nobody hangs, and replicas stay equal.

``python -m tests.torture.ranks --trials 200`` prints one line for each trial that went wrong, and a summary.
``--whole-batch`` takes a loss that looks across the samples of all ranks, and kills nobody.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

from tests.reference import gradient_error
from tests.stepping import rank_cases as cases
from tests.stepping import rank_whole_batch
from tests.stepping.workers import WorkerError, Workers, workers

PLACES = ("forward", "backward", "optimizer")
PLACES_OF_WHOLE_BATCH = ("first pass", "second pass", "only pass", "loss", "rows", "rows again", "backward")
MOST_SECONDS = 30.0


def wrong_in_failure(ranks: Workers, size: int, kind: str, where: str, bad: list[int], micro_batch: int) -> str:
    """What is wrong after memory ran out, or something was not finite, on some ranks; "" when nothing is."""
    options = {"on_non_finite": "skip"} if kind == "nan" else {}
    found = ranks.run(size, cases.failing_steps, where, bad, kind, micro_batch=micro_batch, **options)
    skipped = kind == "nan" and any(one["happened"] for one in found)
    return wrong_in(found, cases.truth_after(skipped=skipped))


def wrong_in_whole_batch(ranks: Workers, size: int, kind: str, where: str, bad: list[int]) -> str:
    """The same of a loss that looks across the samples of all ranks."""
    options = {"on_non_finite": "skip"} if kind == "nan" else {}
    micro = 4 if where == "only pass" else 2
    found = ranks.run(size, rank_whole_batch.failing_case, where, kind, bad, micro, **options)
    skipped = kind == "nan" and any(one["happened"] for one in found)
    return wrong_in(found, rank_whole_batch.truth_after(2 if skipped else 3, size))


def wrong_in(found: list[dict[str, Any]], truth: dict[str, Any]) -> str:
    """What is wrong with what the ranks have in the end; "" when nothing is."""
    for other in found[1:]:
        if other["num_steps"] != found[0]["num_steps"] or other["size"] != found[0]["size"]:
            return f"the ranks differ: {[(one['num_steps'], one['size'], one['said']) for one in found]}"
        if not all(value.equal(other["weights"][name]) for name, value in found[0]["weights"].items()):
            return f"replicas are not equal: {[one['said'] for one in found]}"
    error = gradient_error(found[0]["weights"], truth)
    return "" if error <= 1e-10 else f"weights are off by {error:.3g}: {[one['said'] for one in found]}"


def wrong_in_kill(size: int, where: str, victim: int, wrap: str, reduce: str) -> str:
    """What is wrong with what the others are told of a rank that was killed; "" when nothing is."""
    with workers(size) as ranks:
        found = ranks.answers(size, cases.killed_steps, where, victim, wrap, reduce, then_end=True)
    for rank in set(range(size)) - {victim}:
        well, answer = found[rank]
        if not well:
            return f"rank {rank}: {answer}"
        if not answer[0].startswith(f"{victim}: Rank {victim} is gone") or answer[1] > MOST_SECONDS:
            return f"rank {rank} after {answer[1]:.1f} s: {answer[0]}"
    return ""


def run_whole_batch_trial(ranks: Workers, draw: random.Random) -> tuple[dict[str, Any], str]:
    """One trial with a loss of the whole batch; what it was, and what went wrong."""
    size, kind = draw.choice((2, 3, 4)), draw.choice(("memory", "memory", "nan"))
    bad = sorted(draw.sample(range(size), draw.randint(1, size)))
    rows = ("rows", "rows again")  # no number comes from there
    where = draw.choice([place for place in PLACES_OF_WHOLE_BATCH if kind == "memory" or place not in rows])
    trial = {"kind": kind, "size": size, "where": where, "bad": bad}
    return trial, wrong_in_whole_batch(ranks, size, kind, where, bad)


def run_trial(ranks: Workers, draw: random.Random, kind: str) -> tuple[dict[str, Any], str]:
    """One trial; what it was, and what went wrong."""
    size = draw.choice((2, 3, 4))
    trial: dict[str, Any] = {"kind": kind, "size": size}
    if kind == "kill":
        wrap, reduce = draw.choice((("ddp", "after"), ("ddp", "after"), ("ddp", "overlap"), ("fsdp2", "after")))
        trial |= {"where": draw.choice(PLACES), "victim": draw.randrange(size), "wrap": wrap, "reduce": reduce}
        return trial, wrong_in_kill(size, trial["where"], trial["victim"], wrap, reduce)
    bad = sorted(draw.sample(range(size), draw.randint(1, size)))
    places = PLACES if kind == "memory" else PLACES[:2]  # a NaN comes from the model
    trial |= {"where": draw.choice(places), "bad": bad, "micro_batch": draw.choice((1, 2))}
    return trial, wrong_in_failure(ranks, size, kind, trial["where"], bad, trial["micro_batch"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole-batch", action="store_true")
    arguments = parser.parse_args()
    draw, done, wrong = random.Random(arguments.seed), Counter[str](), 0
    longest, began = 0.0, time.monotonic()
    ranks = Workers(4)
    for _ in range(arguments.trials):
        kind = "" if arguments.whole_batch else draw.choice(("memory", "memory", "nan", "kill"))
        start = time.monotonic()
        try:
            trial, said = run_trial(ranks, draw, kind) if kind else run_whole_batch_trial(ranks, draw)
            kind = trial["kind"]
        except WorkerError as error:  # the workers may hang or be gone: take others
            trial, said = {"kind": kind}, str(error)
            ranks.stop()
            ranks = Workers(4)
        longest = max(longest, time.monotonic() - start)
        done[kind] += 1
        if said:
            wrong += 1
            print(f"WRONG {trial}: {said}", flush=True)
    ranks.stop()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(done.items()))
    seconds = time.monotonic() - began
    print(f"{arguments.trials} trials ({kinds}), {wrong} wrong; the longest took {longest:.1f} s, all {seconds:.0f} s.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
