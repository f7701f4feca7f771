"""The planner suite's own judgement, on made-up results."""

import pytest

from benchmarks.suites import planner


def row(own, *, others=0.3, tool_is_there=True, off=0):
    truth = 1_000_000
    predicted = {tool: round(truth * (1 - others)) for tool in planner.TOOLS}
    predicted["flatout"] = round(truth * (1 + own))
    predicted["accelerate"] = predicted["accelerate"] if tool_is_there else None
    return {
        "case": "gpt batch 1",
        "truth": truth,
        "predicted": predicted,
        "seconds": {"flatout": 1.0, "MemTracker": 4.0},
        "extrapolated": {"off": off, "of": 100},
    }


def large(seconds=9.0, host_bytes=2**29):
    return {"seconds": seconds, "host_bytes": host_bytes}


SMALL = {"seconds": [1.0, 1.5, 9.0]}


def test_the_claim_holds_by_median_worst_time_and_memory():
    good = [row(0.0), row(0.0005), row(-0.004)]

    assert planner.record_of(good, large(), SMALL).holds
    assert not planner.record_of([*good, row(0.006)], large(), SMALL).holds
    assert not planner.record_of([row(0.002), row(0.002)], large(), SMALL).holds
    assert not planner.record_of(good, large(seconds=16.0), SMALL).holds
    assert not planner.record_of(good, large(host_bytes=3 * 2**30), SMALL).holds
    assert not planner.record_of(good, large(), {"seconds": [2.5, 2.5, 0.1]}).holds
    assert not planner.record_of([*good, row(0.0, off=1)], large(), SMALL).holds


def test_a_tool_that_is_missing_everywhere_has_no_column():
    record = planner.record_of([row(0.0, tool_is_there=False)], large(), SMALL)

    assert "accelerate" not in record.table[0]
    assert record.table[1][2] == "+0.00%"
    assert any("4.0 times as long" in note for note in record.notes)


@pytest.mark.parametrize(("truth", "bytes_", "expected"), [(200, 150, -0.25), (100, 100, 0.0)])
def test_an_error_is_relative_to_the_truth(truth, bytes_, expected):
    assert planner.error({"truth": truth, "predicted": {"x": bytes_}}, "x") == expected
