from dataclasses import replace

import pytest

from flatout.records.readings import TraceSummary
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


def traced(share, **changes):
    trace = TraceSummary(steps=3, step_ms=100.0, layout_conversion_share=share)
    return replace(convolving(**changes), trace=trace, device_busy_share=0.5)


def test_what_a_trace_measured_is_said_in_any_precision():
    finding = check(traced(0.14, used_autocast=False), machine())

    assert finding.share == pytest.approx(0.07)
    assert not finding.is_bound
    assert finding.because.startswith("14 % of the kernels' time goes into changing the layout")


def test_low_precision_is_no_reason_where_no_kernel_changes_the_layout():
    assert check(traced(0.0), machine()) is None


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
