from flatout.rules.runtime.short_of_cores import check
from tests.rules.pipeline_facts import pipeline
from tests.techniques.facts import machine, profile


def waiting(**changes):
    return profile(phases_ms={"data_wait": 100.0}, pipeline=pipeline(**changes))


def test_too_few_cores_are_reported_with_the_costliest_leg():
    finding = check(waiting(), machine())

    assert finding.share == 0.5
    assert finding.because == (
        "a sample takes 4.00 ms of one core, so 8.0 cores feed one device at the 2000 samples/s "
        "it takes when data is free, and 2.0 are there; 75 % of it is decode"
    )
    assert finding.next == (
        "more workers cannot help, cheaper samples do: "
        "flatout tune --only fast_decode,ram_cache train.py"
    )


def test_without_a_lever_it_says_what_is_left_to_do():
    assert "store it in a cheaper form" in check(waiting(levers=()), machine()).next


def test_it_is_silent_where_the_cores_do_or_nothing_waits():
    assert check(waiting(needed=1.5), machine()) is None
    assert check(profile(pipeline=pipeline()), machine()) is None
    assert check(profile(phases_ms={"data_wait": 100.0}), machine()) is None
