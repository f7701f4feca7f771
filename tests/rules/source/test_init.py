"""Every source rule by its page, and all of them on files that no one wrote for them."""

import functools
import io
import re
import site
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.analysis.source.edits import safe
from flatout.analysis.source.script import NotAnalysableError
from flatout.records.finding import Edit
from flatout.rules import source
from flatout.workflow.check_worker import MAX_BYTES, decode
from tests.paths import ROOT
from tests.rules.source.scenario import all_codes_in

RULES = sorted(source.modules())
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def page(rule):
    return (ROOT / f"docs/rules/{rule}.md").read_text()


def test_no_code_has_two_meanings():
    codes = source.codes()

    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("rule", RULES)
def test_the_first_example_of_a_page_is_found_and_the_second_is_not(rule):
    wrong, right = EXAMPLE.findall(page(rule))

    assert source.code_of(rule) in all_codes_in(wrong)
    assert source.code_of(rule) not in all_codes_in(right)


@pytest.mark.parametrize("rule", RULES)
def test_the_fix_of_the_example_parses_changes_nothing_twice_and_leaves_no_finding(rule):
    wrong, _right = EXAMPLE.findall(page(rule))
    code = source.code_of(rule)
    wrong = f"# a comment\n{wrong}# the last line\n"

    text, made = source.fixed_text(wrong, {code}, suggested=True)

    compile(text, rule, "exec")
    assert source.fixed_text(text, {code}, suggested=True) == (text, 0)
    assert "# a comment" in text
    assert text.endswith("# the last line\n")
    assert not made or code not in all_codes_in(text)


def test_of_two_fixes_the_one_that_breaks_the_script_is_left_out(monkeypatch):
    def found(text):
        torn, right = Edit(start=0, end=1, text="("), Edit(start=4, end=5, text="3")
        findings = [SimpleNamespace(code="X", fix=safe(each)) for each in (torn, right)]
        return (findings if text == "a = 2\n" else [], None)

    monkeypatch.setattr(source, "check_text", found)

    assert source.fixed_text("a = 2\n", {"X"}, suggested=False) == ("a = 3\n", 1)


@pytest.mark.parametrize("rule", RULES)
def test_a_page_says_what_it_speaks_about_and_what_to_do(rule):
    text = page(rule)

    assert text.startswith(f"# {rule}\n\n{source.code_of(rule)}: ")
    assert all(word in text for word in ("**Speaks when**", "**What to do**", "**The fix**"))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("rule", RULES)
def test_tabs_and_windows_line_ends_stay_as_they_are(rule, newline):
    wrong, _right = EXAMPLE.findall(page(rule))
    text = wrong.replace("    ", "\t").replace("\n", newline)

    fixed, _made = source.fixed_text(text, {source.code_of(rule)}, suggested=True)

    assert (newline == "\r\n") == ("\r\n" in fixed)
    assert "\n" not in fixed.replace(newline, "")
    compile(fixed, rule, "exec")


def test_there_are_more_than_forty_rules():
    assert len(RULES) > 40


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
    try:
        findings, failed = source.check_text(text)
    except NotAnalysableError:
        with pytest.raises(SyntaxError):  # torch ships files for newer versions of Python
            compile(text, "refused", "exec", dont_inherit=True)
        return 0
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


@pytest.mark.parametrize("claim", ["assert x is not None", "self.assertTrue(x.is_cuda)"])
def test_what_is_in_a_test_of_a_library_is_left_alone(claim):
    text = f"import torch\ndef test_it(self):\n    x = torch.zeros(64, 64).cuda()\n    {claim}\n"

    assert all_codes_in(text) == {}
    assert "SYN10" in all_codes_in(text.replace("test_it", "make_it"))
    assert "SYN10" in all_codes_in(text.replace(claim, "return x"))


def test_a_setting_of_torch_in_a_function_hides_nothing_of_torch():
    text = "import torch\ndef main():\n    x = torch.zeros(64, 64).cuda()\n    {}\n"

    for line in ("torch.backends.cudnn.benchmark = True", "x[0] = 1"):
        assert "SYN10" in all_codes_in(text.format(line))
    assert all_codes_in(text.format("torch = mine")) == {}
