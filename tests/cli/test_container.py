from flatout import __version__
from flatout.cli import call

RECIPE = f'[flatout]\nversion = "{__version__}"\n[[technique]]\nname = "lora"\n'


def test_the_file_is_printed_or_written(folder, capsys):
    assert call(["container", "train.py"]) == 0
    printed = capsys.readouterr().out
    assert call(["container", "--out", "Dockerfile", "train.py"]) == 0

    assert "\nFROM " in printed
    assert (folder / "Dockerfile").read_text() == printed


def test_a_recipe_that_is_none_is_refused_before_it_is_in_a_container(folder, capsys):
    (folder / "recipe.toml").write_text("[flatout]\n[nonsense]\n")

    assert call(["container", "--with", "recipe.toml"]) == 2
    assert "recipe.toml" in capsys.readouterr().err


def test_a_recipe_needs_what_flatout_is_installed_from(folder, capsys):
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "flatout-0.1.0-py3-none-any.whl").touch()
    words = ["container", "--with", "recipe.toml"]

    assert call(words) == 2
    assert "name it with --flatout" in capsys.readouterr().err
    assert call([*words, "--flatout", "flatout-0.1.0-py3-none-any.whl"]) == 0
    assert '"/opt/flatout-0.1.0-py3-none-any.whl[lora]"' in capsys.readouterr().out
