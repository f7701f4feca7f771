"""The pages show what the reports print, and name every field of the documents."""

import json
from dataclasses import fields

import pytest

from flatout.records.ablation import Contrast, LossCheck, Quantity
from flatout.records.finding import Check, Finding
from flatout.reporting.doctor import render_doctor
from flatout.reporting.profile.text import render_profile
from flatout.reporting.tuning.text import render_ablation
from flatout.reporting.tuning.trial import render_failure
from tests.paths import ROOT
from tests.reporting.test_doctor import MACHINE, SMALL, WELL

DOCS = ROOT / "docs"
FIELDS = [
    *(DOCS / "json").glob("*.md"),
    *(DOCS / f"{name}.md" for name in ("json", "gpu-readings", "measuring-memory", "task")),
]
"""Where the fields of the documents are described."""
SCHEMAS = sorted((ROOT / "src/flatout/reporting/schemas").glob("*.json"))


def shown(verb):
    return (DOCS / f"commands/{verb}.md").read_text()


def unnamed(keys):
    pages = "".join(path.read_text() for path in FIELDS)
    return [key for key in keys if f"`{key}`" not in pages]


def keys_of(schema):
    """Return the names of all fields in a JSON Schema, those of nested records too."""
    if isinstance(schema, list):
        return {key for item in schema for key in keys_of(item)}
    if not isinstance(schema, dict):
        return set()
    return {*schema.get("properties", ()), *keys_of(list(schema.values()))}


def names(kind):
    return [item.name for item in fields(kind)]


def test_measure_shows_its_reports(starved, crash):
    page = shown("measure")

    assert render_profile(starved, workload="train.py --epochs 3") in page
    assert render_failure(crash) in page


def test_tune_shows_its_report(tuned):
    assert render_ablation(tuned) in shown("tune")


def test_doctor_shows_its_report():
    assert render_doctor(MACHINE, [WELL, SMALL]) in shown("doctor")


def test_every_field_of_a_profile_is_named(starved):
    plain = starved.to_json()

    assert unnamed([*plain, *plain["step_ms"], *plain["phases_ms"], *plain["ceilings"]]) == []


def test_every_field_of_an_ablation_is_named(tuned):
    plain = tuned.to_json()

    assert (
        unnamed([*plain, *plain["best"], *plain["rows"][0], *plain["rows"][0]["loss_check"]]) == []
    )


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_every_field_of_a_schema_is_named(path):
    assert unnamed(sorted(keys_of(json.loads(path.read_text())))) == []


@pytest.mark.parametrize("kind", [Contrast, Quantity, Check, Finding, LossCheck])
def test_every_field_of_the_smaller_records_is_named(kind):
    assert unnamed(names(kind)) == []
