"""What the suite of turns concludes from its pairs."""

import pytest

from benchmarks.suites.turns import record_of


def part(in_turns, apart, deviation=0.03):
    return {
        "name": "made up",
        "in turns": [
            {"log_ratio": log, "deviation": deviation, "took_s": 10.0} for log in in_turns
        ],
        "one after the other": [{"log_ratio": log, "took_s": 9.0} for log in apart],
    }


@pytest.mark.parametrize(
    ("in_turns", "apart", "holds"),
    [
        ([0.01, -0.01], [0.2, -0.2], True),
        ([0.01, -0.01], [0.015, -0.015], False),
        ([0.3, -0.3], [2.0, -2.0], False),
    ],
)
def test_turns_have_to_be_closer_and_within_what_they_say(in_turns, apart, holds):
    found = record_of([part(in_turns, apart)])

    assert found.holds is holds
    assert found.table[1][0] == "made up"
