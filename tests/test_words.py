"""Plain English, and torch's own terms: words that a native engineer would not use here."""

import io
import re
import tokenize

import pytest

from tests.paths import ROOT

REFUSED = {
    "Tell whether": "Return whether",
    "Tells whether": "Whether",
    "anew": "again",
    "beside": "next to, alongside, besides",
    "by itself": "alone, on its own",
    "lever": "technique",
    "levers": "techniques",
    "mend": "fix",
    "mended": "fixed",
    "mends": "fixes",
    "need not be there": "does not exist here",
    "nobody": "no one, no code, nothing",
    "of yours": "your",
    "seam": "hook point",
    "seams": "hook points",
    "somebody": "someone, other code",
}
"""What is refused in comments and docstrings of the source and on the pages, and what to write."""
REFUSED_IN_NAMES = re.compile(r"(^|_)(lever|seam)s?(_|$)", re.IGNORECASE)
"""What no identifier says, in source or tests. `levers` is the name of a benchmark's records."""
PATTERN = re.compile(rf"\b({'|'.join(REFUSED)})\b", re.IGNORECASE)
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
TESTS = sorted(p for p in (ROOT / "tests").rglob("*.py") if p.parent.name != "benchmarks")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
HISTORY = "CHANGELOG.md"
"""Tells of versions in the words of their time."""


def prose_of(path):
    """Return the comments and docstrings of a module."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            yield token.start[0], token.string


def code_of(path):
    """Return a module's text; without comments and strings only where it has a refused word."""
    text = path.read_text()
    if not re.search("lever|seam", text, re.IGNORECASE):
        return ""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(token.string for token in tokens if token.type == tokenize.NAME)


def refused(text):
    return sorted({word.lower() for word in PATTERN.findall(text)})


def relative(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_comments_and_docstrings_use_plain_words(path):
    found = {line: words for line, text in prose_of(path) if (words := refused(text))}

    assert found == {}


@pytest.mark.parametrize("folder", [SOURCES, TESTS], ids=["source", "tests"])
def test_names_use_plain_words(folder):
    names = {
        (relative(path), name)
        for path in folder
        for name in {path.stem, *re.findall(r"\b[^\W\d]\w*", code_of(path))}
        if REFUSED_IN_NAMES.search(name)
    }

    assert names == set()


@pytest.mark.parametrize("name", ["en", "plain_ko"])
def test_messages_use_plain_words(name):
    """Korean for plain texts is found by the English one: together they are all that is said."""
    text = (ROOT / f"src/flatout/records/messages/{name}.toml").read_text(encoding="utf-8")
    said = re.sub(r"\{\w+\}|^\w+ =", "", text, flags=re.MULTILINE)

    assert refused(said) == []


@pytest.mark.parametrize("path", [p for p in PAGES if p.name != HISTORY], ids=relative)
def test_pages_use_plain_words(path):
    # Names in code, paths and anchors are what they are.
    prose = re.sub(
        r"`[^`]*`|\]\([^)]*\)", "", re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    )

    assert refused(prose) == []
