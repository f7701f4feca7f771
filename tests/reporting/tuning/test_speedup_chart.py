import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from flatout.records.ablation import Comparison
from flatout.records.recipe import Choice
from flatout.reporting.tuning.speedup_chart import ladder_svg

SVG = "{http://www.w3.org/2000/svg}"


def bars(text):
    groups = ElementTree.fromstring(text).findall(f"{SVG}g")
    return {
        group.find(f"{SVG}text").text: float(group.find(f"{SVG}rect").get("width"))
        for group in groups
    }


def test_the_plot_of_a_tuning(tuned, snapshot):
    assert ladder_svg(tuned) == snapshot


def test_a_bar_is_as_long_as_its_multiple_of_the_baseline(tuned):
    length = bars(ladder_svg(tuned))

    assert length["whole recipe"] / length["baseline"] == pytest.approx(2.105, rel=0.005)
    assert length["bf16_autocast"] / length["baseline"] == pytest.approx(1.624 * 1.187, rel=0.005)


def test_a_technique_that_gave_no_ratio_has_no_bar(tuned):
    assert "cpu_allocator" not in bars(ladder_svg(tuned))


def test_a_technique_tried_with_two_settings_shows_them(tuned):
    first = replace(tuned.rows[0], choice=Choice(technique="threads", settings={"n": 1}))
    second = replace(tuned.rows[1], choice=Choice(technique="threads", settings={"n": 2}))

    names = bars(ladder_svg(replace(tuned, rows=(first, second))))

    assert {"threads n=1", "threads n=2"} <= set(names)


def test_nothing_leaves_the_drawing(tuned):
    wide = replace(tuned.rows[0], comparison=Comparison(ratio=9.0, interval=(2.0, 40.0), n=2))
    root = ElementTree.fromstring(ladder_svg(replace(tuned, rows=(wide,))))

    width = float(root.get("viewBox").split()[2])
    ends = [float(rect.get("x", 0)) + float(rect.get("width")) for rect in root.iter(f"{SVG}rect")]
    whiskers = [re.search(r"H([\d.]+)", path.get("d"))[1] for path in root.iter(f"{SVG}path")]
    assert max(*ends, *map(float, whiskers)) <= width


def test_a_wide_interval_does_not_squash_the_bars(tuned):
    wide = replace(tuned.rows[0], comparison=Comparison(ratio=1.5, interval=(0.1, 40.0), n=2))

    length = bars(ladder_svg(replace(tuned, rows=(wide,))))

    assert length["whole recipe"] > 250


def test_a_ratio_whose_interval_has_no_end_has_no_bar(tuned):
    open_end = Comparison(ratio=7.5, interval=(0.0, math.inf), n=1)
    rows = (replace(tuned.rows[0], comparison=open_end),)

    text = ladder_svg(replace(tuned, rows=rows, confirmation=None))

    assert list(bars(text)) == ["baseline"]


def test_the_plot_can_be_read_aloud(tuned):
    root = ElementTree.fromstring(ladder_svg(tuned))

    assert root.find(f"{SVG}title").text.startswith("2.10x faster")
    assert "torch_compile: 2.51 times, rejected" in root.find(f"{SVG}desc").text
    assert root.get("aria-labelledby") == "ladder-title ladder-description"


def test_hostile_names_stay_text(tuned):
    rows = (replace(tuned.rows[0], choice=Choice(technique='"><script>alert(1)</script>')),)

    root = ElementTree.fromstring(ladder_svg(replace(tuned, rows=rows)))

    assert [item for item in root.iter() if item.tag.endswith("script")] == []
