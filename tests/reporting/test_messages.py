import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flatout import rules
from flatout.records.machine import Device, Machine
from flatout.reporting import messages as catalogue
from flatout.reporting.messages import FIELD, LANGUAGES, fields_of, messages
from flatout.rules.runtime.sync_in_step import ADVICE
from flatout.tuning import passes
from tests.reporting.full_profile import filled
from tests.rules.journey_facts import journey
from tests.rules.memory_facts import story, sync
from tests.rules.pipeline_facts import pipeline
from tests.techniques.facts import gpu, loader, model, optimizer, profile

SOURCE = Path(catalogue.__file__).parent.parent
TOLD_IN_ENGLISH = "the step times had not become steady when the measurement ended"
NAMES = sorted(messages("en").texts)
OTHERS = [language for language in LANGUAGES if language != "en"]
LAYERS = (
    "blocks.py",
    "profile/sentences.py",
    "profile/tables.py",
    "profile/text.py",
    "profile/html.py",
    "tuning/markdown.py",
    "tuning/speedup_chart.py",
    "tuning/verdict.py",
)
USERS = [SOURCE / name for name in LAYERS]


GROUPED = optimizer(has_fused_option=False, has_foreach_option=True)


def has_hangul(text):
    return any("\uac00" <= letter <= "\ud7a3" for letter in text)


def is_sentence(node):
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip()
    )


def strings_outside_docstrings(path):
    tree = ast.parse(path.read_text())
    told = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value for node in ast.walk(tree) if is_sentence(node) and id(node) not in told
    ]  # fmt: skip


@pytest.mark.parametrize("language", OTHERS)
def test_every_language_has_every_message(language):
    assert sorted(messages(language).texts) == NAMES


@pytest.mark.parametrize("language", OTHERS)
def test_every_message_has_the_same_fields_in_every_language(language):
    english, other = messages("en").texts, messages(language).texts

    differing = [name for name in NAMES if fields_of(english[name]) != fields_of(other[name])]
    assert differing == []


def test_english_is_plain_ascii():
    assert [text for text in messages("en").texts.values() if not text.isascii()] == []


def test_korean_leaves_no_english_words():
    english, korean = messages("en").texts, messages("ko").texts

    same = [FIELD.sub("", english[name]) for name in NAMES if english[name] == korean[name]]
    assert [text for text in same if re.search(r"\b[a-z]{3}", text)] == []


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.name)
def test_no_sentence_of_a_report_stands_outside_the_catalogue(path):
    found = [text for text in strings_outside_docstrings(path) if not text.startswith("flatout ")]

    assert [text for text in found if len(text.split()) > 2] == []


def test_a_note_from_elsewhere_is_said_in_the_other_language():
    assert has_hangul(messages("ko").translated(TOLD_IN_ENGLISH))
    assert messages("en").translated(TOLD_IN_ENGLISH) == TOLD_IN_ENGLISH


def test_numbers_and_names_in_a_sentence_from_elsewhere_are_kept():
    told = messages("ko").translated(
        "the step waits 131 ms of 212 ms for its batch (62 %, n=30) with 0 loader workers; "
        "with data for free it would be 2.62x as fast"
    )

    assert has_hangul(told)
    assert [part for part in ("131 ms", "212 ms", "62 %", "n=30", "2.62") if part not in told] == []


def test_what_nobody_translated_stays_as_it_is():
    assert messages("ko").translated("a sentence of somebody's") == "a sentence of somebody's"


def test_a_field_that_holds_braces_is_shown_as_it_is():
    assert messages("en")("about.missing", name="{0}", why="{x!r}") == "{0}: not available: {x!r}"


@pytest.mark.parametrize("code", rules.codes())
def test_the_sentences_of_a_rule_are_recognised(code):
    names = {name for name in NAMES if name.startswith(f"finding.{code}.")}

    assert {name.split(".")[2].partition("_")[0] for name in names} >= {"because"}


def test_what_is_measured_is_told_in_the_other_language():
    said = messages("ko").translated

    assert has_hangul(said("the steps as they are"))
    assert all(has_hangul(said(f"no time was left for the {name} pass")) for name in passes.NAMES)


MACHINE = Machine(
    device=Device(kind="cpu", name="Test CPU", memory_bytes=8 * 1024**3),
    cpu_name="Test CPU",
    logical_cores=4,
    usable_cores=2,
    physical_cores=2,
    memory_bytes=8 * 1024**3,
    shm_free_bytes=64 * 1024**2,
    cpu_features=frozenset({"amx_bf16"}),
)


@pytest.mark.parametrize("workers", [0, 1, 9])
@pytest.mark.parametrize("is_fused", [False, True])
def test_what_the_rules_say_is_said_in_the_other_language(starved, workers, is_fused):
    loader = replace(starved.loaders[0], num_workers=workers)
    optimizer = replace(starved.optimizers[0], is_fused=is_fused)
    everywhere = replace(
        filled(starved),
        device_kind="cpu",
        phases_ms=dict.fromkeys(starved.phases_ms, 30.0),
        loaders=(loader,),
        optimizers=(optimizer,),
    )

    found = rules.add_findings(everywhere, MACHINE).findings

    said = [text for finding in found for text in (finding.because, finding.next)]
    assert {finding.code for finding in found} >= {
        *("data_wait", "other_python", "slow_optimizer", "fp32_on_fast_bf16", "sync_in_step"),
    }
    assert [text for text in said if not has_hangul(messages("ko").translated(text))] == []


OTHER = profile(phases_ms={"other": 100.0})
SAID_SELDOM = (
    *(profile(syncs=(sync(what=what),)) for what in ADVICE),
    OTHER,
    replace(OTHER, loaders=(loader(),)),
    replace(OTHER, models=(model(),)),
    replace(OTHER, models=(model(),), loaders=(loader(),), journey=journey()),
    replace(OTHER, eval_ms=60.0),
    profile(phases_ms={"data_wait": 100.0}, pipeline=pipeline(), loaders=(loader(),)),
    profile(phases_ms={"optimizer": 100.0}, optimizers=(GROUPED,)),
    profile(phases_ms={"optimizer": 100.0}, optimizers=(replace(GROUPED, is_foreach=False),)),
    profile(memory=story(reserved_bytes=7 * 1024**3, fragmentation_share=0.5)),
    profile(
        models=(
            model(attention_backend="math", attention_why="odd", experts=8, expert_parameters=800),
        )
    ),
)


@pytest.mark.parametrize("facts", SAID_SELDOM)
def test_what_a_rule_says_in_one_case_only_is_said_in_the_other_language(facts):
    host = replace(MACHINE, devices=(gpu(),))

    found = rules.add_findings(facts, host).findings

    said = [text for finding in found for text in (finding.because, finding.next)]
    assert said
    assert [text for text in said if not has_hangul(messages("ko").translated(text))] == []


def test_a_rule_that_failed_is_told_in_the_other_language():
    assert has_hangul(messages("ko").translated("rule data_wait failed: KeyError: 'step'"))
