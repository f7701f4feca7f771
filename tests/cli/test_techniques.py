import json

from flatout import techniques
from flatout.cli import call


def test_all_levers_are_listed(folder, capsys):
    assert call(["techniques", "--json", "a.json"]) == 0

    text = capsys.readouterr().out
    listed = json.loads((folder / "a.json").read_text())["techniques"]
    assert [item["technique"] for item in listed] == list(techniques.names())
    assert [name for name in techniques.names() if name not in text] == []
