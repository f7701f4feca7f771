"""The commands as functions: what a notebook or a script sees."""

import json

import pytest

import flatout
from flatout.records.errors import UserError
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


def test_two_stored_results_are_compared(tmp_path):
    stored = STORED / "profile_starved.json"
    same = tmp_path / "same.json"
    same.write_text(json.dumps(json.loads(stored.read_text())))

    contrast = flatout.compare(stored, same)

    assert contrast.ratio == 1.0
