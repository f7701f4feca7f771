"""The verb `demo`: a training job that starves for data, made from real photographs."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import flatout
from flatout.core.errors import UserError
from flatout.core.workload import Workload

SCENARIO = "starved_images"
IMAGES = 600
"""About 45 MB: enough for several trials' steps before an epoch ends, made in half a minute."""


def demo_workload(folder: Path, tell: Callable[[str], None]) -> Workload:
    """Write script and photographs into a folder, what is there already is kept; return the job.

    Raises:
        UserError: if the folder cannot be written, or the photographs' packages are missing.
    """
    scenarios = _scenarios()
    script, images = folder / "train.py", folder / "photographs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(scenarios / SCENARIO / "train.py", script)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}; choose another --out"
        ) from error
    tell(f"cutting {IMAGES} photographs into {images}")
    _make_photographs(scenarios, images)
    arguments = ("--data", str(images), "--out", str(folder / "runs"))
    return Workload(target=str(script), arguments=arguments, python=sys.executable)


def _scenarios() -> Path:
    """Return the folder of scenarios: inside the installed package, or beside it in a clone."""
    package = Path(flatout.__file__).parent
    for folder in (package / "scenarios", package.parents[1] / "scenarios"):
        if (folder / SCENARIO / "train.py").is_file():
            return folder
    raise UserError(f"the scenario {SCENARIO} is not installed; run the demo from a clone")


def _make_photographs(scenarios: Path, images: Path) -> None:
    done = subprocess.run(
        [sys.executable, scenarios / "photographs.py", images, "--count", str(IMAGES)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"the photographs could not be made: {last}; "
            "the demo needs: pip install pillow scikit-image scikit-learn"
        )
