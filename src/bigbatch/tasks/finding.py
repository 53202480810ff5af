"""Find a task by the name of a built-in one, or as ``file.py:name``."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from bigbatch.errors import BigBatchError, TaskError
from bigbatch.training.task import Task

BUILT_IN = {"digits": "bigbatch.tasks.digits", "text": "bigbatch.tasks.text"}
"""Module of each built-in task; the function in it is called as the task."""


def find_task(name: str, **variant: Any) -> Task:
    """The task of that name.

    Args:
        name: A built-in task, or ``file.py:name`` of a ``Task`` or of a function that returns one.
        variant: Arguments for that function, for example ``norm="group"``.

    Raises:
        TaskError: There is no such task, its file cannot be run, or it does not take that variant.
    """
    found, label = _found(name)
    if isinstance(found, Task) and not variant:
        return _named(found, label)
    if isinstance(found, Task) or not takes(found, *variant):
        options = " and ".join(f"{key}={value!r}" for key, value in variant.items())
        with_it = [name for name in BUILT_IN if takes(_found(name)[0], *variant)]
        hint = f"of the built-in tasks {with_it} does" if with_it else "no built-in task does"
        raise TaskError(f"The task {name!r} has no variant {options}: it must be a function that takes it; {hint}.")
    made = found(**variant)
    if not isinstance(made, Task):
        raise TaskError(f"{name}() returned a {type(made).__name__}; it must return a bigbatch.Task(...).")
    return _named(made, label)


def has_variant(name: str, *arguments: str) -> bool:
    """Whether the task of that name is a function that takes these arguments."""
    found, _ = _found(name)
    return not isinstance(found, Task) and takes(found, *arguments)


def takes(function: Callable[..., Any], *arguments: str) -> bool:
    """Whether it can be called with these keywords and nothing else."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError:
        return False
    return True


def _found(name: str) -> tuple[Any, str]:
    """What the name stands for, a task or a function, and what a run of it is called."""
    if name in BUILT_IN:
        return getattr(importlib.import_module(BUILT_IN[name]), name), name
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py") or not attribute:
        raise TaskError(
            f"There is no task {name!r}. The built-in ones are {', '.join(BUILT_IN)}; one of your own is written as "
            f"file.py:name."
        )
    module = _run_file(Path(path))
    if not hasattr(module, attribute):
        raise TaskError(f"{path} has no {attribute!r}; {_tasks_in(module, path)}.")
    found = getattr(module, attribute)
    if not isinstance(found, Task) and not inspect.isroutine(found):
        raise TaskError(
            f"{attribute!r} in {path} is a {type(found).__name__}; it must be a bigbatch.Task, or a function that "
            f"returns one."
        )
    return found, attribute


def _tasks_in(module: ModuleType, path: str) -> str:
    tasks = [name for name, value in vars(module).items() if isinstance(value, Task)]
    return f"the tasks in it are {', '.join(tasks)}" if tasks else f"write {path}:NAME with NAME = bigbatch.Task(...)"


def _named(task: Task, label: str) -> Task:
    return task if task.name != Task.name else dataclasses.replace(task, name=label)


@cache
def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"There is no file {str(path)!r}; write its path as seen from {str(Path.cwd())!r}.")
    # By its own name workers that load data find its classes, unless something else has that name already.
    name = path.stem if path.stem not in sys.modules else f"bigbatch_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # the name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as for a script: its neighbours can be imported
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, BigBatchError) or not isinstance(error, Exception):
            raise
        raise TaskError(f"{path} cannot be run: {_placed(error, path)}.") from error
    return module


def _placed(error: Exception, path: Path) -> str:
    """What happened, and in which line of the file."""
    what = f"{type(error).__name__}: {error}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())
    ]
    return what if isinstance(error, SyntaxError) or not lines else f"{what} (line {lines[-1]})"
