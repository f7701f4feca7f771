import json

from flatout.cli import call


def test_json_asks_for_a_single_view(capsys):
    assert call(["watch", "--json", "view.json"]) == 2
    assert "add --once" in capsys.readouterr().err


def test_a_folder_that_is_none_of_a_job_is_refused_with_what_to_do(folder, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    assert call(["watch", "nowhere", "--once"]) == 2
    assert "'flatout watch' without a folder finds the newest one" in capsys.readouterr().err


def test_a_view_goes_to_a_file_beside_the_text(folder, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    code = call(["watch", "--once", "--json", "view.json"])

    assert code == 0
    assert "no flatout job is running" in capsys.readouterr().out
    assert json.loads((folder / "view.json").read_text())["schema"] == "flatout.watch/1"
