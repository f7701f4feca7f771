"""What the tests of source rules ask: which codes, on which lines, and the text after the fix."""

from collections import defaultdict

from flatout.rules import source

BACKGROUND = frozenset({"AMP01", "AMP02"})
"""Codes that most short trainings on a GPU get; a test names them where it means them."""


def all_codes_in(text):
    """Return the lines of each code that is found in a script."""
    found, failed = source.check_text(text)
    assert failed == []
    lines = defaultdict(list)
    for finding in found:
        lines[finding.code].append(finding.line)
    return dict(lines)


def codes_in(text):
    """Return the lines of each code, but for what most short trainings get."""
    return {code: lines for code, lines in all_codes_in(text).items() if code not in BACKGROUND}


def fixed(text, code, *, suggested=True):
    """Return a script after the fixes of one code."""
    return source.fixed_text(text, {code}, suggested=suggested)[0]
