"""The lock on a folder where the file system has none."""

import errno
import fcntl

import pytest

from flatout.launch.folder_lock import FolderBusyError, hold_folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that cannot be locked itself, as on NFS."""
    real = fcntl.flock
    folder = tmp_path / "work"
    folder.mkdir()

    def flock(descriptor, how):
        if (tmp_path / "work").samefile(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOLCK, "No locks available")
        return real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    return folder


def test_a_folder_that_cannot_be_locked_is_held_by_a_spare_file(folder, tmp_path):
    with (
        hold_folder(folder, tmp_path),
        pytest.raises(FolderBusyError, match="at work in"),
        hold_folder(folder, tmp_path),
    ):
        pass


def test_where_no_spare_file_can_be_made_the_error_says_why(folder, tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="missing/locks"),
        hold_folder(folder, tmp_path / "missing"),
    ):
        pass
