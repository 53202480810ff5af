"""Find a task by the name of a built-in one, or as ``file.py:name``."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from bigbatch.errors import BigBatchError, TaskError
from bigbatch.tasks.names import BUILT_IN, TASKS
from bigbatch.training.task import Task


def find_task(name: str, **variant: Any) -> Task:
    """The task of that name.

    Args:
        name: A built-in task, or ``file.py:name`` of a ``Task`` or of a function that returns one.
        variant: Arguments for that function, for example ``norm="group"``.

    Raises:
        TaskError: There is no such task, its file cannot be run, or it does not take that variant.
    """
    found, label = _found(name)
    if variant and not _takes(found, *variant):
        options = " and ".join(f"{key}={value!r}" for key, value in variant.items())
        with_it = [other for other in BUILT_IN if has_variant(other, *variant)]
        hint = f"; the built-in {' and '.join(with_it)} can be given that" if with_it else ""
        raise TaskError(f"The task {name!r} has no variant {options}: it is no function with such an argument{hint}.")
    if isinstance(found, Task):
        return _named(found, label)
    if not _takes(found, *variant):
        raise TaskError(f"{name}() cannot be called without arguments; give them defaults, or wrap it in a function.")
    made = found(**variant)
    if not isinstance(made, Task):
        raise TaskError(f"{name}() returned a {type(made).__name__}; it must return a bigbatch.Task(...).")
    return _named(made, label)


def has_variant(name: str, *arguments: str) -> bool:
    """Whether the task of that name is made by a function that takes these arguments."""
    return _takes(_found(name)[0], *arguments)


def _takes(found: Any, *arguments: str) -> bool:
    """Whether it can be called with these keywords and nothing else."""
    if isinstance(found, Task):
        return False
    try:
        inspect.signature(found).bind(**dict.fromkeys(arguments))
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
            f"There is no task {name!r}. The built-in ones are {TASKS}; one of your own is written as file.py:name."
        )
    module = _run_file(Path(path), Path(path).resolve())
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
def _run_file(path: Path, resolved: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"There is no file {str(path)!r}; write its path as seen from {str(Path.cwd())!r}.")
    # By its own name workers that load data find its classes, unless something else has that name already.
    name = path.stem if path.stem not in sys.modules else f"bigbatch_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None  # the name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(resolved.parent))  # as for a script: its neighbours can be imported
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, BigBatchError) or not isinstance(error, Exception):
            raise
        raise TaskError(f"{path} cannot be run: {_placed(error, resolved)}.") from error
    return module


def _placed(error: Exception, path: Path) -> str:
    """What happened, and in which line of the file."""
    what = f"{type(error).__name__}: {error}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return what if isinstance(error, SyntaxError) or not lines else f"{what} (line {lines[-1]})"
