"""What pack and compare report, in each language."""

import json
import re

import pytest

from flatout.records.messages import LANGUAGES
from flatout.reporting.pack import render_check, render_files, render_formats, render_pack
from flatout.reporting.tuning.text import render_contrast
from flatout.workflow.compare import compare
from tests.paths import ROOT

PACKED = {
    "folder": "out.packed",
    "samples": 12,
    "file_shards": 1,
    "bytes": 4096,
    "was_packed": False,
    "seconds": 2.0,
    "encoding": {"kind": "jpeg", "quality": 90, "short_side": 256, "tokenizer": ""},
    "is_lossless": False,
    "order": "shuffled",
    "seed": 3,
    "classes": 2,
    "classes_first": ["0", "1"],
    "skipped": 1,
    "skipped_first": ["7.jpg: 0x00"],
    "ignored": 2,
    "verification": {"samples": 12, "num_problems": 1, "problems": ["3.jpg: 0xff"]},
}
CHECKED = {"folder": "o", "samples": 1, "bytes": 9, "seconds": 1.0, "is_sound": True}
COST = {
    "name": "original",
    "bytes_per_image": 1000.0,
    "decode_ms": 2.0,
    "images_per_s_per_core": 500.0,
    "images_per_s": 900.0,
    "difference": 0.0,
    "cores_needed": 1.5,
    "total_bytes": 1e12,
}
FORMATS = {
    "source": "photos",
    "images": 3,
    "usable_cores": 2,
    "not_installed": ["qoi"],
    "read_bytes_per_s": 1e8,
    "free_memory_bytes": 1e9,
    "costs": [COST, COST | {"name": "raw", "images_per_s": 1800.0}, COST | {"difference": 2.0}],
}
FILES = {
    "source": "photos",
    "folder": "out",
    "files": 1200,
    "bytes": 4096,
    "seed": 3,
    "seconds": 2.0,
    "uneven": 1.01,
    "uneven_before": 57.5,
}
NAMES = (
    "flatout pack tune runs DST encode data open before after json out packed skipped jsonl jpg "
    "xff raw qoi original photos min uint MiB KiB GiB bytes JPEG CPU RGB AMD EPYC "
    "numerics training train"
)
"""Names, units and commands, which are the same in each language."""


def reports(language):
    names = ("profile_starved", "profile_busy")
    stored = [json.loads((ROOT / f"tests/reporting/data/{x}.json").read_text()) for x in names]
    sides = {"baseline": "before.json", "candidate": "after.json"}
    unlike = {"verification": None, "was_packed": True, "order": "source", "is_lossless": True}
    problems = {"is_sound": False, "num_problems": 1, "problems": ["0xff"]}
    yield render_contrast(compare(*stored), **sides, language=language)
    for plain in (PACKED, PACKED | unlike, PACKED | {"verification": None}):
        yield render_pack(plain, language=language)
    yield render_check(CHECKED, language=language)
    yield render_check(CHECKED | problems, language=language)
    yield render_files(FILES, language=language)
    yield render_files(FILES | {"uneven": None, "uneven_before": None}, language=language)
    yield render_formats(FORMATS, language=language)
    yield render_formats(FORMATS | {"costs": [COST], "read_bytes_per_s": 0}, language=language)


def test_no_korean_report_has_an_english_word():
    found = {word for text in reports("ko") for word in re.findall(r"[A-Za-z]{3,}", text)}

    assert found - set(NAMES.split()) == set()


def test_each_report_says_the_same_numbers_in_each_language():
    numbers = [
        [sorted(re.findall(r"\d+\.\d+", text)) for text in reports(language)]
        for language in LANGUAGES
    ]

    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("text", list(reports("en")))
def test_an_english_report_is_plain_ascii(text):
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
