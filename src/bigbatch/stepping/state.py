"""The saved state of a step, and what can be wrong with one."""

from __future__ import annotations

from typing import Any

from bigbatch.errors import OptionError
from bigbatch.values import Plan, check_positive

STATE_VERSION = 3
COUNTS = ("num_steps", "num_skipped", "num_skipped_in_a_row")


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
