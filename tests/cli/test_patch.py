from flatout.cli import call

RECIPE = '[flatout]\nversion = 1\n\n[[technique]]\nname = "{name}"\n'
SCRIPT = """\
import torch
for x in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def test_the_diff_is_printed_and_nothing_is_written(folder, capsys):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "recipe.toml").write_text(recipe("tf32"))

    assert call(["patch", "recipe.toml", "train.py"]) == 0

    shown = capsys.readouterr()
    assert '+torch.set_float32_matmul_precision("high")' in shown.out
    assert shown.err == ""
    assert (folder / "train.py").read_text() == SCRIPT


def test_what_has_no_place_is_named(folder, capsys):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "recipe.toml").write_text(recipe("fused_optimizer"))

    assert call(["patch", "recipe.toml", "train.py"]) == 1
    assert "for want of a clear place: fused_optimizer" in capsys.readouterr().err


def test_what_takes_more_than_one_place_is_said_in_words(folder, capsys):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "recipe.toml").write_text(recipe("data_parallel"))

    assert call(["patch", "recipe.toml", "train.py"]) == 1

    shown = capsys.readouterr().err
    assert ", by hand:\n" in shown
    assert "torchrun --nproc-per-node 2" in shown


def recipe(name):
    from pathlib import Path

    from flatout.records.recipe import Choice, Recipe
    from flatout.workflow.recipe_files import write_recipe

    write_recipe(Recipe(choices=(Choice(technique=name),)), Path("made.toml"))
    return Path("made.toml").read_text()
