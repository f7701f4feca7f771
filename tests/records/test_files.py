"""Writing whole files, on a real file system."""

import contextlib
import os
import resource
import subprocess
import sys

import pytest

from flatout.records.errors import UserError
from flatout.records.files import private_folder, replace_text


def test_folders_on_the_way_are_made(tmp_path):
    replace_text(tmp_path / "a/b/report.md", "text")

    assert (tmp_path / "a/b/report.md").read_text() == "text"


@contextlib.contextmanager
def files_of_at_most(size_bytes):
    """Let the kernel refuse longer files, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.chaos
def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path):
    path = tmp_path / "report.md"
    replace_text(path, "old")

    with files_of_at_most(20), pytest.raises(OSError, match="File too large"):
        replace_text(path, "new" * 100)

    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["report.md"]


def test_a_file_is_as_readable_as_any_other(tmp_path):
    replace_text(tmp_path / "report.md", "text")
    (tmp_path / "other").write_text("")

    assert len({item.stat().st_mode for item in tmp_path.iterdir()}) == 1


def test_a_pipe_is_written_into_and_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    replace_text(path, "text")

    assert os.read(reader, 100) == b"text"
    assert path.is_fifo()
    os.close(reader)


def test_a_link_stays_one_and_its_target_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/report.md")

    replace_text(tmp_path / "link", "text")

    assert (tmp_path / "there/report.md").read_text() == "text"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_what_a_redirected_output_held_stays(tmp_path, name):
    code = "import sys; from pathlib import Path; from flatout.records.files import replace_text; "
    code += f"print('before'); replace_text(Path({name!r}), 'report\\n'); print('after')"
    log = tmp_path / "log"
    log.write_text("earlier\n")

    with log.open("a") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, check=True)

    assert log.read_text().split() == ["earlier", "before", "report", "after"]
    assert [item.name for item in tmp_path.iterdir()] == ["log"]


def test_a_folder_in_the_place_of_the_file_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        replace_text(tmp_path, "text")


def test_a_folder_of_ones_own_is_closed_to_others(tmp_path):
    (tmp_path / "older").mkdir(mode=0o755)

    made = [private_folder(tmp_path / name) for name in ("new", "older")]

    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700, 0o700]


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)

    with pytest.raises(UserError, match="other users can write to"):
        private_folder(folder)


def test_a_link_in_the_place_of_a_private_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")

    with pytest.raises(UserError, match="is a link"):
        private_folder(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_a_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "planted"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)

    with pytest.raises(UserError, match="belongs to another user"):
        private_folder(folder)
