import json
from xml.etree import ElementTree

import pytest

from flatout.cli import call
from flatout.workflow import roofline as verb
from tests.reporting.made_up_roofline import FOUND


@pytest.fixture
def given(monkeypatch):
    """Return what the verb was called with; the measuring itself is tested with the workflow."""
    seen = []

    def roofline(workload, **options):
        seen.append((workload, options))
        return FOUND

    monkeypatch.setattr(verb, "roofline", roofline)
    return seen


def test_a_script_and_its_own_options_reach_the_verb(folder, capsys, given):
    code = call(["roofline", "--limit", "90s", "train.py", "--json", "mine"])

    ((workload, options),) = given
    assert code == 0
    assert workload.command_line == "train.py --json mine"
    assert options["limit_s"] == 90.0
    assert capsys.readouterr().out.startswith("Matrix products are 90 % of the step")


def test_without_a_script_it_is_about_the_device(folder, given):
    assert call(["roofline"]) == 0
    assert given[0][0] is None


def test_every_document_is_written(folder, given):
    names = ["--json", "a.json", "--svg", "a.svg", "--markdown", "a.md"]

    assert call(["roofline", *names, "train.py"]) == 0

    assert json.loads((folder / "a.json").read_text())["schema"] == "flatout.roofline/1"
    ElementTree.parse(folder / "a.svg")
    assert "fwd" in (folder / "a.md").read_text()


def test_a_script_that_is_missing_is_refused(folder, capsys):
    assert call(["roofline", "trian.py"]) == 2
    assert "trian.py" in capsys.readouterr().err
