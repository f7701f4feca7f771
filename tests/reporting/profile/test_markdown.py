from dataclasses import replace

import pytest

from flatout.reporting.profile.text import profile_markdown
from tests.reporting.full_profile import HOSTILE, filled


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_report_with_every_part(starved, snapshot, language):
    text = profile_markdown(filled(starved), workload="train.py --epochs 3", language=language)

    assert text == snapshot


def test_what_was_not_measured_is_named_with_the_reason(starved):
    text = profile_markdown(starved)

    assert "## Left out" in text
    assert "- The journey of a batch: it was not followed." in text


def test_a_hostile_name_is_no_markup(starved):
    text = profile_markdown(filled(starved, HOSTILE), workload=f"{HOSTILE}.py")

    outside = "".join(part for i, part in enumerate(text.split("```")) if i % 2 == 0)
    assert "<img" not in outside.replace("\\<", "")
    assert "\n<" not in text


def test_numbers_not_to_be_trusted_are_marked_before_anything_else(starved):
    text = profile_markdown(replace(starved, invalid=("others kept the cores busy",)))

    assert text.index("**Do not trust these numbers: others kept") < text.index("## Why")


def test_every_row_of_a_table_has_as_many_cells_as_its_title(starved):
    lines = profile_markdown(filled(starved)).replace("\\|", "").splitlines()

    blocks = [line.count("|") for line in lines if line.startswith("|")]
    rules = [line.count("|") for line in lines if line.startswith("| -")]
    assert set(blocks) == set(rules)
