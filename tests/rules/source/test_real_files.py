"""Rules and fixes on files that no one wrote for them: those of installed packages."""

import functools
import io
import site
import tokenize
from pathlib import Path

import pytest

from flatout.rules import source
from flatout.workflow.check_worker import MAX_BYTES, decode

PACKAGES = ("accelerate", "albumentations", "lightning", "peft", "torch", "transformers")
EVERY = 151
"""One of so many files; all of them in the slow test."""


@functools.cache
def files():
    """Return the Python files of installed packages that mention torch, in a fixed order."""
    found = []
    for place in [*site.getsitepackages(), Path(pytest.__file__).parent.parent]:
        for package in PACKAGES:
            for path in sorted(Path(place, package).rglob("*.py")):
                data = path.read_bytes()
                if b"import torch" in data and len(data) < MAX_BYTES:
                    found.append(data)
    return found


def comments(text):
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def check(data):
    text, encoding = decode(data)
    findings, failed = source.check_text(text)
    assert failed == []
    assert text.encode(encoding) == data
    if not any(finding.fix for finding in findings):
        return 0
    codes = set(source.codes())
    fixed, made = source.fixed_text(text, codes, suggested=True)
    compile(fixed, "fixed", "exec", dont_inherit=True)
    assert source.fixed_text(fixed, codes, suggested=True) == (fixed, 0)
    assert comments(fixed) == comments(text)
    return made


def test_rules_and_fixes_hold_on_a_sample_of_installed_files():
    for data in files()[::EVERY]:
        check(data)


@pytest.mark.slow
def test_rules_and_fixes_hold_on_every_installed_file_that_imports_torch():
    assert len(files()) > 1000

    assert sum(check(data) for data in files()) > 20
