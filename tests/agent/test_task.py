"""The record: what a Task refuses when it is made."""

import subprocess
import sys

import pytest

import flatout
from flatout.records.errors import UserError


def make(**changes):
    def nothing(*_):
        return None

    functions = dict.fromkeys(("model", "data", "loss", "optimizer"), nothing)
    return flatout.Task(**{**functions, "batch_size": 4, **changes})


def test_a_task_has_sane_defaults():
    task = make()

    assert (task.epochs, task.steps, task.device, task.seed) == (1, None, None, 0)


@pytest.mark.parametrize("field", ["model", "data", "loss", "optimizer", "finish"])
def test_a_ready_made_object_instead_of_a_function_is_refused(field):
    with pytest.raises(UserError, match=rf"{field}=\[\] is a list and not a function"):
        make(**{field: []})


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"epochs": 0}, {"steps": -1}, {"batch_size": 2.0}]
)
def test_a_count_that_is_none_is_refused(wrong):
    with pytest.raises(UserError, match="must be a whole number > 0"):
        make(**wrong)


def test_naming_a_task_imports_no_torch():
    code = "import sys, flatout; flatout.Task; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_flatout_has_no_other_lazy_names():
    with pytest.raises(AttributeError, match="no attribute 'Tsak'"):
        _ = flatout.Tsak
