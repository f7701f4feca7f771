import json

from flatout.cli import call
from flatout.records import catalogue


def test_all_techniques_are_listed(folder, capsys):
    assert call(["techniques", "--json", "a.json"]) == 0

    text = capsys.readouterr().out
    listed = json.loads((folder / "a.json").read_text())["techniques"]
    assert [item["technique"] for item in listed] == list(catalogue.names())
    assert [name for name in catalogue.names() if name not in text] == []
