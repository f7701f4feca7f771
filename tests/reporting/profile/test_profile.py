import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from flatout.records.finding import Finding
from flatout.records.profile import Ceilings, Spread
from flatout.reporting.profile.text import render_profile
from tests.reporting.full_profile import filled


def first_line(profile):
    return render_profile(profile, width=1000).splitlines()[0]


def column(text, number):
    rows = text.split("\n\n")[2].splitlines()[2:]
    cells = [re.split(r"  +", row)[number + 1] for row in rows]
    return [float(cell.removesuffix(" %")) for cell in cells]


def test_the_report_of_a_starved_job(starved, snapshot):
    assert render_profile(starved, workload="train.py --epochs 3") == snapshot


def test_the_report_of_a_busy_job(busy, snapshot):
    assert render_profile(busy) == snapshot


def test_the_report_in_korean(starved, snapshot):
    assert render_profile(starved, workload="train.py --epochs 3", language="ko") == snapshot


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_report_with_every_detail(starved, snapshot, language):
    assert render_profile(filled(starved), language=language, details=True) == snapshot


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_in_korean_takes_more_columns_than_the_terminal_has(starved, width):
    lines = render_profile(starved, width=width, language="ko").splitlines()

    assert max(map(cell_len, lines)) <= width


def test_korean_columns_stand_below_each_other(starved):
    rows = render_profile(starved, language="ko").split("\n\n")[2].splitlines()[2:]

    assert len({cell_len(row.partition("%")[0]) for row in rows}) == 1


def test_what_moves_a_cursor_is_escaped_in_korean_too(starved):
    text = render_profile(starved, workload="a\x1b[2J\u202eb.py", language="ko")

    assert "a\\x1b[2J\\u202eb.py" in text


def test_on_a_cpu_no_copies_to_a_device_are_shown(starved):
    assert "copy to device" not in render_profile(starved)
    assert "copy to device" in render_profile(replace(starved, device_kind="cuda"))


def test_a_single_step_of_warm_up_is_told_as_one(starved):
    text = render_profile(replace(starved, warmup_steps=1, warmup_ms=150.0), details=True)

    assert "warm-up      1 step, 150 ms, not counted above\n" in text


@pytest.mark.parametrize("number", [0, 1])
def test_phases_add_up_to_the_step_as_printed(starved, number):
    *phases, step = column(render_profile(starved), number)

    assert sum(phases) == pytest.approx(step, abs=1e-9)


def test_copies_are_named_when_they_are_what_waits(busy):
    phases = dict.fromkeys(busy.phases_ms, 10.0) | {"h2d": 50.0, "data_wait": 0.0}
    copying = replace(busy, phases_ms=phases, ceilings=Ceilings(free_copies=2.25))

    assert "waits for copies to the device; at most 2.25x" in first_line(copying)


def test_time_outside_the_model_is_named_when_it_is_most_of_the_step(busy):
    phases = dict.fromkeys(busy.phases_ms, 1.0) | {"other": 80.0, "data_wait": 0.0}

    line = first_line(replace(busy, phases_ms=phases, ceilings=Ceilings(compute_only=28.0)))

    assert line.startswith("95 % of each step is spent outside model, optimizer and loader")


def test_a_finding_larger_than_any_wait_is_the_answer(busy):
    finding = Finding(code="wrong_device", share=0.9, because="a GPU is idle", next="use it")

    assert first_line(replace(busy, findings=(finding,))) == "a GPU is idle."


def test_a_share_that_is_only_a_bound_is_not_the_answer(starved):
    attention = Finding(
        code="math_attention", share=0.95, is_bound=True, because="it is slow", next="mend it"
    )

    text = render_profile(replace(starved, findings=(attention,)), width=200)

    assert text.startswith("62 % of each step waits for data")
    assert "math_attention, at most 95 % of the step: it is slow." in text


def test_a_wait_that_free_data_does_not_shorten_gives_way_to_a_real_loss(starved):
    hidden = Ceilings(free_data=1.02, is_measured=True)
    finding = Finding(code="slow_optimizer", share=0.3, because="it is slow", next="mend it")

    assert first_line(replace(starved, ceilings=hidden, findings=(finding,))) == "it is slow."


@pytest.mark.parametrize(("step_ms", "unit"), [(0.4, "us"), (40.0, "ms"), (40_000.0, "s")])
def test_the_unit_of_the_table_suits_the_step(busy, step_ms, unit):
    scale = step_ms / busy.step_ms.median
    phases = {name: value * scale for name, value in busy.phases_ms.items()}
    step = Spread(median=step_ms, p10=step_ms, p90=step_ms, n=9)

    text = render_profile(replace(busy, phases_ms=phases, step_ms=step))

    assert text.split("\n\n")[2].splitlines()[0].split() == ["phase", unit, "share"]


def test_what_an_epoch_s_start_costs_is_told(starved):
    text = render_profile(replace(starved, epoch_start_ms=1500.0), details=True)

    assert "epoch start  1.50 s once in 62 steps" in text


def test_what_was_not_seen_is_not_made_up(busy):
    text = render_profile(replace(busy, losses=(), samples_per_s=0.0), details=True)

    assert "losses       none seen" in text
    assert "samples/s" not in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(starved, width):
    assert max(map(len, render_profile(starved, width=width).splitlines())) <= width
