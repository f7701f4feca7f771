"""The job of the command `demo`: a training starved of data, made from real photographs."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import flatout
from flatout.records.errors import UserError
from flatout.records.trial import Workload

JOB = "starved_images"
"""The scenario that is tuned, and the name of its folder."""
IMAGES = 400
"""360 of them train: 22 steps an epoch, more than the guard's 20, so that a trial sees no epoch end
before it has measured. Two cores make them in a few seconds."""
EPOCHS = 100
"""More than any trial needs; the tuner stops it when it has seen enough."""
PACKAGES = {"PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn"}
"""What makes and reads the photographs: module and package."""


def make_job(out: Path, images: int = 0) -> Workload:
    """Copy the script into a folder, make its photographs alongside it, and return the job."""
    missing = [name for module, name in PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        raise UserError(f"the demo needs {' and '.join(missing)}: pip install 'flatout[demo]'")
    folder = out / JOB
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(scenarios() / JOB / "train.py", folder)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    # In processes of their own: what they import stays out of this one.
    command = [sys.executable, str(scenarios() / "photographs.py"), str(folder / "photographs")]
    count = ["--count", str(images or IMAGES)]
    done = subprocess.run([*command, *count], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(f"the photographs could not be made: {last[0]}; see {' '.join(command)}")
    return Workload(
        target="train.py",
        arguments=("--data", "photographs", "--epochs", str(EPOCHS)),
        folder=folder,
        python=sys.executable,
    )


def scenarios() -> Path:
    """Return the folder of the scenarios, in a wheel or in a clone."""
    package = Path(flatout.__file__).parent
    installed = package / "_scenarios"
    return installed if installed.is_dir() else package.parent.parent / "scenarios"
