from flatout.records.readings import Limits
from flatout.rules.device.at_ceiling import check
from tests.techniques.facts import machine, profile

TURNS = {"next": {"precision": "lower"}}


def test_a_step_near_its_least_time_can_be_left():
    finding = check(profile(limits=Limits(least_step_ms=92.0, gemm_dtype="bfloat16")), machine())

    assert round(finding.share, 3) == 0.08
    assert finding.is_bound
    assert "92.0 ms of 100 ms" in finding.because


def test_it_is_silent_below_and_where_no_limit_is_known():
    assert check(profile(limits=Limits(least_step_ms=85.0)), machine()) is None
    assert check(profile(limits=Limits()), machine()) is None
    assert check(profile(), machine()) is None
