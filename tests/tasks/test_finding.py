from __future__ import annotations

import sys

import pytest

import bigbatch as bb
from bigbatch.tasks.finding import find_task, has_variant

TASK = """
import bigbatch as bb
from tests.training.tiny import tiny_task, network

plain = bb.Task(
    model=network, train_data=lambda: [1], loss_fn=lambda model, batch: None, optimizer=lambda model: None
)
named = tiny_task()
def made(norm="batch", width=2):
    return tiny_task(name=f"tiny-{norm}")
def wrong():
    return 3
number = 3
def needs_more(width):
    return tiny_task()
"""


@pytest.fixture(autouse=True)
def folders_of_tasks_are_forgotten(monkeypatch):
    """The folder of a task stays on the path of a run; here it would be on that of other tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_tasks.py"
    path.write_text(TASK)
    return path


@pytest.mark.parametrize("name", ["digits", "text"])
def test_built_in_tasks_are_found(name):
    assert find_task(name).name == name


def test_a_task_of_a_file_is_called_as_in_the_file_unless_it_has_a_name(file):
    assert find_task(f"{file}:plain").name == "plain"
    assert find_task(f"{file}:named").name == "tiny"


def test_a_function_makes_the_task(file):
    assert find_task(f"{file}:made").name == "tiny-batch"
    assert find_task(f"{file}:made", norm="group").name == "tiny-group"


def test_variants_are_known_before(file):
    assert has_variant("digits", "norm")
    assert has_variant(f"{file}:made", "norm")
    assert not has_variant("text", "norm")
    assert not has_variant(f"{file}:plain", "norm")


def test_a_file_is_run_once(file):
    assert find_task(f"{file}:named") is find_task(f"{file}:named")


def test_neighbours_of_the_file_can_be_imported(tmp_path):
    (tmp_path / "my_neighbour.py").write_text("from tests.training.tiny import tiny_task")
    (tmp_path / "my_main.py").write_text("import my_neighbour\ntask = my_neighbour.tiny_task()")

    assert find_task(f"{tmp_path}/my_main.py:task").name == "tiny"


def test_a_file_may_be_called_like_a_module_that_is_loaded(tmp_path):
    import random

    (tmp_path / "random.py").write_text("from tests.training.tiny import tiny_task\ntask = tiny_task()")

    assert find_task(f"{tmp_path}/random.py:task").name == "tiny"
    assert random.random() < 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "digit",
            "There is no task 'digit'. The built-in ones are contrastive, digits, resnet50, text; one of your own is",
        ),
        ("my_tasks.py", "There is no task 'my_tasks.py'"),
        ("{file}:", "There is no task"),
        ("{file}x:plain", "There is no task"),
        ("nowhere.py:task", "There is no file 'nowhere.py'; write its path as seen from '/"),
        ("{file}:plan", "has no 'plan'; the tasks in it are plain, named"),
        ("{file}:number", "'number' in .*my_tasks.py is a int; it must be a bigbatch.Task"),
        ("{file}:wrong", r"wrong\(\) returned a int; it must return a bigbatch.Task"),
        ("{file}:needs_more", r"needs_more\(\) cannot be called without arguments"),
    ],
)
def test_what_is_no_task_is_refused(file, name, message):
    with pytest.raises(bb.TaskError, match=message):
        find_task(name.format(file=file))


@pytest.mark.parametrize("name", ["text", "{file}:plain", "{file}:wrong"])
def test_a_variant_that_is_not_there_is_refused(file, name):
    with pytest.raises(bb.TaskError, match=r"has no variant norm='group'.*the built-in digits can be given that"):
        find_task(name.format(file=file), norm="group")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import bigbatch\n\n1 / 0\n", r"broken.py cannot be run: ZeroDivisionError: division by zero \(line 3\)"),
        ("def broken(:\n", r"cannot be run: SyntaxError: .*line 1\)"),
        ("import not_there_at_all\n", r"ModuleNotFoundError: No module named 'not_there_at_all' \(line 1\)"),
    ],
)
def test_a_file_that_cannot_be_run_is_told_with_its_line(tmp_path, source, message):
    path = tmp_path / "broken.py"
    path.write_text(source)

    with pytest.raises(bb.TaskError, match=message):
        find_task(f"{path}:task")


def test_an_error_of_ours_in_a_file_is_told_as_it_is(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("import bigbatch as bb\ntask = bb.Task(model=3)")

    with pytest.raises(bb.TaskError, match="The task has no train_data"):
        find_task(f"{path}:task")
