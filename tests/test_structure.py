"""The layout is a promise.

One technique, one rule, one file, one test, one page; imports flow down.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

import flatout.rules
import flatout.rules.source
import flatout.techniques
from flatout.records.catalogue import module_names
from flatout.records.messages import OWN
from tests.paths import ROOT
from tests.support.programs import ran

SOURCE = ROOT / "src/flatout"
MAX_LINES = 800
MAX_PUBLIC_METHODS = 12
MAX_FILE_BYTES = 500_000
BANNED_WORDS = {"util", "utils", "helper", "helpers", "manager", "handler", "misc", "common"}
CROWDED_ON_PURPOSE = {
    "Script": "what fifty source rules ask of a parsed file, one question a method",
    "Session": "the one record of the training process: each hook point needs its part of it",
    "Technique": "one method for each hook point; a technique overrides the few that it needs",
}
FOLDERS_BESIDE_SOURCE = {"benchmarks", "compat", "examples", "scenarios", "support"}
"""Test folders without a package: of the folders at the top, and of other people's scripts."""

TECHNIQUES = module_names(flatout.techniques)
RULES = {
    **{
        name: module
        for name, module in module_names(flatout.rules).items()
        if module.startswith(flatout.rules.FAMILIES)
    },
    **module_names(flatout.rules.source),
}
SOURCES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


TERMS_OF_OTHERS = {
    "adafactor": "the name of an optimizer in transformers",
    "attention_backend": "a field of the profile",
    "batch_size": "an argument of DataLoader",
    "data_parallel": "a function of torch.nn.parallel",
    "expandable_segments": "a key of PYTORCH_ALLOC_CONF",
    "persistent_workers": "an argument of DataLoader",
    "tf32": "a number format",
}
"""Names of techniques that mean something else, too, and what they mean outside of theirs."""
NAMING_TECHNIQUES = {
    "techniques": "their own place",
    "rules": "a rule names what fixes its finding",
}
"""Folders whose files may name techniques, and why."""


PLACES = {"techniques": "*", "rules": "*/**"}
"""Where the tests of a kind are: those of source rules one folder deeper, by topic."""


def relative(path):
    return str(path.relative_to(ROOT))


def family(module):
    return module.split(".")[-2]


def stems(folder, pattern, prefix=""):
    return {path.stem.removeprefix(prefix) for path in (ROOT / folder).rglob(pattern)}


def classes(path):
    return [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]


@pytest.mark.parametrize(("name", "module"), TECHNIQUES.items())
def test_each_technique_has_its_test_and_its_page(name, module):
    expected = (
        ROOT / f"tests/techniques/{family(module)}/test_{name}.py",
        ROOT / f"docs/techniques/{family(module)}/{name}.md",
    )

    assert [relative(path) for path in expected if not path.is_file()] == []


@pytest.mark.parametrize(("code", "module"), RULES.items())
def test_each_rule_has_its_test_and_its_page(code, module):
    expected = (
        ROOT.joinpath("tests", *module.split(".")[1:-1], f"test_{code}.py"),
        ROOT / f"docs/rules/{code}.md",
    )

    assert [relative(path) for path in expected if not path.is_file()] == []


@pytest.mark.parametrize(("kind", "names"), [("techniques", TECHNIQUES), ("rules", RULES)])
def test_no_test_or_page_outlives_its_file(kind, names):
    tests = {
        path.stem.removeprefix("test_")
        for path in (ROOT / "tests" / kind).glob(f"{PLACES[kind]}/test_*.py")
        if path.stem != "test_init"
    }
    pages = {path.stem for path in (ROOT / "docs" / kind).rglob("*.md")} - {"README"}

    assert tests - set(names) == set()
    assert pages - set(names) == set()


@pytest.mark.parametrize("path", TESTS, ids=relative)
def test_each_test_lies_where_its_source_lies(path):
    folder = path.parent.relative_to(ROOT / "tests")

    mirrored = (SOURCE / folder).is_dir()
    assert mirrored or folder.parts[0] in FOLDERS_BESIDE_SOURCE


def test_a_technique_is_named_in_its_own_place_only():
    named = {
        f"{relative(path)}:{node.lineno}": sorted(names)
        for path in SOURCES
        if path.relative_to(SOURCE).parts[0] not in NAMING_TECHNIQUES
        for node, words in texts_and_imports(path)
        if (names := words & (set(TECHNIQUES) - set(TERMS_OF_OTHERS)))
    }

    assert named == {}, "let the technique declare it, and ask flatout.records.catalogue"


def test_no_exception_outlives_its_reason():
    used = {
        word
        for path in SOURCES
        if path.relative_to(SOURCE).parts[0] not in NAMING_TECHNIQUES
        for _, words in texts_and_imports(path)
        for word in words
    }

    assert set(TERMS_OF_OTHERS) <= set(TECHNIQUES) & used


def texts_and_imports(path):
    """Yield each text but docstrings, and each import, with the words in it."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node, set(re.findall(r"\w+", node.value))
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", "") or "", *(each.name for each in node.names)]
            yield node, set(re.findall(r"\w+", " ".join(modules)))


def test_no_file_is_too_long():
    long = {
        relative(path): lines
        for path in [*SOURCES, *TESTS]
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }

    assert long == {}


def test_no_class_has_too_many_public_methods():
    crowded = {
        f"{relative(path)}: {node.name}": count
        for path in SOURCES
        for node in classes(path)
        if node.name not in CROWDED_ON_PURPOSE
        and (count := sum(is_public_method(item) for item in node.body)) > MAX_PUBLIC_METHODS
    }

    assert crowded == {}


def is_public_method(node):
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"


def test_inheritance_is_one_level_deep():
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in SOURCES
        for node in classes(path)
    }

    deep = {
        name: parent
        for name, parents in bases.items()
        for parent in parents
        if bases.get(parent, set()) & set(bases)
    }
    assert deep == {}


def test_no_name_says_nothing():
    words = {
        relative(path): words & BANNED_WORDS
        for path in [*SOURCES, *TESTS]
        if (words := set(path.stem.lower().split("_"))) & BANNED_WORDS
    }

    assert words == {}


def test_source_is_ascii_but_for_what_a_technique_says_in_korean():
    texts = {path: OWN.sub("", path.read_text(encoding="utf-8")) for path in SOURCES}

    strange = [relative(path) for path, text in texts.items() if not text.isascii()]

    assert strange == []


def test_no_file_is_too_big_to_review():
    tracked = ran(["git", "ls-files", "-z"], cwd=ROOT, check=True).stdout.split("\0")

    big = {
        name: size
        for name in filter(None, tracked)
        if (ROOT / name).is_file() and (size := (ROOT / name).stat().st_size) > MAX_FILE_BYTES
    }
    assert big == {}


def test_imports_flow_down_only():
    done = ran([Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT)

    assert done.returncode == 0, done.stdout


def test_every_layer_of_the_design_is_a_package_in_the_contract():
    contract = (ROOT / "pyproject.toml").read_text()

    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert [name for name in sorted(packages) if f"flatout.{name}" not in contract] == []
