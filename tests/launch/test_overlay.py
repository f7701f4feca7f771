"""When a folder may be overlaid, and what an overlaid child leaves behind."""

import os
from pathlib import Path

import pytest

from flatout.launch import overlay
from tests.support.programs import python

PROGRAM = """
import sys
from pathlib import Path
from flatout.launch import overlay
overlay.enter_overlay(Path(sys.argv[1]), Path(sys.argv[2]))
Path("new.txt").write_text("new")
Path("old.txt").write_text("changed")
print(Path("old.txt").read_text(), Path("data.txt").read_text())
"""


@pytest.fixture
def folders(tmp_path):
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    work.mkdir()
    scratch.mkdir()
    (work / "old.txt").write_text("old")
    (work / "data.txt").write_text("data")
    return work, scratch


def enter(work, scratch):
    return python(["-c", PROGRAM, str(work), str(scratch)], cwd=work)


def test_child_sees_its_writes_and_the_folder_does_not(folders):
    work, scratch = folders
    done = enter(work, scratch)
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip("this kernel or container forbids unprivileged overlay mounts")

    assert done.stdout.split() == ["changed", "data"], done.stderr
    assert sorted(p.name for p in work.iterdir()) == ["data.txt", "old.txt"]
    assert (work / "old.txt").read_text() == "old"
    assert overlay.written_files(scratch) == 2


def test_scratch_inside_the_folder_is_refused(folders):
    work, _ = folders

    assert not overlay.can_overlay(work, work / "scratch")


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\\b"])
def test_names_that_mount_options_split_at_are_refused(folders, name):
    _, scratch = folders

    assert not overlay.can_overlay(Path("/tmp") / name, scratch)


def test_folder_with_a_mount_below_is_refused(folders):
    _, scratch = folders

    assert os.path.ismount("/proc")
    assert not overlay.can_overlay(Path("/"), scratch)


def test_a_disk_whose_name_is_not_utf8_is_a_mount_as_any_other(folders, tmp_path, monkeypatch):
    work, scratch = folders
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(b"36 1 8:1 / %b/\xc7\xd1 rw - vfat /dev/sdb1 rw\n" % bytes(work))
    monkeypatch.setattr(overlay, "MOUNTS", mounts)

    assert not overlay.can_overlay(work, scratch)
    assert overlay.can_overlay(scratch, work)


def test_plain_folder_is_allowed(folders):
    assert overlay.can_overlay(*folders)
