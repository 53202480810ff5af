"""The saved state of a step: made, checked and loaded."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from bigbatch.errors import OptionError
from bigbatch.stepping.fitting.sharded_plans import put_on
from bigbatch.values import Plan, check_positive

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

STATE_VERSION = 3
COUNTS = ("num_steps", "num_skipped", "num_skipped_in_a_row")


def state_of(step: Step) -> dict[str, Any]:
    """What a run needs to go on; see ``Step.state_dict``."""
    scaler, ema = step.accumulator.precision.scaler, step.options.ema
    return {
        "version": STATE_VERSION,
        "num_steps": step.num_steps,
        "num_skipped": step.num_skipped,
        "num_skipped_in_a_row": step.num_skipped_in_a_row,
        "micro_batch_size": step.micro_batch_size,
        "plan": None if step.plan is None else step.plan.to_json(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "ema": ema.state_dict() if hasattr(ema, "state_dict") else None,
        "dropout_seed": step.accumulator.dropout.seed,
        "noise_scale": step.noise_scale.state_dict(),
    }


def load_state(step: Step, state: dict[str, Any]) -> None:
    """Go on from what ``state_of`` gave.

    Raises:
        OptionError: It is the state of something else, or of a step with other options. Nothing was loaded.
    """
    plan = check_state(state, state_of(step))
    before = copy.deepcopy(state_of(step))
    try:
        _load_ema_and_scaler(step, state)
    except Exception as error:
        _load_ema_and_scaler(step, before)
        raise OptionError(f"The ema or the scaler cannot be loaded: {error}. Nothing was loaded.") from error
    for name in COUNTS:
        setattr(step, name, state[name])
    step.accumulator.dropout.seed = state["dropout_seed"]
    step.noise_scale.load_state_dict(state["noise_scale"])
    if step.plan is None or step.budget_bytes is not None:  # one that was given by hand stays
        step.micro_batch_size, step.plan = state["micro_batch_size"], plan
        if plan is not None:
            put_on(plan, step)


def _load_ema_and_scaler(step: Step, state: dict[str, Any]) -> None:
    if state["ema"] is not None:
        step.options.ema.load_state_dict(state["ema"])
    if step.accumulator.precision.scaler is not None:
        step.accumulator.precision.scaler.load_state_dict(state["scaler"])


def check_state(state: Any, wanted: dict[str, Any]) -> Plan | None:
    """The plan in a state that is to be loaded.

    Args:
        state: What was saved.
        wanted: What the step that loads it would save.

    Raises:
        OptionError: It is the state of something else, or of a step with other options.
    """
    if not isinstance(state, dict) or set(state) != set(wanted):
        found = sorted(map(str, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
        raise OptionError(f"This is no state of a Step: found {found}, need {sorted(wanted)}.")
    if state["version"] != STATE_VERSION:
        raise OptionError(
            f"The state has version {state['version']!r}, and this bigbatch reads version {STATE_VERSION}."
        )
    for name in COUNTS:
        count = state[name]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise OptionError(f"The state has {name}={count!r}; it is a whole number of at least 0.")
    if state["micro_batch_size"] is not None:
        check_positive("micro_batch_size", state["micro_batch_size"])
    for name in ("scaler", "ema", "dropout_seed", "noise_scale"):
        if (state[name] is None) != (wanted[name] is None):
            has, needs = ("no", "a") if state[name] is None else ("a", "no")
            raise OptionError(
                f"The state has {has} {name}, but this Step has {needs} {name}; make it with the same options."
            )
    averages = state["noise_scale"]
    if averages is not None and (not isinstance(averages, dict) or set(averages) != set(wanted["noise_scale"])):
        raise OptionError(f"The state has noise_scale={averages!r}; it has {sorted(wanted['noise_scale'])}.")
    plan = state["plan"]
    if plan is not None and not isinstance(plan, str):
        raise OptionError(f"The state has plan={plan!r}; it is the JSON of a plan, or None.")
    return None if plan is None else Plan.from_json(plan)
