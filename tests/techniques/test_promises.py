"""Every technique keeps its numeric promise in a real training, under the guard, and leaves no
trace.

The test module of a technique says how that is shown, as `PROMISE`: a script of these tests and the
settings with which the technique acts on it, which is played here (`elaborate` is the training of
that name in `guarded`); or, in words, where it is shown, or why no training on a CPU can show it.
One that asks the guard itself, by `checked`, needs none."""

import ast

import pytest
import torch

from flatout.records import catalogue
from flatout.records.technique import Numerics
from tests.paths import ROOT
from tests.techniques.guarded import ELABORATE, became, checked, files_of, played
from tests.test_contract import CASES

HERE = ROOT / "tests/techniques"
ROOT = HERE.parents[1]


def module_of(name):
    (path,) = HERE.glob(f"*/test_{name}.py")
    return ast.parse(path.read_text())


def promise_of(name):
    """Return what the test module says of a technique, None where it says nothing."""
    said = (
        ast.literal_eval(node.value)
        for node in module_of(name).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROMISE"
    )
    return next(said, None)


def asks_the_guard(name):
    names = {node.id for node in ast.walk(module_of(name)) if isinstance(node, ast.Name)}
    return bool({"checked", "GuardChecker"} & names)


COMPARED = {
    "this module compares the contents",
    "this module compares the gradients",
    "this module counts every sample of an epoch",
}
"""Of what changes the training on purpose the guard looks for damage only; tests see the rest."""
NAMES = catalogue.names()
PLAYED = {name: said for name in NAMES if isinstance(said := promise_of(name), tuple)}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_said_how_the_promise_is_shown(name):
    assert promise_of(name) or asks_the_guard(name)


SAID = {name: said for name in NAMES if isinstance(said := promise_of(name), str)}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_of_a_promise_that_is_not_played_is_true(name):
    said = SAID[name]

    if said.startswith("acts on a CUDA device only: "):
        on_cpu = [case for case in CASES if case[0].device_kind == "cpu"]
        assert not any(catalogue.technique_class(name).candidates(*case) for case in on_cpu)
    elif said == "this module compares with one process":
        assert not any(catalogue.technique_class(name).candidates(*case) for case in CASES)
    elif said == "this module asks the guard":
        assert asks_the_guard(name)
    elif said.startswith("asked of the guard in "):
        assert name in (ROOT / said.removeprefix("asked of the guard in ")).read_text()
    else:
        assert said in COMPARED
        assert catalogue.technique_class(name).numerics is Numerics.TRAINING


def test_most_promises_are_shown_by_the_guard():
    shown = [name for name in NAMES if name in PLAYED or asks_the_guard(name)]

    assert len(shown) > len(NAMES) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_it_acts_on_a_real_training_and_keeps_its_promise(name):
    command, settings = PLAYED[name]
    command = ELABORATE if command == "elaborate" else command
    numerics = catalogue.technique_class(name).numerics
    before = files_of(command)

    check = checked(command, name, **settings)

    assert check.passed, check.why
    assert became(command, name, **settings)[0] == "applied"
    if numerics is Numerics.EXACT:
        assert check.status == "same", check.why
    if numerics is Numerics.TRAINING:
        assert check.status == "on_purpose"
    assert files_of(command) == before


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["activation_offload", "empty_cache_steps", "expandable_segments"])
def test_a_real_script_on_the_cpu_is_told_that_it_acts_on_a_device_only(name):
    (applied,) = played("roomy_gpt.py", name).not_applied

    assert applied.status == "not_applicable"
    assert applied.why
