"""A script's Python under flatout is what it is without, however flatout was installed."""

import json
import os
import subprocess
import sysconfig
import venv

import pytest

import flatout
from flatout.records.files import SOURCE

IN_FRONT = ("argparse", "json", "pathlib")
"""Of the standard library; backports in site-packages bear such names."""
FACTS = """
import argparse, json, os, pathlib, sys
print(json.dumps({
    "path": sys.path,
    "PYTHONPATH": os.environ.get("PYTHONPATH"),
    "argparse": argparse.__file__,
    "is_armed": "flatout.agent.bootstrap" in sys.modules,
}))
"""
TRIAL = """
import os, sys
from pathlib import Path
from flatout.records.trial import Workload
from flatout.launch.trial_process import ProcessOptions, run_process
workload = Workload(target="facts.py", folder=Path(sys.argv[1]), python=sys.executable)
ending = run_process(workload, ProcessOptions(entry="nobody", environment=dict(os.environ)))
assert (ending.why, ending.exit_code) == ("ended", 0), ending
print(ending.log)
"""
STARTS = """
import subprocess, sys
raise SystemExit(subprocess.run([sys.argv[1], "imports.py"]).returncode)
"""
IMPORTS = "import json, sys, torch; print(json.dumps(sys.path))"


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "facts.py").write_text(FACTS)
    (folder / "starts.py").write_text(STARTS)
    (folder / "imports.py").write_text(IMPORTS)
    (folder / "recipe.toml").write_text(f'[flatout]\nversion = "{flatout.__version__}"\n')
    return folder


def make_python(folder):
    """Return a new environment's Python and its folder of packages, with backports in that."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in IN_FRONT:
        (packages / f"{name}.py").write_text("raise RuntimeError('before the standard library')")
    return folder / "bin/python", packages


def make_python_with_flatout(folder, way):
    """Return the Python and the PYTHONPATH with which flatout is found there."""
    python, packages = make_python(folder)
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    if way == "wheel":
        (packages / "flatout").symlink_to(SOURCE / "flatout")
    if way == "editable":
        (packages / "_flatout.pth").write_text(str(SOURCE))
    if way == "relative":
        return python, os.path.relpath(SOURCE, folder)
    return python, str(SOURCE) if way == "clone" else ""


def run(command, cwd, search=""):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLATOUT"))}
    environment["XDG_CACHE_HOME"] = str(cwd.parent / "cache")
    if search:
        environment["PYTHONPATH"] = search
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("way", ["wheel", "editable", "clone"])
def test_a_real_training_finds_the_modules_that_it_finds_without_flatout(tmp_path, work, way):
    python, search = make_python_with_flatout(tmp_path / "env", way)
    plain = json.loads(run([python, "facts.py"], work, search).stdout)

    command = [python, "-m", "flatout", "run", "--with", "recipe.toml", "facts.py"]
    ours = json.loads(run(command, work, search).stdout)

    assert not plain.pop("is_armed")
    assert ours.pop("is_armed")
    boot, *others = ours.pop("PYTHONPATH").split(os.pathsep)
    assert boot.endswith("flatout/agent/boot")
    assert os.pathsep.join(others) == (plain.pop("PYTHONPATH") or "")
    assert ours == plain


@pytest.mark.parametrize("way", ["wheel", "editable", "clone", "relative"])
def test_a_trial_does_so_as_well(tmp_path, work, way):
    python, search = make_python_with_flatout(tmp_path / "env", way)
    plain = json.loads(run([python, "facts.py"], work, search).stdout)

    ours = json.loads(run([python, "-c", TRIAL, work], tmp_path / "env", search).stdout)

    assert ours.pop("is_armed")
    assert ours["path"] == plain["path"]
    assert ours["argparse"] == plain["argparse"]


def test_a_python_of_another_environment_without_flatout_runs_without_it(tmp_path, work):
    python, _ = make_python_with_flatout(tmp_path / "env", "wheel")
    other, packages = make_python(tmp_path / "other")
    (packages / "torch.py").touch()
    plain = run([other, "imports.py"], work).stdout

    command = [python, "-m", "flatout", "run", "--with", "recipe.toml", "starts.py", other]
    done = run(command, work)

    assert done.stdout == plain
    assert f"{other} runs without flatout: " in done.stderr
