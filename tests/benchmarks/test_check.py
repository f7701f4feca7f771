import json

import pytest

from benchmarks.suites.check import JUDGED, SPELLINGS, labelled, row
from flatout.rules import source

KNOWN = json.loads(JUDGED.read_text())


@pytest.mark.parametrize("rule", sorted(source.modules()))
def test_every_rule_is_right_about_its_examples_in_every_spelling(rule):
    seen = labelled(rule)

    assert seen["wrong"] == dict.fromkeys(SPELLINGS, True)
    assert seen["right"] == dict.fromkeys(SPELLINGS, False)


def test_every_judgement_has_a_verdict_a_reason_and_a_commit():
    assert len(KNOWN["judged"]) >= 60
    for each in KNOWN["judged"]:
        assert each["verdict"] in {"right", "minor", "false"}
        assert each["reason"]
        assert each["code"] in source.codes()
        assert len(KNOWN["repositories"][each["repository"]]) == 40


def test_a_row_counts_what_was_wrong_and_is_no_longer_reported_as_fixed():
    one = {"code": "DL02", "verdict": "false", "still_reported": False}
    other = {"code": "DL02", "verdict": "right", "still_reported": True}
    seen = {"wrong": {"as written": True}, "right": {"as written": False}}

    shown = row("dl02_no_workers", seen, [one, other, {**other, "code": "DL03"}])

    assert shown == ("dl02_no_workers", "1/4", "0/4", "2", "1", "0", "0", "1")
