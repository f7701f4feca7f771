import ast
import copy
import importlib
import json
import pickle
import re
from dataclasses import replace

import pytest

from flatout import rules
from flatout.records.catalogue import module_names
from flatout.records.messages import (
    FIELD,
    LANGUAGES,
    LEAST_WORDS,
    code_of,
    joined,
    messages,
    recognised,
    words,
)
from flatout.rules.runtime.sync_in_step import ADVICE
from tests.paths import ROOT
from tests.reporting import test_doctor
from tests.reporting.full_profile import filled
from tests.rules.journey_facts import journey
from tests.rules.memory_facts import story, sync
from tests.rules.pipeline_facts import pipeline
from tests.techniques.facts import gpu, loader, model, optimizer, profile

SOURCE = ROOT / "src/flatout/reporting"
NAMES = sorted(messages("en").texts)
OTHERS = [language for language in LANGUAGES if language != "en"]
LAYERS = (
    "blocks.py",
    "profile/sentences.py",
    "profile/tables.py",
    "profile/text.py",
    "profile/html.py",
    "tuning/text.py",
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


def own_words(template):
    return len(re.findall("[A-Za-z]+", FIELD.sub(" ", template)))


def known_again(name):
    """Return whether a message can be known by its words: they are enough, and no other's."""
    texts = messages("en").texts
    template = texts[name]
    is_single = [*texts.values()].count(template) == 1 and "}{" not in template
    return own_words(template) >= LEAST_WORDS and is_single and template.count(" ") > 1


def with_fields(name):
    return words(name, **{field: f"x{i}y" for i, field in enumerate(sorted(FIELDS[name]))})


FIELDS = {name: set(FIELD.findall(text)) for name, text in messages("en").texts.items()}


@pytest.mark.parametrize("name", list(filter(known_again, NAMES)))
def test_a_sentence_that_was_written_as_text_is_known_again(name):
    sentence = with_fields(name)

    again = recognised(json.loads(json.dumps(sentence)))

    assert again.code == name
    assert messages("ko").text(str(sentence)) == messages("ko").text(sentence)


def test_each_of_several_sentences_in_a_text_is_known_again():
    one = words("guard.inside", n="20", nearest=words("guard.loss_differs", **LOSS), share="0.5")
    other = words("guard.rank_records", n="1", all="2")

    noted = words("screen.checked", why=joined(other, one))
    for whole in (joined(one, other), noted):
        assert messages("ko").text(str(whole)) == messages("ko").text(whole)


LOSS = {"n": "3", "value": "0.1", "limit": "0.2"}


def test_a_note_is_told_by_its_name_whatever_it_was_read_from():
    note = words("row.not_alone", technique="bf16_autocast")

    assert code_of(note) == code_of(str(note)) == "row.not_alone"
    assert code_of("a script's own words") == code_of("bf16_autocast") == ""


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


PLAIN = ("agent", "planner/tracing")
"""What runs in the script's process: it writes plain English, in tables of their own here."""
OF_OTHER_PROCESSES = [name for name in NAMES if name.startswith(("seen.", "traced."))]


def texts_in(path):
    """Yield every text of a module, with something in place of what is filled in, and its parts."""
    for node in filter(is_text, ast.walk(ast.parse(path.read_text()))):
        text = sample_of(node)
        if isinstance(text, str):
            yield from (text, *text.split("; "))


def test_what_other_processes_say_is_in_the_catalogue_as_they_say_it():
    said = {
        code_of(text)
        for folder in PLAIN
        for path in (SOURCE.parent / folder).rglob("*.py")
        for text in texts_in(path)
    }

    assert set(OF_OTHER_PROCESSES) - said == {"traced.died"}


def noted_in_trace():
    """Yield what a trace notes for the reader, with {} for what is filled in."""
    for path in (SOURCE.parent / "planner/tracing").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "attr", "")
            name = name or getattr(getattr(node, "func", None), "id", "")
            if isinstance(node, ast.Call) and name == "note":
                yield from filter(is_text, node.args)


def is_text(node):
    return isinstance(node, ast.Constant | ast.JoinedStr)


def test_what_a_trace_notes_is_known_by_its_words():
    noted = [*map(sample_of, noted_in_trace())]

    assert noted
    assert [text for text in noted if not code_of(text)] == []


def sample_of(node):
    """Return a text with something in place of what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value
    return "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)


SPOKEN = ("tuning", "workflow", "guard", "parallel/search.py", "planner", "analysis", "hardware")
NOT_SPOKEN = {
    "check.py": "its report is in English only, as the source's rules are",
    "check_worker.py": "the same",
    "regime.py": "its evidence is for the JSON alone",
    "child.py": "runs in the traced script's process, as all of tracing does",
}
WORDS_OF_NOTES = {"notes", "note", "why", "reason", "checked", "message", "verdict"}


def modules_that_note():
    for name in SPOKEN:
        path = SOURCE.parent / name
        for module in [path] if path.suffix else sorted(path.rglob("*.py")):
            if module.name not in NOT_SPOKEN and "tracing" not in module.parts:
                yield module


def plain_texts(node):
    """Yield the texts of several words in an expression that no call takes as an argument."""
    if isinstance(node, ast.Call):
        return
    if is_text(node):
        text = sample_of(node)
        if isinstance(text, str) and len(text.split()) > 2:
            yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from plain_texts(child)


def name_of(node):
    return getattr(node, "attr", "") or getattr(node, "id", "")


def noted_texts(tree):
    """Yield what is appended to notes, or is the value of a note, a reason or a message."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Call):
            is_added = name_of(node.func) in {"append", "extend", "insert"}
            if is_added and name_of(getattr(node.func, "value", None)) in WORDS_OF_NOTES:
                found += node.args
            if name_of(node.func) == "with_note":
                found += node.args
            found += [word.value for word in node.keywords if word.arg in WORDS_OF_NOTES]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if WORDS_OF_NOTES.intersection(map(name_of, targets)):
                found.append(node.value)
        for value in found:
            yield from plain_texts(value)


@pytest.mark.parametrize(
    "path", list(modules_that_note()), ids=lambda path: str(path.relative_to(SOURCE.parent))
)
def test_a_note_is_a_sentence_of_the_catalogue(path):
    assert [*noted_texts(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize(
    "line",
    [
        'notes.append("the trial took too long")',
        'state.notes += [f"{label} was not tried alone"]',
        'row = replace(row, why=f"not tried: {label} here")',
        'note = "there was no time left"',
        'profile = passes.with_note(profile, f"there was time for {n} runs")',
    ],
)
def test_a_note_in_plain_english_is_found(line):
    assert [*noted_texts(ast.parse(line))]


@pytest.mark.parametrize("code", rules.codes())
def test_a_rule_has_its_sentences_in_the_catalogue_or_in_its_module(code):
    module = importlib.import_module(module_names(rules)[code])
    names = {name.split(".")[2] for name in NAMES if name.startswith(f"finding.{code}.")}

    assert "because" in {name.partition("_")[0] for name in names} or module.KOREAN


MACHINE = replace(test_doctor.MACHINE, cpu_name="Test CPU", cpu_features=frozenset({"amx_bf16"}))


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
