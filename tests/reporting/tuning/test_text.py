from dataclasses import replace

from flatout.records.ablation import Contrast, Quantity
from flatout.reporting.tuning.text import render_contrast

SINGLE = Contrast(
    of="profile",
    ratio=0.9,
    meaning="the baseline's speed, by step time",
    quantities=(
        Quantity(name="step time", baseline=100.0, candidate=111.1, unit="ms"),
        Quantity(name="data wait", baseline=0.0, candidate=3.0, unit="ms"),
        Quantity(name="device busy", baseline=0.5, candidate=0.45, unit="share"),
    ),
    notes=("these are single runs without an interval",),
)


def test_the_report_of_a_comparison(snapshot):
    assert render_contrast(SINGLE) == snapshot


def test_an_interval_that_covers_one_is_no_difference():
    contrast = Contrast(
        of="ablation", ratio=1.05, meaning="the baseline's gain", interval=(0.97, 1.13), n=(5, 4)
    )

    assert render_contrast(contrast, width=200).startswith(
        "No difference that could be shown: 1.05x the baseline's gain "
        "(95% interval 0.97-1.13, n=5+4)."
    )


def test_what_rises_from_below_zero_is_more():
    loss = Quantity(name="loss, last tenth", baseline=-2.0, candidate=-1.0, unit="number")

    assert "+50.0 %" in render_contrast(replace(SINGLE, quantities=(loss,)))
