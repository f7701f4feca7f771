import errno
import json

import click
import pytest

from flatout.cli import call, tuning_output
from flatout.records.ablation import ablation_from_json
from flatout.records.live import Progress
from flatout.records.technique import Numerics
from flatout.workflow.recipe_files import read_recipe

FILES = {"ablation.json", "ladder.html", "ladder.svg", "recipe.toml", "report.md"}


@pytest.fixture
def asked(monkeypatch, stored):
    """Let tune answer at once with a stored ablation; tells what it was asked."""
    calls = []

    def answer(workload, options, tell):
        calls.append((workload, options))
        at = {"done_share": 0.1, "elapsed_s": 61.0, "left_s": 539.0}
        tell(Progress(trying="bf16_autocast", **at))
        tell(Progress(trying="", event="bf16_autocast: kept 1.19x", **at))
        return ablation_from_json(stored(calls[0][0].arguments[0]))

    monkeypatch.setattr(tuning_output, "tune", answer)
    return calls


def test_options_before_the_script_reach_the_tuner_and_no_others(folder, asked):
    words = "--budget 1m --numerics exact --out o --only tf32 --skip cpu_threads,torch_compile"

    code = call(
        ["tune", *words.split(), "train.py", "ablation_tuned", "--budget", "3", "--", "--x"]
    )

    ((workload, options),) = asked
    assert code == 0
    assert workload.arguments == ("ablation_tuned", "--budget", "3", "--", "--x")
    assert options.budget_s == 60.0
    assert options.numerics is Numerics.EXACT
    assert (options.only, options.skip) == (("tf32",), ("cpu_threads", "torch_compile"))
    assert str(options.out) == "o"
    assert not options.resume


@pytest.mark.parametrize("skip", ["tf32", "cpu_threads,tf32"])
def test_to_try_only_what_is_skipped_is_refused_before_tuning(asked, capsys, skip):
    assert call(["tune", "--only", "tf32", "--skip", skip, "train.py", "ablation_tuned"]) == 2

    assert asked == []
    assert capsys.readouterr().err == (
        "flatout: nothing is left to try: --only tf32 is skipped as well; "
        "name a technique in one of the two\n"
    )


def test_table_and_files_are_the_result(folder, asked, capsys, stored):
    code = call(["tune", "--json", "more/a.json", "train.py", "ablation_tuned"])

    assert code == 0
    assert {path.name for path in (folder / "flatout-out").iterdir()} == FILES
    assert capsys.readouterr().out.startswith("2.10x faster")
    plain = json.loads((folder / "more/a.json").read_text())
    assert plain == json.loads((folder / "flatout-out/ablation.json").read_text())
    assert ablation_from_json(plain) == ablation_from_json(stored("ablation_tuned"))


def test_the_recipe_that_was_written_is_the_one_that_was_found(folder, asked):
    call(["tune", "train.py", "ablation_tuned"])

    recipe = read_recipe(folder / "flatout-out/recipe.toml")
    assert recipe.names == ("loader_workers", "bf16_autocast", "regional_compile")


def test_an_older_recipe_does_not_outlive_a_tuning_that_found_nothing(folder, asked):
    (folder / "flatout-out").mkdir()
    (folder / "flatout-out/recipe.toml").write_text("old")

    call(["tune", "train.py", "ablation_leave"])

    assert read_recipe(folder / "flatout-out/recipe.toml").choices == ()


def test_events_are_plain_lines_where_there_is_no_terminal(folder, asked, capsys):
    call(["tune", "train.py", "ablation_tuned"])

    assert capsys.readouterr().err == "[1 min 1 s of 10 min 0 s] bf16_autocast: kept 1.19x\n"


@pytest.mark.chaos
def test_an_interrupted_tuning_shows_its_table_and_is_code_130(folder, asked, capsys, monkeypatch):
    unfinished = tuning_output.tune

    def interrupted(*arguments):
        plain = unfinished(*arguments).to_json() | {"stopped": "interrupted"}
        return ablation_from_json(plain)

    monkeypatch.setattr(tuning_output, "tune", interrupted)

    assert call(["tune", "train.py", "ablation_leave"]) == 130
    assert "it ended because it was interrupted" in capsys.readouterr().out
    assert (folder / "flatout-out/ablation.json").exists()


@pytest.mark.chaos
def test_what_was_found_is_written_where_no_one_reads_the_table(folder, asked, monkeypatch):
    def is_closed(*_, **__):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(click, "echo", is_closed)

    with pytest.raises(SystemExit):
        call(["tune", "--quiet", "train.py", "ablation_tuned"])

    assert {path.name for path in (folder / "flatout-out").iterdir()} >= FILES


def test_an_out_folder_that_cannot_be_written_is_told_before_tuning(folder, asked, capsys):
    (folder / "file").touch()

    assert call(["tune", "--out", "file/out", "train.py", "ablation_tuned"]) == 2
    assert asked == []
    assert "name a folder that can be written" in capsys.readouterr().err


@pytest.mark.chaos
def test_a_folder_in_the_json_s_place_is_told_before_tuning(folder, asked, capsys):
    assert call(["tune", "--json", ".", "train.py", "ablation_tuned"]) == 2
    assert asked == []
    assert ". is a folder; name a file" in capsys.readouterr().err


def test_json_on_standard_output_is_all_that_is_there(folder, asked, capsys):
    assert call(["tune", "--json", "-", "--quiet", "train.py", "ablation_leave"]) == 0

    captured = capsys.readouterr()
    assert ablation_from_json(json.loads(captured.out)).workload
    assert captured.err == ""


@pytest.mark.chaos
def test_a_script_that_fails_is_code_2_with_its_own_traceback(folder, capfd):
    before = sorted(folder.iterdir())
    code = call(["tune", "--budget", "30s", "--out", "results/out", "crash.py"])

    captured = capfd.readouterr()
    assert code == 2
    assert 'crash.py", line 2' in captured.err
    assert "flatout/" not in captured.err
    assert captured.out == ""
    assert sorted(folder.iterdir()) == before
