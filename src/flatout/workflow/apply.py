"""A recipe from within the script, where no `flatout run` can be put in front of it."""

import atexit
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from flatout.agent.bootstrap import SPEC_VARIABLE, AfterImport
from flatout.launch.trial_folders import announce
from flatout.launch.trial_process import scratch_root
from flatout.records import catalogue
from flatout.records.errors import UserError
from flatout.records.messages import ENGLISH, messages
from flatout.records.recipe import Recipe
from flatout.records.secrets import hide_in_words
from flatout.records.trial_spec import TrialSpec
from flatout.workflow.recipe_files import read_recipe

VARIABLE = "FLATOUT_RECIPE"
"""Environment variable with the path of a recipe, for `apply` without an argument."""

APPLIED = "FLATOUT_APPLIED"
"""Environment variable with the process that trains with a recipe, and which: children differ."""
READ_AT_START = ("LD_", "MALLOC_", "GLIBC_")
"""What the variables begin with that are read once, before any code of Python."""


def apply(recipe: Recipe | str | Path | None = None) -> None:
    """Train the rest of this process with a recipe, as `flatout run --with` does.

    To be called before anything else, torch's import included: for notebooks, Ray, SageMaker and
    other launchers that start the script themselves. What a technique needs before the process
    starts (`cpu_allocator`) is named at the end as not applied. Called again it does nothing, so a
    cell of a notebook can run twice. In the trials of flatout it does nothing, since they choose
    the recipe.

    Args:
        recipe: The recipe or its path; None takes the path in `FLATOUT_RECIPE`, and does nothing
            without one.

    Raises:
        UserError: if it cannot be read, trains on several devices, or another one was applied.
    """
    chosen = recipe if recipe is not None else os.environ.get(VARIABLE)
    if not chosen or SPEC_VARIABLE in os.environ:
        return
    found = chosen if isinstance(chosen, Recipe) else read_recipe(chosen, may_spread=True)
    if catalogue.setter_of("ranks") in found.names or found.parallel is not None:
        raise UserError("a recipe for several devices starts processes: use flatout run --with")
    process, _, applied = os.environ.get(APPLIED, "").partition(" ")
    if process == str(os.getpid()):
        if applied != repr(found):
            raise UserError("this process trains with another recipe already: restart it for this")
        return
    os.environ[APPLIED] = f"{os.getpid()} {found!r}"
    for technique in catalogue.build(found):
        wanted = technique.environment(dict(os.environ))
        # Too late for these: without them the technique says that it was not applied.
        os.environ.update({k: v for k, v in wanted.items() if not k.startswith(READ_AT_START)})
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch_root()))
    announce(folder, "run", shlex.join(hide_in_words(sys.argv)))
    # Before the agent's own exit handlers are registered, so it runs after them.
    atexit.register(_remove, folder, os.getpid())
    spec = TrialSpec(
        mode="run",
        recipe=found,
        says=messages(ENGLISH).family("run.training"),
        status_folder=str(folder),
        prefix=sys.prefix,
    )
    if "torch" in sys.modules:
        _install(spec)
    else:
        sys.meta_path.insert(0, AfterImport("torch", lambda: _install(spec)))


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and no forked child of it
        shutil.rmtree(folder, ignore_errors=True)


def _install(spec: TrialSpec) -> None:
    from flatout.agent import entry

    entry.install(spec)
