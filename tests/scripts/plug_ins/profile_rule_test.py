from flatout.rules.runtime.uneven_steps import check

from flatout.records.profile import Spread
from tests.techniques.facts import machine, profile

SPEAKS = profile(step_ms=Spread(median=100.0, p10=90.0, p90=400.0, n=20))


def test_steps_of_which_some_take_long_are_found():
    finding = check(SPEAKS, machine())

    assert finding.share == 0.75
    assert finding.because.startswith("one step in ten takes 400 ms or more, half of them 100 ms")


def test_it_is_silent_where_all_are_alike():
    assert check(profile(), machine()) is None
