from flatout.rules.runtime.sync_in_step import check
from tests.rules.memory_facts import sync
from tests.techniques.facts import machine, profile


def test_costly_waits_are_reported_with_their_lines():
    waits = (
        sync(ms_per_step=4.0),
        sync(line="train.py:12", what="print", per_step=0.1, ms_per_step=6.0),
    )

    finding = check(profile(syncs=waits), machine())

    assert finding.share == 0.1
    assert finding.because == (
        "the host waits up to 10.0 ms of 100 ms (10 %) in calls that read values back: "
        "train.py:12 (print, 0.1 a step), train.py:9 (item, 1 a step)"
    )


def test_it_is_silent_below_three_percent():
    assert check(profile(syncs=(sync(ms_per_step=2.9),)), machine()) is None


def test_calls_that_cost_nothing_are_no_finding():
    assert check(profile(syncs=(sync(ms_per_step=None),) * 50), machine()) is None


def test_waits_never_exceed_the_step():
    assert check(profile(syncs=(sync(ms_per_step=500.0),)), machine()).share == 1.0
