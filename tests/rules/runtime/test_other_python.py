from flatout.rules.runtime.other_python import check
from tests.techniques.facts import machine, profile


def test_the_rest_of_the_loop_is_reported_with_its_numbers():
    finding = check(profile(phases_ms={"other": 100.0}), machine())

    assert finding.share == 0.5
    assert finding.because == (
        "100 ms of 200 ms (50 %, n=20) pass outside loading, model and optimizer"
    )
    assert "flatout measure" in finding.next


def test_it_is_silent_below_a_tenth():
    assert check(profile(phases_ms={"other": 10.0}), machine()) is None
