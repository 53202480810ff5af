"""45 mistakes that were reported somewhere: the careful way passes, the reported ways fail, and ours passes.

Each module beside this one is a case; README.md says what its functions are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CASES: dict[str, ModuleType] = {
    path.stem.removeprefix("case_"): importlib.import_module(f"tests.cases.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("case_*.py"))
}

# What a reported practice may end in instead of a wrong result; anything else is a mistake in the case itself.
FAILS_WITH = (AssertionError, RuntimeError, ValueError, UnboundLocalError)


def functions(prefix: str) -> list[Any]:
    """The functions of all cases whose names begin so, as parameters with readable ids."""
    return [
        pytest.param(case, getattr(case, name), id=f"{case_name}-{name}")
        for case_name, case in CASES.items()
        for name in vars(case)
        if name.startswith(prefix) and callable(getattr(case, name))
    ]


def test_all_cases_are_here():
    assert len(CASES) == 45


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_driven_through_bigbatch(name):
    assert any(function.startswith("ours") for function in vars(CASES[name]))
    assert hasattr(CASES[name], "careful")
    assert any(function.startswith("naive") for function in vars(CASES[name]))


# Plain torch may warn about what the reported practices do; bigbatch may not about what its users do.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "careful"), functions("careful"))
def test_the_careful_way_passes(case: ModuleType, careful: Callable[[], Any]):
    case.check(careful())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "naive"), functions("naive"))
def test_a_reported_practice_fails(case: ModuleType, naive: Callable[[], Any]):
    """Control: the check of the case can tell."""
    with pytest.raises(FAILS_WITH):
        case.check(naive())


@pytest.mark.parametrize(("case", "ours"), functions("ours"))
def test_bigbatch_passes(case: ModuleType, ours: Callable[[], Any]):
    case.check(ours())
