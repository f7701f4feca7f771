import mmap
from pathlib import Path

import pytest

from flatout.techniques.data.read_ahead import dataset_files
from flatout.techniques.data.read_ahead.dataset_files import WarmUp
from tests.data.page_cache import cached_pages, evict


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{number}.bin" for number in range(4)]
    for path in paths:
        path.write_bytes(bytes(1_000))
    return paths


@pytest.fixture
def seen(monkeypatch):
    """Return what is asked of the kernel, and which files are waited for, in its order."""
    seen = []
    monkeypatch.setattr(
        dataset_files, "advise", lambda path: not seen.append(f"ask {Path(path).name}")
    )
    monkeypatch.setattr(dataset_files, "wait_for", lambda path: seen.append(f"wait {path.name}"))
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
        *("ask 0.bin", "ask 1.bin", "wait 1.bin"),
        *("ask 2.bin", "ask 3.bin", "wait 3.bin"),
    ]


def test_a_file_that_was_waited_for_is_in_memory_though_no_one_may_look(files, monkeypatch):
    whole, more = files[1], files[2]
    whole.write_bytes(bytes(3 << 20))
    evict(whole)
    before = cached_pages(whole)
    # So Linux answers who neither owns a file nor may write to it.
    monkeypatch.setattr(dataset_files, "resident_share", lambda _: 1.0, raising=False)
    monkeypatch.setattr(dataset_files, "advise", lambda _: True)
    monkeypatch.setattr(dataset_files, "STRETCH_BYTES", 2_000)

    WarmUp(lambda: [files[0], whole, more]).wait()

    assert (before, cached_pages(whole)) == (0, (3 << 20) // mmap.PAGESIZE)


def test_a_file_that_is_gone_is_not_waited_for(tmp_path):
    dataset_files.wait_for(tmp_path / "none")


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
