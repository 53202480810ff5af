"""The public names: sorted, exactly what is visible, each from where it says, each explained."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import bigbatch as bb


def names_for_type_checkers() -> dict[str, str]:
    """Name and module of each import under ``if TYPE_CHECKING:`` of the package."""
    tree = ast.parse(Path(bb.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def test_all_is_sorted_and_names_nothing_twice():
    assert bb.__all__ == sorted(set(bb.__all__))


def test_all_is_exactly_what_is_visible():
    assert dir(bb) == bb.__all__


def test_type_checkers_see_what_runs():
    assert names_for_type_checkers() == bb._HOME
    assert sorted(bb._HOME) == bb.__all__


@pytest.mark.parametrize("name", bb.__all__)
def test_a_name_is_the_object_of_its_module(name):
    found = getattr(bb, name)

    assert found.__module__ == bb._HOME[name]
    assert found.__name__ == name
    assert getattr(bb, name) is found


@pytest.mark.parametrize("name", bb.__all__)
def test_a_name_is_explained(name):
    """A dataclass without a docstring gets its signature as one, and a class that of its base: neither explains."""
    found = getattr(bb, name)
    text = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__

    assert text, f"{name} has no docstring."
    assert not text.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes."
    first_line = text.strip().splitlines()[0]
    assert re.search(r"[.:]$", first_line), f"The first line says what {name} is, in a sentence: {first_line!r}."


@pytest.mark.parametrize("name", bb.__all__)
def test_public_methods_are_explained(name):
    found = getattr(bb, name)
    methods = vars(found) if inspect.isclass(found) else {}
    public = [method for method, value in methods.items() if not method.startswith("_") and inspect.isroutine(value)]

    assert [method for method in public if not inspect.getdoc(getattr(found, method))] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'bigbatch' has no attribute 'Stepp'"):
        _ = bb.Stepp


@pytest.mark.parametrize("name", [name for name in bb.__all__ if name.endswith("Error")])
def test_every_error_is_ours_and_a_builtin(name):
    error = getattr(bb, name)
    builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]

    assert issubclass(error, bb.BigBatchError)
    assert name == "BigBatchError" or builtins[0] is not Exception


def test_the_console_script_can_be_called():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

    assert set(project["scripts"]) == {"bigbatch"}
    assert callable(pkgutil.resolve_name(project["scripts"]["bigbatch"]))
