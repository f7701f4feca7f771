"""`flatout.apply` in real scripts, started as `python train.py`."""

import os

import pytest

from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.workflow.apply import apply
from flatout.workflow.recipe_files import write_recipe
from tests.paths import ROOT
from tests.support.programs import python

TRAIN = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("threads", torch.get_num_threads(), "fused", optimizer.param_groups[0]["fused"])
"""
FIRST = "import flatout\nflatout.apply({})\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a recipe of which one technique finds nothing to act on."""
    choices = (
        Choice(technique="cpu_threads", settings={"threads": 1}),
        Choice(technique="fused_optimizer"),
        Choice(technique="channels_last"),
        Choice(technique="cpu_allocator", settings={"library": "glibc"}),
    )
    write_recipe(Recipe(choices=choices), tmp_path / "recipe.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(folder, source, **variables):
    (folder / "train.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), **variables}
    done = python(["train.py"], cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "variables"),
    [
        (FIRST.format("'recipe.toml'") + TRAIN, {}),
        (FIRST.format("") + TRAIN, {"FLATOUT_RECIPE": "recipe.toml"}),
        ("import torch\n" + FIRST.format("'recipe.toml'") + TRAIN, {}),
    ],
    ids=["before torch", "by the variable", "after torch"],
)
def test_a_script_trains_with_the_recipe_that_it_names(folder, source, variables):
    done = trained(folder, source, **variables)

    assert "threads 1 fused True" in done.stdout
    assert done.stderr.count("channels_last was not applied") == 1
    assert "cpu_allocator was not applied (not_applicable): the process started" in done.stderr
    assert "cpu_threads" not in done.stderr
    assert list((folder / "cache/flatout").glob("run-*")) == []


@pytest.mark.slow
def test_without_a_recipe_or_in_a_trial_the_line_does_nothing(folder):
    spec = folder / "over.json"  # of a trial that is over

    plain = trained(folder, FIRST.format("") + TRAIN)
    tried = trained(folder, FIRST.format("'recipe.toml'") + TRAIN, FLATOUT_SPEC=str(spec))

    assert "threads 2 fused None" in plain.stdout
    assert "threads 2 fused None" in tried.stdout


ANOTHER = """
from flatout.records.recipe import Recipe
try:
    flatout.apply(Recipe())
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_a_line_that_runs_twice_applies_its_recipe_once(folder):
    line = FIRST.format("'recipe.toml'")

    done = trained(folder, f"{line}import torch\n{line}{ANOTHER}{TRAIN}")

    assert "threads 1 fused True" in done.stdout
    assert done.stderr.count("channels_last was not applied") == 1
    assert "fused_optimizer" not in done.stderr
    assert "with another recipe already" in done.stdout


def test_what_cannot_be_applied_from_within_is_refused(folder):
    spread = Recipe(choices=(Choice(technique="data_parallel", settings={"ranks": 2}),))

    with pytest.raises(UserError, match=r"there is no recipe at no\.toml"):
        apply("no.toml")
    with pytest.raises(UserError, match="use flatout run --with"):
        apply(spread)
