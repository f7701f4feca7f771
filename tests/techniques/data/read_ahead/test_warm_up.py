from pathlib import Path

import pytest

from flatout.techniques.data.read_ahead import dataset_files
from flatout.techniques.data.read_ahead.dataset_files import WarmUp


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{number}.bin" for number in range(4)]
    for path in paths:
        path.write_bytes(bytes(1_000))
    return paths


@pytest.fixture
def seen(monkeypatch):
    """Return what is asked of the kernel, in its order; a file has come at the third look."""
    seen = []

    def share(paths):
        (path,) = paths
        seen.append(f"look at {path.name}")
        return 1.0 if seen.count(seen[-1]) == 3 else 0.1

    monkeypatch.setattr(
        dataset_files, "advise", lambda path: not seen.append(f"ask {Path(path).name}")
    )
    monkeypatch.setattr(dataset_files, "resident_share", share)
    monkeypatch.setattr(dataset_files, "POLL_S", 0.0)
    return seen


def test_every_file_is_asked_for_once(files, seen):
    work = WarmUp(lambda: [*files, files[0]])
    work.wait()

    assert seen == ["ask 0.bin", "ask 1.bin", "ask 2.bin", "ask 3.bin"]
    assert (work.asked_bytes, work.trouble) == (4_000, "")


def test_the_next_stretch_is_asked_for_once_the_last_has_come(files, seen, monkeypatch):
    monkeypatch.setattr(dataset_files, "STRETCH_BYTES", 2_000)
    work = WarmUp(lambda: files)
    work.wait()

    assert seen == [
        *("ask 0.bin", "ask 1.bin", *["look at 1.bin"] * 3),
        *("ask 2.bin", "ask 3.bin", *["look at 3.bin"] * 3),
    ]


def test_files_that_do_not_fit_are_left_alone_with_the_reason(files, seen, monkeypatch):
    monkeypatch.setattr(dataset_files, "free_memory_bytes", lambda: 7_999)
    work = WarmUp(lambda: files)
    work.wait()

    assert seen == []
    assert "more than 50% of the free memory" in work.trouble

    monkeypatch.setattr(dataset_files, "free_memory_bytes", lambda: 8_000)
    work = WarmUp(lambda: files)
    work.wait()

    assert (work.asked_bytes, work.trouble) == (4_000, "")


def test_files_that_are_gone_are_passed_over(files, seen):
    files[1].unlink()
    work = WarmUp(lambda: files)
    work.wait()

    assert seen == ["ask 0.bin", "ask 2.bin", "ask 3.bin"]


def test_a_list_that_fails_is_told(seen):
    work = WarmUp(lambda: 1 / 0)
    work.wait()

    assert "ZeroDivisionError" in work.trouble
