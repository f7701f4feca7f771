"""The site has every page, and a link leads to each; `make docs` builds it."""

import json
import re

import pytest

from benchmarks.site_pages import commands_page, pages_of_site, site_link, without_way_in
from flatout.cli.commands import SUMMARIES
from flatout.records import catalogue
from flatout.records.ablation import ablation_from_json
from flatout.reporting.profile.text import render_profile
from flatout.reporting.tuning.text import render_ablation
from tests.paths import ROOT
from tests.reporting.test_short_reports import found

NAVIGATION = re.findall(r"[\w./-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)
FIRST = 10
"""Pages that a newcomer meets, those behind `How to` aside."""


@pytest.fixture(scope="module")
def pages():
    return pages_of_site()


def test_a_link_leads_to_every_page(pages):
    assert without_way_in(pages, NAVIGATION) == []


def test_a_page_that_no_link_leads_to_is_named():
    pages = {"a.md": "[b](sub/b.md)", "sub/b.md": "[a](../a.md#x)", "c.md": "[a](a.md)"}

    assert without_way_in(pages, ["a.md"]) == ["c.md"]


def test_the_navigation_names_pages_that_exist_once(pages):
    assert [page for page in NAVIGATION if page not in pages] == []
    assert len(NAVIGATION) == len(set(NAVIGATION))


def test_a_newcomer_meets_few_pages():
    top = re.findall(r"^  - .+: [\w./-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)

    assert len(top) <= FIRST


@pytest.mark.parametrize(
    ("link", "page", "there"),
    [
        ("../CHANGELOG.md#010", "faq.md", "changes.md#010"),
        ("techniques", "index.md", "reference/techniques.md"),
        ("data", "techniques/README.md", "../reference/techniques.md"),
        ("../../src/flatout/api.py", "how-to/ray.md", ""),
        ("trials.md#what-is-not-undone", "faq.md", "trials.md#what-is-not-undone"),
    ],
)
def test_links_lead_to_where_the_site_has_it(link, page, there):
    assert site_link(link, page) == there


def test_the_reference_has_every_command_option_technique_and_rule(pages):
    assert all(f"## flatout {name}\n" in commands_page() for name in SUMMARIES)
    assert "`--budget TEXT`" in commands_page()
    assert all(f"/{name}.md)" in pages["reference/techniques.md"] for name in catalogue.names())
    rules = {path.stem for path in (ROOT / "docs/rules").glob("*.md")} - {"README"}
    assert [name for name in rules if f"/{name}.md)" not in pages["reference/rules.md"]] == []


def test_the_reports_of_the_tutorial_are_those_of_its_record():
    page = (ROOT / "docs/tutorial.md").read_text()
    (record,) = re.findall(r"benchmarks/records/([\w-]+starved_images[\w-]+)/", page)
    stored = json.loads((ROOT / f"benchmarks/records/{record}/result.json").read_text())
    (plain,) = found(stored, lambda part: {"rows", "baseline", "workload"} <= set(part))
    ablation = ablation_from_json(plain)

    shown = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)

    report = render_profile(ablation.baseline, workload=ablation.workload)
    assert shown == [report, render_ablation(ablation)]
