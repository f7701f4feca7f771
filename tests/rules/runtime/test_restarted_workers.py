import pytest

from flatout.rules.runtime.restarted_workers import check
from tests.techniques.facts import loader, machine, profile


def known(start_ms, **changes):
    facts = loader(**{"num_workers": 2, "line": "train.py:4"} | changes)
    return profile(loaders=(facts,), epoch_start_ms=start_ms, epoch_steps=10)


def test_starts_that_take_a_part_of_each_epoch_are_found():
    finding = check(known(1000.0), machine())

    assert finding.share == pytest.approx(0.5)
    assert "1.00 s an epoch of 10 steps, 50 % of the time" in finding.because
    assert finding.lines == ("train.py:4",)


@pytest.mark.parametrize(
    "silent",
    [known(40.0), known(1000.0, persistent_workers=True), known(1000.0, num_workers=0)],
    ids=["short", "live on", "no workers"],
)
def test_short_starts_and_workers_that_live_on_are_left_alone(silent):
    assert check(silent, machine()) is None
