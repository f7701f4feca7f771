import base64
import hashlib
import io
import re
from dataclasses import replace

import pytest
from PIL import Image

from flatout.reporting.profile.html import profile_html
from tests.reporting.browser import Browser, find_browser
from tests.reporting.full_profile import HOSTILE, filled
from tests.reporting.markup import Markup

LOADING = {"src", "href", "action", "srcset", "data", "poster", "background", "style"}
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")


def all_of(profile, language="en"):
    return profile_html(filled(profile), workload="train.py --epochs 3", language=language)


def test_tags_close_in_order(starved):
    page = Markup(all_of(starved))

    assert page.open == []


def test_every_part_has_its_place(starved):
    words = Markup(all_of(starved)).words

    titles = (
        "One step",
        "Step by step",
        "Ceilings",
        "The journey of a batch",
        "Largest tensors at the peak",
        "GPU-Util",
        "Lines that make the host wait",
        "Ranks",
    )
    assert [title for title in titles if title not in words] == []


def test_nothing_is_loaded_and_nothing_runs(starved):
    text = all_of(starved)
    page = Markup(text)

    assert {name for name, _value in page.attributes} & LOADING == set()
    assert [name for name, _value in page.attributes if name.startswith("on")] == []
    assert set(page.tags) & {"script", "link", "img", "iframe", "object"} == set()
    assert "url(" not in text
    assert "@import" not in text


def test_the_policy_allows_the_one_style_and_nothing_else(starved):
    text = all_of(starved)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]

    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = [v for k, v in Markup(text).attributes if k == "content" and "default-src" in v]
    assert policy == [
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    ]


def test_a_hostile_name_stays_text(starved):
    profile = replace(filled(starved, HOSTILE), device_name=HOSTILE, invalid=(HOSTILE,))

    page = Markup(profile_html(profile, workload=HOSTILE))

    assert set(page.tags) & {"script", "img"} == set()
    assert HOSTILE in "".join(page.texts)


def test_what_was_not_measured_is_left_out_with_a_reason(starved):
    words = Markup(profile_html(starved)).words

    assert "Ranks: this training has one process." in words
    assert "Largest tensors" not in words


def test_korean_is_marked_as_korean(starved):
    text = all_of(starved, "ko")

    assert '<html lang="ko">' in text
    assert "한 스텝의 구성" in text


def test_every_drawing_is_told_in_words(starved):
    page = Markup(all_of(starved))

    named = [value for name, value in page.attributes if name == "aria-labelledby"]
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(named) == page.tags.count("figure") > 0
    assert [one for pair in named for one in pair.split() if one not in ids] == []
    assert len(ids) == len(set(ids))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(find_browser(), tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_real_browser_shows_it_from_disk(starved, tmp_path, browser, width, scheme, language):
    file = tmp_path / "report.html"
    hostile = replace(filled(starved, HOSTILE), device_name=HOSTILE)
    file.write_text(profile_html(hostile, workload=f"{HOSTILE}.py", language=language))

    page = browser.open(file.as_uri(), width=width, scheme=scheme)

    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.title") == f"flatout: {HOSTILE}.py"
    assert page.value("getComputedStyle(document.querySelector('.alarm, h1')).fontWeight") > "400"
    assert page.requests() == [file.as_uri()]
    assert page.complaints() == []
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    assert image.width == width
    assert len(image.resize((64, 256)).getcolors(64 * 256)) > 50
    is_dark = sum(image.getpixel((2, 2))) < 3 * 128
    assert is_dark == (scheme == "dark")


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_stand_out_from_their_ground(starved, tmp_path, browser, scheme):
    file = tmp_path / "report.html"
    alarmed = replace(filled(starved), invalid=("others kept the cores busy",))
    file.write_text(profile_html(alarmed))

    page = browser.open(file.as_uri(), width=1280, scheme=scheme)

    assert page.value(CONTRASTS) >= 4.5


CONTRASTS = """(() => {
  const light = c => { const p = c.match(/[0-9.]+/g).slice(0, 3).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 });
    return 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2] };
  const ground = e => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!c.endsWith(', 0)')) return c } return 'rgb(255, 255, 255)' };
  return Math.min(...[...document.querySelectorAll('h1,h2,p,dt,dd,th,td,li,code,footer,span,b')]
    .filter(e => e.textContent.trim()).map(e => {
      const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05) })) })()"""
"""The least contrast of all texts, as the accessibility guidelines compute it; 4.5 is their AA."""
