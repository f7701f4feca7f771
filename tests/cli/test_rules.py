import pytest

from flatout import rules
from flatout.cli import call
from flatout.rules import source
from tests.paths import ROOT


def test_every_rule_is_listed_with_its_sentence(capsys):
    assert call(["rules"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*sorted(source.modules()), *rules.codes()]
    assert all(line.endswith(".") for line in lines)


@pytest.mark.parametrize("name", ["DL02", "dl02", "dl02_no_workers"])
def test_the_page_of_a_rule_is_printed(name, capsys):
    assert call(["rules", name]) == 0

    assert capsys.readouterr().out == (ROOT / "docs/rules/dl02_no_workers.md").read_text()


def test_the_page_of_a_technique_is_printed(capsys):
    assert call(["techniques", "pinned_memory"]) == 0

    assert capsys.readouterr().out.startswith("# pinned_memory\n")


@pytest.mark.parametrize(("command", "given"), [("rules", "DL99"), ("techniques", "pined_memory")])
def test_an_unknown_name_is_refused(command, given, capsys):
    assert call([command, given]) == 2

    assert f"'{given}'" in capsys.readouterr().err
