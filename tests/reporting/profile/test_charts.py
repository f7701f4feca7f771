from dataclasses import replace

import pytest

from flatout.records.messages import messages
from flatout.records.profile import PHASES
from flatout.reporting.profile import html
from tests.reporting.full_profile import filled

SAY = messages("en")


def points(line):
    return [tuple(map(float, point.split(","))) for point in line.split()]


def test_the_bar_of_a_step_is_as_long_as_its_phases(starved):
    plot = html.step_plot(starved, SAY)

    assert sum(box.width for box in plot.boxes) == pytest.approx(html.WIDTH, abs=0.1)
    assert [box.kind for box in plot.boxes] == [p for p in PHASES if starved.phases_ms[p]]


def test_every_step_is_a_column_of_its_phases(starved):
    profile = filled(starved)

    plot = html.steps_plot(profile, SAY)

    kinds = len([phase for phase in PHASES if starved.phases_ms[phase]])
    assert len(plot.boxes) == len(profile.steps_ms) * kinds
    assert all(box.y >= 0 and box.y + box.height <= html.HEIGHT + 0.1 for box in plot.boxes)


def test_the_curve_of_the_memory_reaches_its_peak_and_ends_with_the_step(starved):
    profile = filled(starved)

    plot = html.memory_plot(profile, SAY)

    curve = points(plot.line)
    assert curve[0][0] == 0.0
    assert curve[-1][0] == pytest.approx(html.WIDTH)
    assert min(y for _x, y in curve) == plot.peak[1] > 0


def test_speed_stands_below_gpu_util(starved):
    names = [plot.name for plot in html.gpu_plots(filled(starved), SAY)]

    assert names == ["gpu_util", "speed_axis"]


def test_nothing_is_drawn_without_data(starved):
    assert html.steps_plot(starved, SAY) is None
    assert html.memory_plot(starved, SAY) is None
    assert html.gpu_plots(starved, SAY) == ()


def test_a_memory_that_is_empty_all_the_time_is_not_drawn(starved):
    profile = filled(starved)
    empty = replace(profile.memory, peak_bytes=0, timeline=((0.0, 0), (1.0, 0)))

    assert html.memory_plot(replace(profile, memory=empty), SAY) is None


def test_one_very_long_step_does_not_press_the_others_flat(starved):
    profile = filled(starved)
    steps = (*profile.steps_ms, tuple(20 * ms for ms in profile.steps_ms[0]))
    spiked = replace(profile, steps_ms=steps)

    plot = html.steps_plot(spiked, SAY)

    assert html.steps_plot(profile, SAY).note == ""
    assert "cut: 1;" in plot.note
    assert max(box.height for box in plot.boxes[:-6]) > html.HEIGHT / 6
    assert min(box.y for box in plot.boxes) >= 0
