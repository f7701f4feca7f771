"""Every source rule by its page: the first example is found, the second is not."""

import re

import pytest

from flatout.rules import source
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
