import pytest

from flatout.rules.device.channels_first import check
from tests.techniques.facts import machine, model, profile

CONVOLUTIONS = {"conv_weights": 20, "used_autocast": True}


def convolving(kind="cuda", **changes):
    return profile(kind=kind, models=(model(**CONVOLUTIONS | changes),))


def test_convolutions_under_autocast_are_reported():
    finding = check(convolving(), machine())

    assert finding.share == 1.0
    assert finding.is_bound
    assert "20 convolutions" in finding.because


@pytest.mark.parametrize(
    "known",
    [
        convolving(kind="cpu"),
        convolving(conv_weights=2),
        convolving(is_channels_last=True),
        convolving(used_autocast=False),
    ],
    ids=["cpu", "few", "channels last", "fp32"],
)
def test_it_is_silent_about(known):
    assert check(known, machine()) is None
