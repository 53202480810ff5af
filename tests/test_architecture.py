"""Imports go downward only and to what is declared, and files and functions stay short enough to read."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

WORDS = {"checking", "errors", "footprint", "peers", "units", "values"}
# What the modules of a room may import, beside their own room. Rooms that are not built yet stand here already.
MAY_IMPORT = {
    "words": set(),
    "batch": {"words"},
    "memory": {"words"},
    "planning": {"words", "batch", "memory"},
    "stepping": {"words", "batch", "memory", "planning"},
    "verification": {"words", "batch", "memory", "planning", "stepping"},
    "training": {"words", "batch", "memory", "planning", "stepping", "verification"},
    # It watches the loops of others, and must not depend on ours.
    "doctor": {"words", "batch", "memory", "planning"},
    "reporting": {"words", "batch", "memory", "planning", "stepping", "verification", "training"},
    "integrations": {"words", "batch", "memory", "planning", "stepping", "verification", "training"},
    "tasks": {"words", "batch", "memory", "planning", "stepping", "verification", "training"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT) | {"bigbatch"}
MAY_IMPORT["__main__"] = {"words", "training", "cli"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def room_of(module: str) -> str:
    """The room of a dotted name of ours; ``bigbatch`` itself, the public names, is a room above all others."""
    first = module.split(".")[1] if "." in module else "bigbatch"
    return "words" if first in WORDS else first


def imported_modules(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, wherever in the file; relative names are made absolute."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_room = base == "bigbatch" and alias.name in WORDS | set(MAY_IMPORT)
                yield node.lineno, inner if inner in MODULES or is_room else base


def upward_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """The imports that a module of ours must not have, in words."""
    room = room_of(module)
    found = []
    for line, name in imported_modules(source, module, is_package=is_package):
        if name.split(".")[0] == "bigbatch" and room_of(name) not in MAY_IMPORT[room] | {room}:
            found.append(f"{module}, line {line}: {room} must not import {name}")
    return found


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under ``if TYPE_CHECKING:``."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from runtime_nodes(other)
        else:
            yield from runtime_nodes(child)


def imports_torch(source: str) -> bool:
    """Whether torch is imported when the module runs, at the top or in a function."""
    for node in runtime_nodes(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.split(".")[0] == "torch" for name in names):
            return True
    return False


def function_lengths(source: str) -> dict[str, int]:
    """Lines of each function by name, from ``def`` to the end, without its docstring: that may explain at length."""
    lengths = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_docstring = ast.get_docstring(node) is not None
            docstring_lines = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
            lengths[node.name] = (node.end_lineno or 0) - node.lineno + 1 - docstring_lines
    return lengths


def test_every_module_belongs_to_a_room():
    strangers = [name for name in MODULES if room_of(name) not in {*MAY_IMPORT, "bigbatch"}]

    assert strangers == [], f"Give it a room in {__file__} and DESIGN.md, or move it to one."


@pytest.mark.parametrize("module", [name for name in MODULES if name != "bigbatch"])
def test_imports_go_downward(module):
    path = MODULES[module]

    assert upward_imports(path.read_text(), module, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bigbatch.units", "from bigbatch.batch.cutting import cut"),
        ("bigbatch.batch.cutting", "import bigbatch.memory.measure"),
        ("bigbatch.memory.measure", "from bigbatch import batch"),
        ("bigbatch.memory.measure", "from ..batch import cutting"),
        ("bigbatch.memory.measure", "import bigbatch as bb"),
        ("bigbatch.stepping.step", "def late():\n    from bigbatch.training.loop import train"),
        ("bigbatch.training.loop", "from bigbatch.reporting.panel import Panel"),
        ("bigbatch.doctor.rules", "from bigbatch.stepping import accumulating"),
        ("bigbatch.tasks.digits", "from bigbatch.cli.main import main"),
    ],
)
def test_an_upward_import_is_found(module, source):
    """Control: the check above can fail, in every form that an import has."""
    assert len(upward_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bigbatch.units", "from bigbatch.errors import OptionError"),
        ("bigbatch.batch.cutting", "from bigbatch import errors\nfrom . import weighing\nimport torch"),
        ("bigbatch.cli.main", "import bigbatch as bb\nfrom bigbatch.reporting.panel import Panel"),
        ("bigbatch.tasks.digits", "from bigbatch.training.task import Task"),
    ],
)
def test_a_downward_import_is_left_alone(module, source):
    assert upward_imports(source, module) == []


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) in {"bigbatch", "words"}])
def test_words_load_no_torch(module):
    assert not imports_torch(MODULES[module].read_text())


def test_a_late_import_of_torch_is_found():
    """Control: and one for types alone is not."""
    assert imports_torch("def f():\n    from torch import nn")
    assert not imports_torch("if TYPE_CHECKING:\n    import torch")
    assert imports_torch("if TYPE_CHECKING:\n    pass\nelse:\n    import torch.nn")


def distributions(requirements: list[str]) -> set[str]:
    """The names of requirements as they are written in ``pyproject.toml``, without versions and extras."""
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def third_party_imports() -> dict[str, str]:
    """Distribution of each foreign package that the source imports, and one module that does."""
    distribution_of = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
    found = {}
    for module, path in MODULES.items():
        for _, name in imported_modules(path.read_text(), module, is_package=path.name == "__init__.py"):
            package = name.split(".")[0]
            if package not in sys.stdlib_module_names | {"bigbatch"}:
                found[distribution_of.get(package, package).replace("_", "-")] = module
    return found


def test_what_is_imported_is_declared_and_the_other_way_round():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    core, extras = distributions(project["dependencies"]), project["optional-dependencies"]
    optional = set().union(*(distributions(extras[name]) for name in extras if name not in {"test", "dev"}))
    imported = third_party_imports()

    assert {name: module for name, module in imported.items() if name not in core | optional} == {}
    assert core - set(imported) == set(), "Installed for everybody, and imported by nothing."


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_are_short(module):
    source = MODULES[module].read_text()
    long_functions = {name: lines for name, lines in function_lengths(source).items() if lines > MAX_FUNCTION_LINES}

    assert len(source.splitlines()) <= MAX_FILE_LINES, "See whether two things are in it."
    assert long_functions == {}, "See whether two things are in it."


def test_a_long_function_is_found():
    """Control: the body counts, the docstring does not."""
    assert function_lengths('def f():\n    """One\n    two."""\n    return 1') == {"f": 2}
    assert function_lengths("class A:\n    async def f(self):\n" + "        pass\n" * 50) == {"f": 51}
