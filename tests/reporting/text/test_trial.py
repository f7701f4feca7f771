from dataclasses import replace

import pytest

from flatout.core.recipe import Choice, Recipe
from flatout.core.trial import Applied, Outcome
from flatout.reporting.text import render_failure


def test_the_report_of_a_crash(crash, snapshot):
    assert render_failure(crash) == snapshot


def test_the_script_s_traceback_is_shown_whole(crash):
    text = render_failure(crash, width=40)

    assert all(f"  {line}" in text for line in crash.traceback.splitlines())


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_every_ending_says_what_to_do_next(crash, outcome):
    text = render_failure(replace(crash, outcome=outcome, message=""), workload="job.py --x")

    assert text.splitlines()[0].endswith(".")
    assert text.splitlines()[-1].endswith(" job.py --x")


def test_under_a_recipe_the_script_alone_is_tried_next(crash):
    recipe = Recipe(choices=(Choice(technique="bf16_autocast"),))
    missed = (Applied(technique="bf16_autocast", status="not_applicable", why="no model"),)

    text = render_failure(replace(crash, recipe=recipe, applied=missed))

    assert "bf16_autocast was not applicable: no model" in text
    assert "measure without it" in text
    assert text.endswith("next     flatout measure train.py\n")


def test_a_command_is_never_broken_into_lines(crash):
    workload = "train.py " + " ".join(f"--option-{i} {i}" for i in range(20))

    assert render_failure(crash, workload=workload).endswith(f"python {workload}\n")


def test_output_cannot_move_the_cursor(crash):
    text = render_failure(replace(crash, traceback="\x1b[2J\x07boom \u2192"))

    assert "\\x1b[2J\\x07boom \\u2192" in text
