import re
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


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ValueError: environment variable RANK expected, but not set", "torch.distributed.run"),
        ("EOFError: EOF when reading a line", "nobody answers"),
        ("train.py: error: the following arguments are required: --data", "after its name"),
        ("ModuleNotFoundError: No module named 'timm'", "beside flatout"),
        ("urllib.error.URLError: <urlopen error [Errno -3] no>", "download once"),
        ("ZeroDivisionError: division by zero", "works by itself"),
    ],
)
def test_what_the_script_misses_decides_the_advice(crash, said, advice):
    text = render_failure(replace(crash, recipe=Recipe(), message=said, traceback=""))

    assert advice in " ".join(text.split())


def test_a_command_is_never_broken_into_lines(crash):
    workload = "train.py " + " ".join(f"--option-{i} {i}" for i in range(20))

    assert render_failure(crash, workload=workload).endswith(f"python {workload}\n")


def test_output_cannot_move_the_cursor(crash):
    text = render_failure(replace(crash, traceback="\x1b[2J\x07boom \u2192"))

    assert "\\x1b[2J\\x07boom \\u2192" in text


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_failure_is_told_in_the_other_language(crash, outcome):
    trial = replace(crash, outcome=outcome, message="", traceback="")

    lines = render_failure(trial, language="ko").splitlines()

    assert all(re.search("[\uac00-\ud7a3]", line) for line in lines if line)


@pytest.mark.parametrize(
    "message",
    [
        "the script made 1 training step, at least 7 are needed; let it train longer",
        "the script made 3 training steps, at least 7 are needed; let it train longer",
        "the script was ended by signal 11 (Segmentation fault)",
        "the loss was not finite at step 4",
        "no sign of training for 60 s",
    ],
)
def test_what_a_trial_says_is_told_in_the_other_language(crash, message):
    trial = replace(crash, message=message)

    headline = render_failure(trial, language="ko", width=200).splitlines()[0]

    assert re.search("[\uac00-\ud7a3]", headline)
    assert "script" not in headline
    assert "step" not in headline


def test_what_python_said_stays_as_it_was(crash):
    trial = replace(crash, outcome=Outcome.CRASH, message="ValueError: no such file")

    assert "ValueError: no such file" in render_failure(trial, language="ko", width=200)


def test_a_script_that_was_cut_short_by_the_limit_is_given_more_time(crash):
    cut = replace(
        crash,
        outcome=Outcome.HANG,
        recipe=Recipe(),
        message="the script was not done within 60 s",
        traceback="",
        wall_s=60.3,
        details={"why": "limit"},
    )

    text = render_failure(cut)

    assert text.startswith("The script was not done within 60 s.")
    assert "give it more time" in text
    assert text.endswith("next     flatout measure --limit 180 train.py\n")
    assert "see where it waits" in render_failure(replace(cut, details={"why": "hang"}))
