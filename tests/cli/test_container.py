from flatout.cli import call


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


def test_both_kinds_at_once_are_refused(folder, capsys):
    assert call(["container", "--rocm", "--cuda", "12.8"]) == 2
    assert "one of --cuda and --rocm" in capsys.readouterr().err
