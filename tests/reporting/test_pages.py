"""The pages show what the reports print, and name every field of the documents."""

import json
from dataclasses import fields

import pytest

from flatout.records.ablation import Contrast, LossCheck, Quantity
from flatout.records.finding import OK, WARN, Check, Finding
from flatout.records.machine import Device, Machine
from flatout.reporting import terminal
from tests.paths import ROOT

DOCS = ROOT / "docs"
FIELDS = [
    *(DOCS / "json").glob("*.md"),
    *(DOCS / f"{name}.md" for name in ("json", "gpu-readings", "measuring-memory", "task")),
]
"""Where the fields of the documents are described."""
SCHEMAS = sorted((ROOT / "src/flatout/reporting/schemas").glob("*.json"))
MACHINE = Machine(
    device=Device(kind="cpu", name="Test CPU", memory_bytes=8 * 1024**3),
    logical_cores=4,
    usable_cores=2,
    physical_cores=2,
    memory_bytes=8 * 1024**3,
    shm_free_bytes=64 * 1024**2,
)
CHECKS = (
    Check(status=OK, what="2 cores, all of them usable"),
    Check(
        status=WARN,
        what="/dev/shm: 64.0 MiB free",
        why="loader workers put their batches there and are killed when it is full",
        next="start the container with --shm-size=2g",
    ),
)


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

    assert terminal.render_profile(starved, workload="train.py --epochs 3") in page
    assert terminal.render_failure(crash) in page


def test_tune_shows_its_report(tuned):
    assert terminal.render_ablation(tuned) in shown("tune")


def test_doctor_shows_its_report():
    assert terminal.render_doctor(MACHINE, CHECKS) in shown("doctor")


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
