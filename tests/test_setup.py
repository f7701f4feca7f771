"""A fresh machine gets an environment, or one clear line with what to do."""

import sys

from tests.paths import ROOT
from tests.support.programs import ran

MAKE_VENV = ROOT / ".ci/make-venv"


def make_venv(python, folder):
    return ran(["bash", MAKE_VENV, python, folder])


def python_that(folder, script):
    path = folder / "python3"
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def test_no_python_is_one_clear_line(tmp_path):
    done = make_venv(tmp_path / "none", tmp_path / "env")

    assert done.returncode == 2
    assert "install Python 3.10 or newer" in done.stderr


def test_an_old_python_is_named_with_its_version(tmp_path):
    old = python_that(tmp_path, 'case "$1" in -c) exit 1;; *) echo "Python 3.8.1";; esac')

    done = make_venv(old, tmp_path / "env")

    assert done.returncode == 2
    assert "Python 3.8.1 is too old" in done.stderr


def test_a_python_without_ensurepip_and_pip_names_the_package_to_install(tmp_path):
    bare = python_that(tmp_path, 'case "$1" in -m) exit 1;; *) exit 0;; esac')

    done = make_venv(bare, tmp_path / "env")

    assert done.returncode == 2
    assert "apt-get install python3-venv" in done.stderr


def test_an_environment_that_works_is_left_alone(tmp_path):
    folder = tmp_path / "env/bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    (tmp_path / "env/kept").write_text("")

    done = make_venv(tmp_path / "none", tmp_path / "env")

    assert done.returncode == 0
    assert (tmp_path / "env/kept").exists()


def test_everything_is_pinned_for_development():
    lines = (ROOT / "constraints.txt").read_text().splitlines()

    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if "==" not in pin] == []
    assert "torch==2.13.0" in pins


def test_plain_make_is_make_check():
    shown = {
        goal: ran(["make", "--dry-run", *goal], cwd=ROOT, check=True).stdout
        for goal in [(), ("check",)]
    }

    assert shown[()] == shown["check",]
    assert "lint-imports" in shown[()]


def test_the_demo_installs_what_it_needs_and_no_more(tmp_path):
    shown = ran(
        ["make", "--dry-run", "demo", f"VENV={tmp_path / 'env'}"], cwd=ROOT, check=True
    ).stdout

    assert "--editable '.[demo]'" in shown
    assert "dev" not in shown.split("--editable")[1].splitlines()[0]
