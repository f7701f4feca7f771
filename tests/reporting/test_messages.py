import ast
import copy
import pickle
import re
from dataclasses import replace

import pytest

from flatout import rules
from flatout.records.machine import Device, Machine
from flatout.records.messages import LANGUAGES, messages, words
from flatout.rules.runtime.sync_in_step import ADVICE
from tests.paths import ROOT
from tests.reporting.full_profile import filled
from tests.rules.journey_facts import journey
from tests.rules.memory_facts import story, sync
from tests.rules.pipeline_facts import pipeline
from tests.techniques.facts import gpu, loader, model, optimizer, profile

SOURCE = ROOT / "src/flatout/reporting"
FIELD = re.compile(r"\{(\w+)\}")
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
MODULES = sorted(
    path for path in SOURCE.parent.rglob("*.py") if "words(" in path.read_text(encoding="utf-8")
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

    differing = [
        name
        for name in NAMES
        if set(FIELD.findall(english[name])) != set(FIELD.findall(other[name]))
    ]
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


def test_a_sentence_is_its_english_text_and_is_said_in_the_other_language():
    gain = words("unit.ratio", value="2.62")
    sentence = words("headline.data", share="62 %", gain=gain)

    said = messages("ko").text(sentence)

    assert sentence == "62 % of each step waits for data; at most 2.62x if data were free."
    assert has_hangul(said)
    assert [part for part in ("62 %", "2.62") if part not in said] == []


def test_a_sentence_can_be_copied_and_pickled():
    sentence = words("note.drift", share="12 %")

    for again in (copy.deepcopy(sentence), pickle.loads(pickle.dumps(sentence))):
        assert again == sentence
        assert messages("ko").text(again) == messages("ko").text(sentence)


def test_what_is_no_sentence_of_the_catalogue_stays_as_it_is():
    assert messages("ko").text("a script's own words") == "a script's own words"


def literal_codes(path):
    """Yield the names of messages that a module writes out."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id == "words" and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield argument.value


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE.parent)))
def test_every_message_that_is_named_is_in_the_catalogue(path):
    assert set(literal_codes(path)) <= set(NAMES)


def test_a_field_that_holds_braces_is_shown_as_it_is():
    assert messages("en")("about.missing", name="{0}", why="{x!r}") == "{0}: not available: {x!r}"


@pytest.mark.parametrize("code", rules.codes())
def test_a_rule_has_its_sentences_in_the_catalogue(code):
    names = {name for name in NAMES if name.startswith(f"finding.{code}.")}

    assert {name.split(".")[2].partition("_")[0] for name in names} >= {"because"}


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
    assert [text for text in said if not has_hangul(messages("ko").text(text))] == []


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
    assert [text for text in said if not has_hangul(messages("ko").text(text))] == []
