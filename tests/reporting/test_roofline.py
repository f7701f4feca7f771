from dataclasses import replace

import pytest

from flatout.records.roofline import Roofline
from flatout.reporting.roofline import render_roofline
from tests.paths import ROOT
from tests.reporting.made_up_roofline import CPU, FOUND, HEAD, PAD

PAGE = ROOT / "docs/commands/roofline.md"


def test_the_page_shows_what_is_printed():
    text = render_roofline(FOUND)

    assert text in PAGE.read_text()
    assert max(map(len, text.splitlines())) <= 80


def test_a_device_alone_shows_its_ceilings_and_how_to_go_on():
    text = render_roofline(Roofline(ceilings=CPU))

    assert "Test CPU does 800 GFLOP/s in bfloat16" in text
    assert "below 40.0\noperations a byte its memory decides" in text
    assert text.endswith("next  flatout roofline train.py\n")


def test_products_at_the_roof_are_left_alone():
    at_the_roof = replace(HEAD, ms=52.0)

    text = render_roofline(replace(FOUND, products=(at_the_roof,), advice=()))

    assert "they run at the roof: leave\nthem." in text


def test_products_that_were_not_timed_are_not_called_fast():
    untimed = replace(HEAD, ms=None, why="no time was left to time it alone")

    text = render_roofline(replace(FOUND, products=(untimed,), advice=()))

    assert text.startswith("1 distinct products were seen, and none could be timed.")


def test_a_script_without_products_says_so():
    assert "train.py multiplies no matrices" in render_roofline(replace(FOUND, products=()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"measured_ratio": 1.01, "saved_ms": 0.9}, "1.01x measured alone: leave it"),
        ({"measured_ratio": 0.8, "saved_ms": -20.0}, "0.80x measured alone: leave it"),
        ({"measured_ratio": None, "saved_ms": None}, "1.70x foreseen, not measured"),
        ({"kind": "batch"}, "for the same samples"),
    ],
)
def test_advice_is_worth_what_was_measured(change, words):
    text = render_roofline(replace(FOUND, advice=(replace(PAD, **change),)))

    assert words in " ".join(text.split())


def test_products_that_do_not_fit_the_table_are_summed_up():
    text = render_roofline(replace(FOUND, products=(HEAD,) * 23))

    assert "3 smaller products: 270 ms of the step" in text


def test_a_gpu_shows_tiles_and_waves():
    gpu = replace(CPU, device_kind="cuda", processors=132, to_device_bytes_per_s=50e9)
    gpu = replace(gpu, from_device_bytes_per_s=40e9)
    product = replace(HEAD, tile_share=0.97, wave_share=0.61)

    text = render_roofline(replace(FOUND, ceilings=gpu, products=(product,)))

    assert "132 processors" in text
    assert "97 %   61 %" in text
    assert "46.57 GiB/s to the device, 37.25 GiB/s back, pinned" in " ".join(text.split())


def test_what_was_disturbed_or_is_not_known_is_said():
    ceilings = replace(CPU, is_sound=False, missing={"float16": "no such product"})

    text = render_roofline(Roofline(ceilings=ceilings))

    assert "float16: no such product" in text
    assert "others used the cores" in text
