import pytest

from flatout import __version__
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.workflow.recipe_files import is_compatible, read_recipe, write_recipe
from tests.records.test_files import files_of_at_most

WORKERS = Choice(technique="loader_workers", settings={"num_workers": 3, "prefetch_factor": 2})


def written(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(f'[flatout]\nversion = "{__version__}"\n' + text)
    return path


def test_what_is_written_is_read_back(tmp_path):
    recipe = Recipe(
        choices=(WORKERS, Choice(technique="pinned_memory")),
        training_loaders=("train.py:main:0",),
        about={"script": "train.py --epochs 3", "ratio": 2.25},
    )

    write_recipe(recipe, tmp_path / "recipe.toml")

    assert read_recipe(tmp_path / "recipe.toml") == recipe


@pytest.mark.parametrize(
    "value",
    [
        True,
        7,
        -0.5,
        1e-05,
        1e20,
        float("inf"),
        'a "quoted" \\ path\n\t\x7f\x01 Größe 😀',
        [1, 2],
        ["a", "b"],
        {"deep": {"odd key.": [True, {"x": 1}]}},
        {},
        [],
    ],
)
def test_every_plain_value_is_read_back_as_it_was(tmp_path, value):
    recipe = Recipe(about={"value": value, "a key with blanks": 1})

    write_recipe(recipe, tmp_path / "recipe.toml")

    assert read_recipe(tmp_path / "recipe.toml").about == recipe.about


def test_an_empty_recipe_is_a_recipe(tmp_path):
    write_recipe(Recipe(), tmp_path / "recipe.toml")

    assert read_recipe(tmp_path / "recipe.toml") == Recipe()


def test_the_file_says_how_to_use_it(tmp_path):
    write_recipe(Recipe(choices=(WORKERS,)), tmp_path / "mine.toml")

    assert "flatout run --with mine.toml train.py" in (tmp_path / "mine.toml").read_text()


def test_a_setting_without_a_value_is_left_out(tmp_path):
    choice = Choice(technique="loader_workers", settings={"num_workers": 3, "other": None})

    write_recipe(Recipe(choices=(choice,)), tmp_path / "recipe.toml")

    assert "other" not in (tmp_path / "recipe.toml").read_text()


def test_a_missing_folder_is_made(tmp_path):
    write_recipe(Recipe(), tmp_path / "new/deep/recipe.toml")

    assert (tmp_path / "new/deep/recipe.toml").is_file()


def test_an_unknown_technique_names_the_nearest(tmp_path):
    path = written(tmp_path, '[[technique]]\nname = "loader_worker"\n')

    with pytest.raises(UserError, match="did you mean 'loader_workers'"):
        read_recipe(path)


def test_an_unknown_setting_names_the_nearest(tmp_path):
    path = written(tmp_path, '[[technique]]\nname = "loader_workers"\nnum_worker = 2\n')

    with pytest.raises(UserError, match="did you mean 'num_workers'"):
        read_recipe(path)


def test_a_value_that_is_not_allowed_is_refused(tmp_path):
    path = written(tmp_path, '[[technique]]\nname = "loader_workers"\nnum_workers = 0\n')

    with pytest.raises(UserError, match="at least 1"):
        read_recipe(path)


def test_an_unknown_table_names_the_nearest(tmp_path):
    path = written(tmp_path, '[[techniques]]\nname = "loader_workers"\n')

    with pytest.raises(UserError, match="unknown table 'techniques'; did you mean 'technique'"):
        read_recipe(path)


def test_an_unknown_key_of_the_workload_names_the_nearest(tmp_path):
    path = written(tmp_path, "[workload]\ntraining_loader = []\n")

    with pytest.raises(UserError, match=r"did you mean 'workload\.training_loaders'"):
        read_recipe(path)


def test_an_unknown_key_beside_the_version_is_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f'[flatout]\nversion = "{__version__}"\nseed = 3\n')

    with pytest.raises(UserError, match=r"unknown key 'flatout\.seed'"):
        read_recipe(path)


def test_a_technique_that_is_there_twice_is_refused(tmp_path):
    lines = '[[technique]]\nname = "cpu_threads"\nthreads = {}\n'
    path = written(tmp_path, lines.format(1) + lines.format(2))

    with pytest.raises(UserError, match="cpu_threads is there twice"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("technique = 3\n", "two brackets"),
        ("[technique]\nname = 3\n", "two brackets"),
        ("[[technique]]\nnum_workers = 3\n", "needs a name"),
        ("[workload]\ntraining_loaders = 3\n", "list of texts"),
        ("about = 3\n", "must be a table"),
    ],
)
def test_a_table_of_the_wrong_kind_is_explained(tmp_path, text, part):
    path = tmp_path / "recipe.toml"
    path.write_text(text + f'[flatout]\nversion = "{__version__}"\n')

    with pytest.raises(UserError, match=part):
        read_recipe(path)


def test_a_recipe_of_another_flatout_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('[flatout]\nversion = "99.0.0"\n')

    with pytest.raises(UserError, match="99") as caught:
        read_recipe(path)

    assert __version__ in str(caught.value)


def test_a_file_without_a_version_is_not_taken_for_a_recipe(tmp_path):
    path = tmp_path / "pyproject.toml"
    path.write_text("")

    with pytest.raises(UserError, match="not a flatout recipe"):
        read_recipe(path)


def test_a_missing_file_is_named_with_what_writes_one(tmp_path):
    with pytest.raises(UserError, match="flatout tune"):
        read_recipe(tmp_path / "none.toml")


@pytest.mark.parametrize("text", [b"[[technique]\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_toml_is_refused(tmp_path, text):
    (tmp_path / "recipe.toml").write_bytes(text)

    with pytest.raises(UserError, match="not valid TOML"):
        read_recipe(tmp_path / "recipe.toml")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_recipe(tmp_path)


@pytest.mark.chaos
def test_an_unwritable_folder_is_the_user_s_to_mend(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(UserError, match="cannot write the recipe"):
        write_recipe(Recipe(), tmp_path / "file/recipe.toml")


@pytest.mark.chaos
def test_a_write_that_fails_half_way_leaves_the_old_recipe_as_it_was(tmp_path):
    path = tmp_path / "recipe.toml"
    write_recipe(Recipe(choices=(WORKERS,)), path)
    before = path.read_text()

    with files_of_at_most(20), pytest.raises(UserError, match="File too large"):
        write_recipe(Recipe(), path)

    assert path.read_text() == before
    assert [item.name for item in tmp_path.iterdir()] == ["recipe.toml"]


def test_a_recipe_is_as_readable_as_any_other_file(tmp_path):
    write_recipe(Recipe(), tmp_path / "recipe.toml")
    (tmp_path / "other").write_text("")

    modes = {item.stat().st_mode for item in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_newer_patch_of_the_same_series_is_compatible():
    major, minor, _patch = __version__.split(".")

    assert is_compatible(f"{major}.{minor}.99")
