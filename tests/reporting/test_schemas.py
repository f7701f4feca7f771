"""The JSON Schema files are those of the records, and what commands write agrees with them."""

import json

import pytest
from jsonschema import Draft202012Validator

from benchmarks.json_schemas import FOLDER, documents
from flatout.records.ablation import ablation_from_json
from flatout.records.profile import profile_from_json
from flatout.workflow.check import Codes, check
from flatout.workflow.compare import compare
from tests.paths import ROOT
from tests.reporting.test_short_reports import ABLATIONS, PROFILES
from tests.schemas import complaints, unknown_keys

NAMES = sorted(documents())


def stored(name):
    return json.loads((ROOT / f"tests/reporting/data/{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_what_the_records_say(name):
    written = json.loads((FOLDER / f"{name}.schema.json").read_text())

    Draft202012Validator.check_schema(written)
    assert written == documents()[name], "write it: python -m benchmarks.json_schemas"


@pytest.mark.parametrize("plain", PROFILES)
def test_a_stored_profile_conforms_and_what_is_written_now_has_no_other_keys(plain):
    assert complaints(plain) == []
    written = profile_from_json(plain).to_json()
    assert complaints(written) == []
    assert unknown_keys(written) == []


@pytest.mark.parametrize("plain", ABLATIONS)
def test_an_ablation_that_is_written_now_conforms(plain):
    written = ablation_from_json(plain).to_json()

    assert complaints(written) == []
    assert unknown_keys(written) == []


def test_a_comparison_conforms():
    written = compare(stored("profile_starved"), stored("profile_starved")).to_json()

    assert complaints(written) == []
    assert unknown_keys(written) == []


def test_a_check_of_source_conforms():
    written = check([ROOT / "tests/scripts/plain"], Codes()).to_json()

    assert written["findings"]
    assert complaints(written) == []
    assert unknown_keys(written) == []


@pytest.mark.parametrize("change", [{"step_ms": "fast"}, {"schema": "flatout.profile/2"}])
def test_another_type_is_refused(change):
    assert complaints(stored("profile_starved") | change, name="profile") != []
