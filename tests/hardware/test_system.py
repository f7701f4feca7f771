import shutil

import pytest

from flatout.hardware.system import disk_speed, find_compiler, huge_pages, open_files_limit

MIB = 1024**2


def test_the_disk_is_measured_and_nothing_stays_behind(tmp_path):
    speed = disk_speed(tmp_path, probe_bytes=2 * MIB)

    assert speed.probe_bytes == 2 * MIB
    assert speed.write_bytes_per_s > 0
    assert speed.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OSError, match="none"):
        disk_speed(tmp_path / "none")


def test_the_chosen_compiler_comes_first(monkeypatch):
    monkeypatch.setenv("CXX", f"{shutil.which('python3')} -O2")

    assert find_compiler() == shutil.which("python3")


def test_without_any_compiler_there_is_none(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_compiler() is None


def test_the_mode_of_huge_pages_is_the_bracketed_word(tmp_path):
    path = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    path.parent.mkdir(parents=True)
    path.write_text("always [madvise] never\n")

    assert huge_pages(tmp_path) == "madvise"


def test_a_kernel_without_huge_pages_has_no_mode(tmp_path):
    assert huge_pages(tmp_path) == ""


def test_the_limits_on_open_files_are_numbers():
    soft, hard = open_files_limit()

    assert soft <= hard or hard == -1
