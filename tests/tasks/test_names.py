"""Help, errors and docs name the same tasks and shapes: those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bigbatch.cli.main import main
from bigbatch.tasks import names
from bigbatch.tasks.finding import find_task
from bigbatch.tasks.shapes import SHAPES

DOCS = Path(__file__).parents[2] / "docs"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_the_names_are_those_of_what_there_is():
    assert tuple(SHAPES) == names.SHAPE_NAMES
    assert {find_task(name).name for name in names.BUILT_IN} == set(names.BUILT_IN)


@pytest.mark.parametrize("command", ["train", "verify", "bench"])
def test_help_and_the_error_of_an_unknown_name_list_the_same_tasks(command, capsys):
    every = ", ".join(names.BUILT_IN)

    assert f"{every}, or file.py:name" in told(capsys, command, "--help")
    assert f"There is no task 'other'. The built-in ones are {every};" in told(capsys, command, "other")


def test_help_and_error_of_plan_list_tasks_and_shapes_and_no_name_twice(capsys):
    tasks = ", ".join(name for name in names.BUILT_IN if name not in SHAPES)

    assert f"{tasks}, file.py:name of a task of your own, or a shape: {', '.join(SHAPES)}." in told(
        capsys, "plan", "--help"
    )
    assert f"The tasks are {tasks}, the shapes {', '.join(SHAPES)};" in told(
        capsys, "plan", "other", "--memory-budget", "1GiB"
    )


@pytest.mark.parametrize(
    ("page", "expected"),
    [("training.md", names.BUILT_IN), ("verify.md", names.BUILT_IN), ("planning.md", [*names.BUILT_IN, *SHAPES])],
)
def test_docs_name_every_one(page, expected):
    missing = [name for name in expected if not re.search(rf"`{name}`", (DOCS / page).read_text())]

    assert not missing
