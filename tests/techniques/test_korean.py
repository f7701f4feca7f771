"""What techniques and rules say has its Korean: a new reason, or a new rule, needs it."""

import ast
import json
import re

import pytest

from flatout.records import catalogue
from flatout.records.messages import FIELD, OWN, PAIR, Sentence, messages, plain_texts, recognised
from flatout.records.recipe import Choice, Recipe
from flatout.reporting.doctor import render_techniques
from flatout.reporting.tuning.verdict import hand_changes
from tests.paths import ROOT

SOURCE = ROOT / "src/flatout"
PLUG_INS = sorted([*SOURCE.glob("techniques/**/*.py"), *SOURCE.glob("rules/**/*.py")])
SHARED = (
    *("agent/optimizer_swap.py", "data/caching.py", "data/dataset_matching.py", "data/images"),
    *("data/padding.py", "data/proof", "kernels/compiled.py", "kernels/expert_mixture.py"),
    *("kernels/module_proof.py", "kernels/region.py", "kernels/resample.py"),
    *("kernels/sdpa_pattern.py", "kernels/sdpa_rewrite.py"),
)
"""Modules whose reasons several techniques give."""
CRASHES = ("AssertionError", "IndexError", "RuntimeError", "UserError")
NO_PROSE = ("KOREAN", "SKIPPED", "WEIGHINGS", "by_hand", "source")
"""What is a table of Korean, a text that is looked for, names, code, or tested below."""
CODE = re.compile(
    r"^(flatout (tune|pack|plan) |"
    r"with open|torch\.nn\.functional|schedule=|pip install|rule x failed|x x x|x \+ )"
)
ENGLISH = re.compile(r"(?<![-/\w.])(the|of|is|are|that|not|an|it|no|was|to|and|in)\b(?![-.(=])")
"""Words of every English sentence, and of none that is Korean."""


def modules():
    for name in SHARED:
        path = SOURCE / name
        yield from [path] if path.suffix else sorted(path.rglob("*.py"))


def name_of(node):
    return getattr(node, "attr", "") or getattr(node, "id", "")


def is_for_programmers(node):
    """Return whether a part of a module says nothing to the reader of a report."""
    if isinstance(node, ast.Raise):
        return name_of(getattr(node.exc, "func", node.exc)) in CRASHES
    if isinstance(node, ast.Assign):
        return name_of(node.targets[0]) in NO_PROSE
    if isinstance(node, ast.AnnAssign):
        return name_of(node.target) in NO_PROSE
    if isinstance(node, ast.Call):
        return name_of(node.func) in {"SourceForm", "encode", "insert_after", "replaced"}
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def prose_in(node):
    """Yield the texts of several words in a part of a module, x in place of what is filled in."""
    if is_for_programmers(node):
        return
    if isinstance(node, ast.JoinedStr):
        yield "".join(x.value if isinstance(x, ast.Constant) else "x" for x in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield FIELD.sub("x", node.value)
    else:
        for name, value in ast.iter_fields(node):
            if name not in {"annotation", "returns"}:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from prose_in(child)


def untranslated(text):
    """Return the sentences of a module that are not known; what begins with a comma is a part."""
    korean = messages("ko")
    return [
        said
        for said in prose_in(ast.parse(text))
        if len(said.split()) > 2
        and re.match(r"[\w'\"`{]", said)
        and not CODE.match(said)
        and korean.text(said) == said
    ]


@pytest.mark.parametrize(
    "path", [*PLUG_INS, *modules()], ids=lambda path: str(path.relative_to(SOURCE))
)
def test_every_reason_has_its_korean(path):
    assert untranslated(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        'raise NotApplicable(f"the model has no {layer} that is red")',
        'return Effect(step_ms=1.0, why=f"{n} red layers become green")',
        'obstacles = {"it has a red step": True}',
    ],
)
def test_a_reason_without_korean_is_found(line):
    assert untranslated(line)


@pytest.mark.parametrize("path", PLUG_INS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_korean_of_a_technique_or_rule_is_read_to_the_last_line(path):
    for block in OWN.findall(path.read_text(encoding="utf-8")):
        assert PAIR.sub("", block) == ""


def test_the_korean_of_a_text_has_the_same_fields_and_no_english_word():
    for english, korean in plain_texts().items():
        assert set(FIELD.findall(korean)) == set(FIELD.findall(english))
        assert re.search("[\uac00-\ud7a3]", korean), korean
        assert ENGLISH.search(re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", "", korean)) is None, korean


def test_no_text_is_in_the_catalogue_under_a_name_as_well():
    assert set(plain_texts()) & set(messages("en").texts.values()) == set()


LAYOUT = "workers that live on would make other samples"
CHANGE = "the script changes the data set between epochs: size"


@pytest.mark.parametrize(
    ("english", "korean"),
    [
        ("sample 3 draws random numbers, and Pillow decodes no file for it", "샘플 3이(가) 난수를"),
        ("forward and backward are 60.0 % of the step: at most 2.50x", "순전파, 역전파은(는) 스텝"),
        (
            "2 regions compiled, 1 of them again, 3 CUDA graphs recorded, kept in a.pt",
            "CUDA 그래프 3개",
        ),
        (
            f"{LAYOUT} ({CHANGE}) before each epoch: they were started again as always",
            "바꿉니다: size",
        ),
        (f"{LAYOUT} ({CHANGE}): they were started again in 3 of 5 later epochs", "에폭 5개 중 3개"),
        (
            "flatout looked at 2 modules with a softmax: it was not called; its caller has hooks",
            "훅",
        ),
        (
            "batch_size, which multiplies the rate in each step, needs whole steps",
            "학습률을 곱하는",
        ),
    ],
)
def test_a_reason_of_several_parts_is_korean_in_all_of_them(english, korean):
    # As it comes back from a journal or from the script's process.
    text = json.loads(json.dumps(english))

    said = messages("ko").text(text)

    assert isinstance(recognised(text), Sentence)
    assert korean in said
    assert ENGLISH.search(said) is None
    assert messages("en").text(recognised(text)) == english


@pytest.mark.parametrize("name", catalogue.names())
def test_the_same_by_hand_is_explained_in_korean(name):
    kind = catalogue.technique_class(name)
    choice = Choice(technique=name, settings=kind().settings())

    (lines,) = hand_changes(Recipe(choices=(choice,)), "ko").values()

    prose = [line for line in lines if not line.startswith(("+ ", "- ", "  "))]
    shown = [line for line in prose if not re.fullmatch(r"(\w+=\S+ ?)+", line)]
    assert [line for line in shown if not re.search("[\uac00-\ud7a3]", line)] == []


def test_the_list_of_techniques_is_korean():
    classes = {name: catalogue.technique_class(name) for name in catalogue.names()}

    shown = render_techniques(classes, language="ko")

    assert [line for line in shown.splitlines() if ENGLISH.search(line)] == []
