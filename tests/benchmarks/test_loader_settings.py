"""The suite's own judgement on made-up results; it is run by hand on a quiet machine."""

import pytest

from benchmarks.suites import loader_settings
from benchmarks.suites.loader_settings import Settled, folk_rules, holds, record_of
from flatout.records import catalogue
from flatout.records.recipe import Choice, Recipe
from tests.benchmarks.made_up import a_machine, a_pair


def settled(**ratios):
    found = Recipe(choices=(Choice(technique="loader_workers", settings={"num_workers": 2}),))
    rules = {name.replace("_", " "): a_pair(ratio) for name, ratio in ratios.items()}
    return Settled(
        scenario="sleep",
        found=found,
        step_ms=10.0,
        rules=rules,
        rule_ms=dict.fromkeys(rules, 12.0),
    )


@pytest.mark.parametrize(
    ("ratios", "is_held"),
    # The pairs' intervals reach 5 % up and down.
    [((1.2, 1.0), True), ((1.2, 0.94), True), ((1.2, 0.92), False), ((), False)],
)
def test_it_holds_while_no_rule_is_shown_to_be_faster(ratios, is_held):
    one = settled(**{f"rule_{number}": ratio for number, ratio in enumerate(ratios)})

    assert holds([one]) is is_held


def test_the_rules_count_cores_and_devices():
    assert folk_rules(a_machine()) == {
        "no workers": 0,
        "4 per GPU": 4,
        "2 per core": 4,
        "4 per core": 8,
    }


def test_the_table_shows_every_rule_beside_what_was_found():
    record = record_of([settled(no_workers=2.0, four=1.1)], {})

    assert record.finding == "sleep: 1.10x of four"
    assert len(record.table) == 4
    assert record.table[1][1] == "found: loader_workers num_workers=2"
    assert {len(row) for row in record.table} == {6}


def test_its_techniques_exist():
    assert set(loader_settings.SETTINGS) <= set(catalogue.names())
