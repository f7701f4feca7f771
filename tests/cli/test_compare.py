import json

import pytest

from flatout.cli import call


@pytest.fixture
def files(folder, stored):
    """Two profiles, the second with twice the step time."""
    plain = stored("profile_starved")
    (folder / "a.json").write_text(json.dumps(plain))
    plain["step_ms"]["median"] *= 2
    (folder / "b.json").write_text(json.dumps(plain))
    return ["a.json", "b.json"]


def test_two_results_are_shown_side_by_side(files, capsys, folder):
    code = call(["compare", "--json", "c.json", *files])

    assert code == 0
    assert capsys.readouterr().out.startswith("0.50x the baseline's speed, by step time")
    plain = json.loads((folder / "c.json").read_text())
    assert (plain["schema"], plain["ratio"]) == ("flatout.contrast/1", 0.5)


@pytest.mark.parametrize(("limit", "code"), [("0.4", 0), ("0.5", 0), ("0.51", 1), ("1", 1)])
def test_a_gate_fails_below_its_limit(files, capsys, limit, code):
    assert call(["compare", "--fail-below", limit, *files]) == code

    assert ("is below the limit" in capsys.readouterr().err) == bool(code)


def test_a_gate_stands_behind_the_files_too(files):
    assert call(["compare", *files, "--fail-below", "0.9"]) == 1


def test_a_file_that_is_no_result_is_refused(files, folder, capsys):
    (folder / "b.json").write_text("{}")

    assert call(["compare", *files]) == 2
    assert "schema None" in capsys.readouterr().err
