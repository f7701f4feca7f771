"""The front page shows what a record holds, and no more."""

import json
import re

import pytest

from flatout import __version__
from flatout.records.ablation import ablation_from_json
from flatout.reporting.tuning.speedup_chart import ladder_svg
from flatout.reporting.tuning.text import render_ablation
from tests.paths import ROOT

RECORD = "benchmarks/records/2026-11-23_ladder_2xamd-epyc"
PAGES = ("README.md", "README.ko.md")


@pytest.fixture(scope="module")
def tuned():
    raw = json.loads((ROOT / RECORD / "result.json").read_text())["raw"]
    return ablation_from_json(raw["ablations"]["ResNet-18"])


def test_the_picture_is_that_of_the_record(tuned):
    assert (ROOT / "docs/pictures/tuning.svg").read_text() == ladder_svg(tuned)


@pytest.mark.parametrize("page", PAGES)
def test_the_report_that_is_shown_is_that_of_the_record(page, tuned):
    (shown,) = re.findall(r"^```text\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)

    assert RECORD in (ROOT / page).read_text()
    assert shown in render_ablation(tuned)
    assert "1.67x faster" in shown


def test_both_pages_show_the_same_commands():
    commands = [set(re.findall(r"^flatout \w+", (ROOT / page).read_text(), re.M)) for page in PAGES]

    assert commands[1] <= commands[0]


def test_the_citation_names_this_version():
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
