import json

import pytest

from flatout.cli import call
from flatout.records.finding import BAD, OK, Check
from flatout.workflow import doctor


def test_this_machine_is_looked_at(folder, capsys):
    code = call(["doctor", "--json", "a.json"])

    plain = json.loads((folder / "a.json").read_text())
    statuses = {check["status"] for check in plain["checks"]}
    assert capsys.readouterr().out.startswith("A training script finds ")
    assert plain["schema"] == "flatout.doctor/1"
    assert plain["machine"]["usable_cores"] >= 1
    assert code == int("bad" in statuses)


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (BAD, 1)])
def test_something_that_must_be_mended_is_code_1(folder, monkeypatch, status, code):
    monkeypatch.setattr(doctor, "doctor", lambda _machine: (Check(status=status, what="x"),))

    assert call(["doctor"]) == code
