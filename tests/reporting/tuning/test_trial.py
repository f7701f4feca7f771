import re
from dataclasses import replace

import pytest

from flatout.records.messages import words
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Applied, Outcome
from flatout.reporting.tuning.trial import render_failure


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
        ("KeyError: 'LOCAL_RANK'", "torch.distributed.run"),
        (
            "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
            "use_reentrant=False",
        ),
        ("EOFError: EOF when reading a line", "no one answers"),
        ("train.py: error: the following arguments are required: --data", "after its name"),
        ("train.py: error: unrecognized arguments: --x 1", "arguments that it takes"),
        ("train.py: error: argument -b/--batch: invalid int value: 'a'", "arguments that it takes"),
        ("ModuleNotFoundError: No module named 'timm'", "next to flatout"),
        ("urllib.error.URLError: <urlopen error [Errno -3] no>", "download once"),
        ("ZeroDivisionError: division by zero", "works under python alone"),
    ],
)
def test_what_the_script_misses_decides_the_advice(crash, said, advice):
    text = render_failure(replace(crash, recipe=Recipe(), message=said, traceback=""))

    assert advice in " ".join(text.split())


def test_what_a_library_warns_of_before_the_error_decides_no_advice(crash):
    said = "fast kernels: No module named 'kernels'\nTraceback (most recent call last):\nValueError"

    text = render_failure(replace(crash, recipe=Recipe(), message="ValueError", traceback=said))

    assert "works under python alone" in " ".join(text.split())


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
        words("trial.too_few", steps=words("trial.one_step"), least="7"),
        words("trial.by_signal", number="11", name="Segmentation fault"),
        words("trial.not_finite", step="4"),
        words("trial.silent", seconds="60"),
        words("trial.over_limit", seconds="90"),
    ],
)
def test_what_a_trial_says_is_said_in_the_other_language(crash, message):
    trial = replace(crash, message=message)

    headline = render_failure(trial, language="ko", width=200).splitlines()[0]

    assert re.search("[\uac00-\ud7a3]", headline)
    assert "script" not in headline
    assert "step" not in headline


def test_why_a_technique_did_nothing_is_said_in_the_other_language(crash):
    why = "the model has no convolutions"
    refused = Applied(technique="cudnn_autotune", status="not_applicable", why=why)

    shown = render_failure(replace(crash, applied=(refused,)), language="ko", width=200)

    assert "cudnn_autotune: 적용할 수 없음: 모델에 합성곱이 없습니다" in shown


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


def test_a_script_without_its_device_is_sent_to_the_doctor_and_not_to_be_mended(crash):
    said = (
        "the script asks for a CUDA device and torch finds none here (No CUDA GPUs are available)"
    )

    text = render_failure(replace(crash, recipe=Recipe(), message=said, traceback=""))

    assert "on a machine that has one" in " ".join(text.split())
    assert "works under python alone" not in " ".join(text.split())
    assert text.endswith("next     flatout doctor\n")


def test_a_script_of_several_processes_is_started_by_a_launcher_next(crash):
    said = "KeyError: 'RANK'"

    text = render_failure(replace(crash, recipe=Recipe(), message=said), workload="job.py --x")

    assert text.endswith("flatout measure -m torch.distributed.run --nproc-per-node 2 job.py --x\n")
