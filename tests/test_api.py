"""The commands as functions: what a notebook or a script sees."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import flatout
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.workflow import plan as planning
from flatout.workflow import run as running
from flatout.workflow import tune as tuning
from tests.paths import ROOT

STORED = ROOT / "tests/reporting/data"


def test_completion_finds_every_public_name():
    assert set(flatout.__all__) <= set(dir(flatout))
    assert all(getattr(flatout, name) for name in flatout.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="mesure"):
        _ = flatout.mesure


def test_a_script_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"there is no script missing\.py"):
        flatout.measure("missing.py --epochs 3")


@pytest.mark.parametrize(
    ("command", "words"),
    [("", "the command is empty"), ([], "the command is empty"), ("train.py 'a", "into words")],
)
def test_what_is_no_command_is_refused(command, words):
    with pytest.raises(UserError, match=words):
        flatout.measure(command)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"only": ["tf23"]}, "unknown technique 'tf23'; did you mean 'tf32'"),
        ({"skip": ["tf23"]}, "unknown technique 'tf23'"),
        ({"numerics": "exakt"}, "unknown promise 'exakt'; did you mean 'exact'"),
    ],
)
def test_a_tuning_of_what_does_not_exist_is_refused(asked, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(tuning, "tune", None)

    with pytest.raises(UserError, match=words):
        flatout.tune("train.py", **asked)


@pytest.mark.parametrize("layers", ["2", "2" * 300])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_plan_takes_a_whole_command_or_its_words(is_whole, layers, monkeypatch):
    words = [f"train.py --layers {layers}"] if is_whole else ["train.py", "--layers", layers]
    asked = []

    def plan(target, arguments, _):
        asked.append((target, *arguments))
        return SimpleNamespace(plan=None)

    monkeypatch.setattr(planning, "plan", plan)

    flatout.plan(*words, gpu="l4")

    assert asked == [("train.py", "--layers", layers)]


def test_a_recipe_that_spreads_a_training_is_run_on_its_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    asked = []
    monkeypatch.setattr(running, "run", lambda workload, _: asked.append(workload.ranks))
    spread = Choice(technique="data_parallel", settings={"ranks": 2})

    flatout.run("train.py", recipe=Recipe(choices=(spread,)))

    assert asked == [2]


def test_two_stored_results_are_compared(tmp_path):
    stored = STORED / "profile_starved.json"
    same = tmp_path / "same.json"
    same.write_text(json.dumps(json.loads(stored.read_text())))

    contrast = flatout.compare(stored, same)

    assert contrast.ratio == 1.0
