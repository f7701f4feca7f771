"""flatout where homes, names, rights, network or disk space are missing."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.support.programs import python, ran

DATA = ROOT / "tests/reporting/data"
TRAIN = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(60):
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
open("saved.txt", "w").write("done")
"""
STRANGER = 54321
"""The number of a user whom /etc/passwd does not know."""
NOBODY = 65534


def as_user(number):
    return ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups"]


def can(*words):
    try:
        return not subprocess.run([*words, "true"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


@pytest.fixture
def place():
    """A folder that other users reach, with a home that they cannot write to."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-place-"))
    for path, mode in ((folder, 0o777), (folder / "home", 0o555), (folder / "work", 0o777)):
        path.mkdir(exist_ok=True)
        path.chmod(mode)
    (folder / "work/train.py").write_text(TRAIN)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


SEARCH = os.pathsep.join(
    [str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
)


def python_for(before):
    """Return a Python that this user may run: ours may be in a home."""
    check = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    )
    for interpreter in (sys.executable, "/usr/bin/python3"):
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH}
        words = [*before, interpreter, "-c", check]
        if not subprocess.run(words, env=variables, capture_output=True, check=False).returncode:
            return interpreter
    pytest.skip("that user may run no Python with torch")


def measure(place, before, variables):
    return ran(
        [*before, python_for(before), "-m", "flatout", "measure", "--quick", "train.py"],
        cwd=place / "work",
        env={
            "PATH": os.environ["PATH"],
            "TMPDIR": str(place / "tmp"),
            "PYTHONPATH": SEARCH,
            **variables,
        },
    )


@pytest.mark.slow
@pytest.mark.skipif(not can("unshare", "-n", *as_user(NOBODY)), reason="needs rights of root")
def test_without_network_and_rights_and_with_a_home_that_is_read_only(place):
    (place / "home/notes").write_text("mine")

    done = measure(place, ["unshare", "-n", *as_user(NOBODY)], {"HOME": str(place / "home")})

    assert done.returncode == 0, done.stderr
    assert "flatout tune train.py" in done.stdout
    assert [path.name for path in (place / "home").iterdir()] == ["notes"]
    assert [path.name for path in (place / "work").iterdir()] == ["train.py"]


@pytest.mark.slow
@pytest.mark.skipif(not can(*as_user(STRANGER)), reason="needs rights of root")
def test_without_a_home_and_a_name(place):
    done = measure(place, as_user(STRANGER), {})

    assert done.returncode == 0, done.stderr
    assert [path.name for path in (place / "work").iterdir()] == ["train.py"]
    made = [path for path in (place / "tmp").iterdir() if path.name == f"flatout-{STRANGER}"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700]


@pytest.mark.slow
def test_a_working_folder_that_is_a_link(place):
    (place / "link").symlink_to(place / "work")

    done = python(
        ["-m", "flatout", "measure", "--quick", "train.py"],
        cwd=place / "link",
        env={**os.environ, "PWD": str(place / "link")},
    )

    assert done.returncode == 0, done.stderr
    assert [path.name for path in (place / "work").iterdir()] == ["train.py"]
    assert (place / "link").is_symlink()


def test_a_quota_leaves_the_old_result_as_it_was(tmp_path):
    """The kernel's own limit of a file's size, in the place of a quota."""
    (tmp_path / "result.json").write_text("the old one")
    names = [str(DATA / "profile_busy.json")] * 2

    done = python(
        ["-m", "flatout", "compare", *names, "--json", "result.json"],
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )

    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "result.json").read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_quota_of_the_out_folder_is_a_user_error(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)

    done = python(
        ["-m", "flatout", "tune", "--out", "out", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)),
    )

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
