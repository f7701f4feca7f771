from flatout.records.profile import Regime
from flatout.rules.device.launch_bound import check
from tests.techniques.facts import machine, profile

TURNS = {
    "next": {"batch": "larger", "compile": "more"},
    "next_compiled": {"batch": "larger"},
}


def waiting(share, kind="cuda"):
    return profile(kind=kind, regime=Regime(name="launch", shares={"launch": share}))


def test_launches_that_bound_the_step_are_reported():
    finding = check(waiting(0.4), machine())

    assert finding.share == 0.4
    assert "torch_compile" in finding.next


def test_it_is_silent_below_on_a_cpu_and_where_no_one_looked():
    assert check(waiting(0.2), machine()) is None
    assert check(waiting(0.4, kind="cpu"), machine()) is None
    assert check(profile(kind="cuda"), machine()) is None
