import functools

import pytest

from tests.support.probe_runs import line_of, seen_in

pytestmark = pytest.mark.slow

SCRIPT = "forced_syncs.py"


@functools.cache
def found():
    seen = seen_in(SCRIPT, "syncs")
    return {(line, what): count / seen["steps"] for line, what, count, _ in seen["points"]}


@pytest.mark.parametrize(
    ("comment", "what", "times"),
    [
        ("# twice", "item", 2),
        ("# bool", "bool", 1),
        ("# float", "float", 1),
        ("# print", "print", 1),
        ("# format", "print", 1),
        ("# both", "to cpu", 1),
        ("# both", "numpy", 1),
        ("# array", "numpy", 1),
        ("# list", "tolist", 1),
        ("# mask", "boolean index", 1),
        ("# nonzero", "nonzero", 1),
        ("# unique", "unique", 1),
    ],
)
def test_a_wait_is_named_with_its_line_and_counted(comment, what, times):
    assert found()[line_of(SCRIPT, comment), what] == times


@pytest.mark.parametrize("comment", ["# evaluation", "# loading", "# no mask"])
def test_what_no_training_step_waits_for_is_left_out(comment):
    lines = {line for line, _ in found()}

    assert line_of(SCRIPT, comment) not in lines


def test_nothing_else_is_reported():
    assert len(found()) == 12
