"""A pre-flight: some steps of a task on a build of its own, and whether they look as they should. Nothing is kept."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from bigbatch.errors import BudgetError, NonFiniteError, OptionError
from bigbatch.stepping.learning_rate import total_steps
from bigbatch.training.events import Listener
from bigbatch.training.group import ALONE, Group
from bigbatch.training.loop import Run
from bigbatch.training.switches import Switches
from bigbatch.training.task import Task
from bigbatch.units import format_bytes, format_seconds
from bigbatch.values import check_positive
from bigbatch.verification.nearness import nearness

Verdict = Literal["ok", "look", "wrong"]

_FEWEST_STEPS = 10
_PEAK_OVER_EXPECTED = 1.1
# What ranks tell one another in a step, and not in a trial.
_TOLD_BYTES = 1 << 16
# Gradient norms: the last fifth over the first, and the largest over the median, from which they explode.
_LAST_OVER_FIRST = 10.0
_LARGEST_OVER_MEDIAN = 1e4
_SPIKE_OVER_MEDIAN = 100.0
# Shares of the steps.
_MOSTLY_CLIPPED = 0.9
_MANY_SKIPPED = 0.2
# Step times: the last fifth over the first.
_SLOWER = 1.5


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: Of what.
        verdict: "ok"; "look": it may be meant; "wrong": the run would not go well.
        found: What was found, beside what was expected.
        advice: What to do; empty when all is well.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Preflight:
    """What a pre-flight found.

    Attributes:
        num_steps: Steps that were made.
        checks: In the order in which they are told.
    """

    num_steps: int
    checks: tuple[Check, ...]

    @property
    def go(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.verdict != "wrong" for check in self.checks)


def preflight(
    task: Task,
    *,
    num_steps: int = 50,
    device: str | torch.device = "cpu",
    memory_budget: int | str | None = None,
    micro_batch_size: int | None = None,
    listeners: Sequence[Listener] = (),
    group: Group = ALONE,
    switches: Switches | None = None,
) -> Preflight:
    """Make ``num_steps`` steps of a fresh build of the task, and check memory, loss, gradient norms and step times.

    The schedule is that of the real run, unless that is shorter than the pre-flight. Other errors than those it looks
    for (a batch that cannot be cut, say) are raised as in a run.
    """
    check_positive("num_steps", num_steps)
    if num_steps < _FEWEST_STEPS:
        raise OptionError(f"A pre-flight of {num_steps} steps tells nothing; it needs at least {_FEWEST_STEPS}.")
    run = Run(
        _long_enough(task, num_steps),
        device=device,
        memory_budget=memory_budget,
        micro_batch_size=micro_batch_size,
        listeners=listeners,
        count_every_step=True,
        group=group,
        switches=switches,
    )
    seen: list[dict[str, Any]] = []
    expected_bytes = None
    try:
        if run.step.budget_bytes is None:  # with one, the search for a micro-batch size tries the first batch anyway
            expected_bytes = _trial(run)
        for record in run.steps(num_steps):
            seen.append(record.as_dict())
    except BudgetError as error:
        return Preflight(len(seen), (Check("memory, budget", "wrong", str(error)),))
    except NonFiniteError as error:
        return Preflight(len(seen), (*_memory(run, expected_bytes), _not_finite(seen, error)))
    finally:
        for listener in listeners:
            listener.close()
    return Preflight(len(seen), (*_memory(run, expected_bytes), *_curves(seen, run), *_batch_norm(run)))


def _long_enough(task: Task, num_steps: int) -> Task:
    per_epoch = total_steps(len(task.train_data()), task.batch_size)
    return dataclasses.replace(task, grad_norm=True, epochs=max(task.epochs, math.ceil(num_steps / per_epoch)))


def _trial(run: Run) -> int | None:
    """What the first batch needs; None when its loss is not finite, which the steps tell."""
    try:
        return run.step.measure(run.first_batch(), run.step.micro_batch_size)
    except NonFiniteError:
        return None


def _memory(run: Run, expected_bytes: int | None) -> Iterator[Check]:
    peak, budget = run.peak_bytes, run.step.budget_bytes
    if peak is None:
        yield Check("memory", "look", "no steady step of a full batch", "Make more steps.")
        return
    if budget is not None:
        inside = peak <= budget
        advice = "" if inside else "A later batch needs more than the first: give a smaller --micro-batch-size."
        found = f"peak {format_bytes(peak)} of {format_bytes(budget)}"
        yield Check("memory, budget", "ok" if inside else "wrong", found, advice)
    if run.step.plan is not None:
        expected_bytes = run.step.plan.peak_bytes
    if expected_bytes is not None:
        yield _expectation(run, peak, expected_bytes)


def _expectation(run: Run, peak: int, expected_bytes: int) -> Check:
    """Whether steps need what the first batch needed; when it needs more itself by now, something grows."""
    most = expected_bytes * _PEAK_OVER_EXPECTED + (_TOLD_BYTES if run.group.world_size > 1 else 0)
    # All ranks try again, or none: there may be collectives in it.
    again = _trial(run) if any(run.group.gathered(peak > most)) else None
    name = "memory, expectation"
    found = f"peak {format_bytes(peak)}, a trial of the first batch {format_bytes(expected_bytes)}"
    if peak <= most:
        return Check(name, "ok", found)
    if again is not None and again > most:
        found += f", and {format_bytes(again)} after these steps"
        return Check(name, "wrong", found, "Something is kept from step to step: detach what is collected of them.")
    return Check(name, "look", found, "Later batches need more, as those of longer samples do: leave room for them.")


def _not_finite(seen: Sequence[dict[str, Any]], error: NonFiniteError) -> Check:
    losses = [step["loss"] for step in seen]
    before = f"; before that {losses[0]:.4g} to {losses[-1]:.4g}" if losses else ""
    return Check(
        "loss",
        "wrong",
        f"step {len(seen) + 1} is not finite ({', '.join(error.names[:3])}){before}",
        "Lower the learning rate, warm it up, or clip (max_grad_norm=1.0); if it is the first step, look at the data.",
    )


def _curves(seen: Sequence[dict[str, Any]], run: Run) -> Iterator[Check]:
    moved = [step for step in seen if not step["skipped"]]
    yield _skipped(seen, len(moved))
    if len(moved) >= _FEWEST_STEPS // 2:
        yield _loss([step["loss"] for step in moved])
        yield from _norms([step["grad_norm"] for step in moved], run.task.max_grad_norm)
    yield _times([step["seconds"] for step in seen])


def _skipped(seen: Sequence[dict[str, Any]], num_moved: int) -> Check:
    num_skipped = len(seen) - num_moved
    found = f"{num_skipped} of {len(seen)} skipped"
    if num_skipped > _MANY_SKIPPED * len(seen):
        return Check(
            "skipped steps", "wrong", found, 'Gradients overflow: try precision="bf16" or a lower learning rate.'
        )
    # The scale of fp16 begins too high on purpose, so some of the first steps are skipped in a healthy run.
    late = any(step["skipped"] for step in seen[-len(seen) // 5 :])
    return Check("skipped steps", "look" if late else "ok", found, "Some late ones too: watch the run." if late else "")


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last fifth: one odd step moves neither."""
    fifth = max(len(values) // 5, 1)
    return statistics.median(values[:fifth]), statistics.median(values[-fifth:])


def _loss(losses: Sequence[float]) -> Check:
    first, last = _ends(losses)
    # How far a median of a fifth moves by chance, from the jumps between neighbours.
    jumps = [abs(b - a) for a, b in pairwise(losses)]
    noise = statistics.median(jumps) / math.sqrt(max(len(losses) // 5, 1))
    found = f"{first:.4g} in the first fifth, {last:.4g} in the last"
    if last < first - noise:
        return Check("loss falls", "ok", found)
    if last <= first + noise:
        return Check(
            "loss falls", "look", found, "It stays within its noise: is the learning rate too low, or in warm-up?"
        )
    return Check("loss falls", "wrong", found, "It rises: lower the learning rate, or check that labels match inputs.")


def _norms(norms: Sequence[float], max_grad_norm: float | None) -> Iterator[Check]:
    first, last = _ends(norms)
    largest, usual = max(norms), statistics.median(norms)
    found = f"{first:.3g} in the first fifth, {last:.3g} in the last, largest {largest:.3g}"
    if largest == 0:
        yield Check("gradient norms", "wrong", found, "All are zero: the loss does not depend on the parameters.")
    elif last > _LAST_OVER_FIRST * first or largest > _LARGEST_OVER_MEDIAN * usual:
        yield Check(
            "gradient norms", "wrong", found, "They explode: lower the learning rate or clip (max_grad_norm=1.0)."
        )
    elif largest > _SPIKE_OVER_MEDIAN * usual:
        yield Check(
            "gradient norms", "look", found, "There is a spike: look at its batch, or clip (max_grad_norm=1.0)."
        )
    else:
        yield Check("gradient norms", "ok", found)
    if max_grad_norm is not None:
        share = sum(norm > max_grad_norm for norm in norms) / len(norms)
        mostly = share > _MOSTLY_CLIPPED
        advice = "Clipping sets the step size; raise max_grad_norm, or lower the learning rate." if mostly else ""
        yield Check("clipping", "look" if advice else "ok", f"{share:.0%} of the steps over {max_grad_norm:g}", advice)


def _batch_norm(run: Run) -> Iterator[Check]:
    """Where layers see the statistics of micro-batches: how far that turns the gradient, measured."""
    size, options = run.step.micro_batch_size, run.parts.options
    found = nearness(run.parts.model, run.task.loss_fn, run.first_batch(), size, options)
    if found is not None and found.is_near:
        yield Check("BatchNorm", "ok", str(found))
    elif found is not None:
        yield Check("BatchNorm", "look", str(found), found.remedy)


def _times(seconds: Sequence[float]) -> Check:
    first, last = _ends(seconds[1:])  # the first step allocates, and may compile
    found = f"{format_seconds(first)} in the first fifth, {format_seconds(last)} in the last"
    slower = last > _SLOWER * first
    return Check(
        "step time", "look" if slower else "ok", found, "Steps get slower: does something grow?" if slower else ""
    )
