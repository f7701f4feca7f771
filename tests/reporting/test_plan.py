from dataclasses import replace

import pytest

from flatout.records.plan import Accumulating, LargestBatch
from flatout.records.units import GIB
from flatout.reporting.plan import layers, phase_lines, plan_html, render_plan
from tests.reporting.plans import plan, rung, too_large


def test_the_first_line_is_the_answer():
    text = render_plan(plan(), workload="train.py --n 3", gpu="l4")

    assert text.startswith("It fits on NVIDIA L4 (16.00 GiB) with 4.00 GiB to spare.\n")
    assert text.endswith("next  flatout tune train.py --n 3\n")


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({}, "flatout plan --gpu l4 --fit hf:config.json"),
        (
            {"largest_batch": LargestBatch(without_retries=3, with_retries=4)},
            "--html plan.html hf:",
        ),
    ],
)
def test_a_configuration_is_planned_on_and_never_tuned(changes, command):
    text = render_plan(replace(plan(), **changes), workload="hf:config.json", gpu="l4")

    assert command in text.splitlines()[-1]


def test_a_size_with_a_space_stays_one_word_of_the_next_command():
    text = render_plan(plan(), workload="hf:config.json", gpu="24 GiB")

    assert text.endswith("flatout plan --gpu '24 GiB' --fit hf:config.json\n")


def test_what_does_not_fit_comes_with_the_cheapest_way():
    text = " ".join(render_plan(too_large(), workload="train.py", gpu="l4").split())

    assert "4.00 GiB too much; the cheapest way that fits: " in text
    assert "activation_checkpointing mode=full (saves 2.00 GiB, 1.33x the time)" in text


def test_a_way_that_trains_the_same_is_preferred_to_another_training():
    assert too_large().way_out.choices == ("activation_checkpointing mode=full",)
    only = too_large(ladder=(rung("adafactor", changes_training=True), rung(fits=False)))
    assert only.way_out.choices == ("adafactor",)
    assert plan().way_out is None


def test_where_nothing_helps_it_says_so():
    text = render_plan(too_large(ladder=(rung(fits=False),)), workload="train.py")

    assert "none of the ways that were looked at suffices" in " ".join(text.split())


def test_an_interval_that_crosses_the_memory_does_not_count_as_fitting():
    edge = plan(15 * GIB + GIB // 2)

    text = " ".join(render_plan(edge, workload="train.py").split())

    assert not edge.fits
    assert text.startswith("It may not fit on NVIDIA L4 (16.00 GiB): 512.0 MiB to spare are less")


def test_a_way_that_fits_by_less_than_is_uncertain_is_not_promised():
    close = rung("fused_optimizer", peak_bytes=15 * GIB + GIB // 2)
    sure = rung("microbatching chunks=2", peak_bytes=14 * GIB, time_ratio=1.33)
    edge = plan(15 * GIB + GIB // 2, ladder=(close, replace(close, choices=()), sure))

    text = render_plan(edge, workload="train.py")
    only = render_plan(replace(edge, ladder=(close,)), workload="train.py")

    assert "the cheapest way that fits: microbatching" in " ".join(text.split())
    assert "the cheapest way that may fit: fused_optimizer" in " ".join(only.split())
    rows = [line for line in text.splitlines() if " perhaps " in line or " yes " in line]
    assert [row.split()[0] for row in rows] == ["fused_optimizer", "the", "microbatching"]
    assert [" perhaps " in row for row in rows] == [True, True, False]


def test_a_device_known_by_its_memory_alone_is_not_told_it_twice():
    text = render_plan(plan(device="a GPU with 16.00 GiB"), workload="train.py")

    assert text.startswith("It fits on a GPU with 16.00 GiB with 4.00 GiB to spare.")


def test_each_number_says_how_it_is_known_and_zeros_are_left_out():
    text = render_plan(plan(), workload="train.py")

    assert "assumed, 256.0 MiB to 1.00 GiB" in text
    assert "simulated" in text
    table = text.partition("at the peak")[2].partition("largest")[0]
    assert "gradients" not in table


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (LargestBatch(without_retries=5, with_retries=6), "at most 5; up to 6 with allocator"),
        (LargestBatch(without_retries=5, with_retries=5), "at most 5\n"),
        (LargestBatch(without_retries=1 << 20, with_retries=1 << 20), "1048576 and more: memory"),
        (LargestBatch(without_retries=None, with_retries=2), "at most 2, only with allocator"),
        (LargestBatch(without_retries=None, with_retries=None), "not even one sample fits"),
    ],
)
def test_the_largest_batch_is_told_in_words(batches, words):
    assert words in render_plan(plan(largest_batch=batches), workload="t.py", width=120)


def test_keeping_the_batch_is_told():
    kept = too_large(accumulating=Accumulating(micro_batch=4, steps=2), batch=8)

    assert "a batch of 8 as 2 micro-batches of 4" in render_plan(kept, workload="t.py")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_report_is_plain_ascii_whatever_a_module_is_called(width):
    hostile = replace(plan().largest[0], module="\x1b[2J\u202e")

    text = render_plan(plan(largest=(hostile,)), workload="t.py", width=width)

    assert text.isascii()
    assert "\x1b" not in text


def test_the_page_loads_nothing_and_escapes_what_it_shows():
    page = plan_html(too_large(), workload="train.py '<b>'", gpu="l4")

    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<polygon") == 2


def test_the_curve_s_layers_stand_on_each_other():
    found = {name: points.split() for name, points in layers(plan())}

    assert list(found) == ["parameters", "activations"]
    roof = found["parameters"][:3]
    assert found["activations"][3:] == list(reversed(roof))
    assert [name for _x, name in phase_lines(plan())] == ["forward 1", "backward 1", "optimizer 1"]


def test_a_plan_becomes_plain_json():
    plain = too_large().to_json()

    assert plain["fits"] is False
    assert plain["spare_bytes"] == -4 * GIB
    assert plain["components"]["context"]["source"] == "assumed"
    assert plain["ladder"][0]["choices"] == ["activation_checkpointing mode=full"]
    assert plain["ladder"][0]["source"] == "traced"
