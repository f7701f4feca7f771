import pytest

from flatout.cli import call
from flatout.records.recipe import Choice, Recipe
from flatout.workflow.recipe_files import write_recipe


def test_the_script_trains_to_its_end_and_saves(folder, capfd):
    write_recipe(Recipe(), folder / "recipe.toml")

    code = call(["run", "--with", "recipe.toml", "train.py", "--with", "mine"])

    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "arguments ['--with', 'mine']" in captured.out
    assert (folder / "saved.txt").read_text() == "done"


def test_the_script_s_exit_code_is_flatout_s(folder, capfd):
    write_recipe(Recipe(), folder / "recipe.toml")
    (folder / "exits.py").write_text("raise SystemExit(7)\n")

    assert call(["run", "--with", "recipe.toml", "exits.py"]) == 7
    assert capfd.readouterr().err == ""


def test_an_unknown_technique_in_a_recipe_names_the_nearest(folder, capfd):
    write_recipe(Recipe(), folder / "recipe.toml")
    with (folder / "recipe.toml").open("a") as stream:
        stream.write('[[technique]]\nname = "loader_wrkers"\n')
    text = (folder / "recipe.toml").read_text().replace("technique = []\n", "")
    (folder / "recipe.toml").write_text(text)

    assert call(["run", "--with", "recipe.toml", "train.py"]) == 2
    assert "did you mean 'loader_workers'?" in capfd.readouterr().err


@pytest.mark.slow
def test_a_training_says_in_korean_what_was_not_applied(folder, capfd):
    write_recipe(Recipe(choices=(Choice(technique="tf32"),)), folder / "recipe.toml")

    assert call(["run", "--lang", "ko", "--with", "recipe.toml", "train.py"]) == 0

    said = capfd.readouterr().err
    assert "flatout: tf32: 적용하지 않았습니다(" in said
    assert "was not applied" not in said


@pytest.mark.slow
def test_a_recipe_for_a_script_that_never_trains_is_said(folder, capfd):
    write_recipe(Recipe(choices=(Choice(technique="tf32"),)), folder / "recipe.toml")
    (folder / "prepare.py").write_text("import torch\nprint(torch.ones(2).sum())\n")
    (folder / "leaves.py").write_text(
        (folder / "train.py").read_text() + "import os\nos._exit(0)\n"
    )

    said = {}
    for name in ("prepare.py", "train.py", "leaves.py"):
        assert call(["run", "--with", "recipe.toml", name]) == 0
        said[name] = "no training step was seen" in capfd.readouterr().err

    assert said == {"prepare.py": True, "train.py": False, "leaves.py": False}
