"""The verb `run`: the real training, unmodified, with a recipe."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from flatout import techniques
from flatout.core.recipe import Recipe
from flatout.core.workload import Workload
from flatout.seams.jobs import announce
from flatout.seams.process import armed_environment, command_of, mend_leftovers, scratch_root
from flatout.workflow.trials import ENTRY

if TYPE_CHECKING:
    from collections.abc import Mapping


def run(workload: Workload, recipe: Recipe) -> int:
    """Train to the end with the recipe and return the script's exit code.

    The script owns the terminal, its files and its seeds: nothing is overlaid, rolled back or
    stopped. Techniques that could not be applied are named on stderr by the child itself.
    """
    mend_leftovers()
    environment: Mapping[str, str] = dict(os.environ)
    for technique in techniques.build(recipe):
        environment = technique.environment(environment)
    environment = with_compile_cache(environment, workload)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch_root()))
    try:
        announce(folder, "run", workload.command_line)
        spec_path = folder / "child.json"
        spec_path.write_text(json.dumps(_child(recipe, folder)), encoding="utf-8")
        child = subprocess.Popen(
            command_of(workload),
            cwd=workload.folder,
            env=armed_environment(environment, spec_path),
        )
        return _wait(child)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_compile_cache(environment: "Mapping[str, str]", workload: Workload) -> "Mapping[str, str]":
    """Return the environment with the compile cache that the trials of this script fill.

    So a run starts warm after a tuning, and the next run after this one.
    """
    cache = scratch_root() / "compiled" / workload.name
    cache.mkdir(parents=True, exist_ok=True)
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}


def _child(recipe: Recipe, folder: Path) -> dict[str, object]:
    return {
        "entry": ENTRY,
        "mode": "run",
        "recipe": recipe.to_json(),
        "training_loaders": list(recipe.training_loaders),
        "folder": "",
        "status_folder": str(folder),
        "seed": None,
        "ends_with_parent": True,
        "undo": None,
        "guard": None,
        "not_journaled": [],
    }


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """Wait for the script; Ctrl-C reaches it through the terminal, and it may save and end."""
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue
        return code if code >= 0 else 128 - code
