import pytest

from flatout.rules.runtime.optimizer_peak import check
from tests.rules.memory_facts import story
from tests.techniques.facts import GIB, machine, profile


def peaking(**changes):
    known = {
        "peak_phase": "optimizer",
        "peak_bytes": 8 * GIB,
        "by_phase": {"forward": 3 * GIB, "backward": 4 * GIB, "optimizer": 8 * GIB},
    }
    return profile(memory=story(**known | changes))


def test_an_update_that_needs_more_than_all_else_is_reported():
    finding = check(peaking(), machine())

    assert finding.share == 4 / 16
    assert finding.of == "device"
    assert "8.00 GiB" in finding.because
    assert "4.00 GiB" in finding.because


@pytest.mark.parametrize(
    "known",
    [
        profile(),
        peaking(peak_phase="backward"),
        peaking(by_phase={"backward": 7.5 * GIB, "optimizer": 8 * GIB}),
        peaking(peak_bytes=1 * GIB, by_phase={"backward": GIB // 2, "optimizer": 1 * GIB}),
    ],
    ids=["not looked", "in backward", "hardly more", "small on the device"],
)
def test_it_is_silent_about(known):
    assert check(known, machine()) is None
