"""Reports in Korean: no line of prose stays English."""

import re
from dataclasses import replace

import pytest

from flatout.records.finding import BAD, OK, WARN, Check
from flatout.records.messages import FIELD, messages, words
from flatout.records.parallel import ParallelSpec
from flatout.records.plan import Accumulating
from flatout.reporting.doctor import render_doctor
from flatout.reporting.plan import plan_html, render_plan
from flatout.reporting.roofline import render_roofline, roofline_markdown, roofline_svg
from flatout.reporting.watch import render_watch
from tests.reporting import test_doctor, test_watch
from tests.reporting.made_up_roofline import FOUND
from tests.reporting.plans import plan, too_large
from tests.reporting.test_parallel_plan import plan as spread_plan
from tests.reporting.test_parallel_plan import way

ENGLISH = re.compile(r"(?<![/\w])(the|of|is|are|that|not|a|an|it|no|was|to|and|in|with|for)\b")
"""Words of every English sentence, and of none that is Korean."""
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
MARKUP = re.compile(r"<style>.*?</style>|<[^>]*>|`[^`]*`", re.DOTALL)
MADE_UP = re.compile(r"a GPU|a reason|^\W*flatout .*$", re.MULTILINE)
"""What the plans of these tests say, and commands."""


def checks():
    yield Check(status=OK, what=words("doctor.all_cores", n="2"))
    yield Check(
        status=WARN,
        what=words("doctor.swap", memory=words("doctor.memory", size="8 GiB"), size="1 GiB"),
        why=words("doctor.swap_why"),
        next=words("doctor.swap_next"),
    )
    yield Check(
        status=BAD,
        what=words("doctor.gpus_here", gpus="2 x H200", what=words("doctor.old_driver")),
        why=words("doctor.old_driver_why"),
        next=words("doctor.old_driver_next"),
    )


def reports(language):
    view, job = test_watch.VIEW, test_watch.JOB
    notes = ("between two trials", "no GPU is shown: no driver answers")
    lost = replace(test_watch.TRAINER, rank=1, loss=None, step_ms=None, memory_bytes=None)
    ranks = replace(job, state="quiet", trainers=(test_watch.TRAINER, lost))
    kept = too_large(accumulating=Accumulating(micro_batch=4, steps=2), batch=8)
    # As it is read back: a trace is made in another process.
    traced = ("samples differ in size: planned is a batch of the largest of 9 that were looked "
              "at, number 3",)  # fmt: skip
    yield "doctor", render_doctor(test_doctor.MACHINE, tuple(checks()), language=language)
    yield "watch", render_watch(replace(view, notes=notes), language=language)
    yield "ranks", render_watch(replace(view, job=ranks), language=language)
    found = replace(FOUND, notes=("the model is compiled: its products were seen as they are "
                                  "without that",))  # fmt: skip
    yield "roofline", render_roofline(found, language=language)
    yield "markdown", roofline_markdown(found, language)
    yield "svg", roofline_svg(found, language)
    spread = spread_plan(way(ParallelSpec(dp_replicate=4), why="64 samples: 10 ms computing"))
    for name, each in (("fits", plan(notes=traced)), ("large", kept), ("spread", spread)):
        yield name, render_plan(each, workload="train.py", language=language)
        yield f"{name}_html", plan_html(each, workload="train.py", language=language)


@pytest.mark.parametrize(("name", "text"), list(reports("ko")), ids=lambda each: each[:12])
def test_no_korean_report_has_an_english_sentence(name, text):
    prose = MADE_UP.sub(" ", MARKUP.sub(" ", text))

    assert [line for line in prose.splitlines() if ENGLISH.search(line)] == []


@pytest.mark.parametrize("path", ["doctor", "watch", "roofline", "way", "fit", "guard", "row"])
def test_a_table_of_messages_is_korean_throughout(path):
    texts = messages("ko").texts
    own = [text for name, text in texts.items() if name.startswith(f"{path}.")]

    assert own
    assert [text for text in own if ENGLISH.search(QUOTED.sub("", FIELD.sub("", text)))] == []
