import os
import shutil
from pathlib import Path

import pytest

from flatout.data import file_order, staging
from flatout.data.file_order import copy_shuffled, folder_classes, lying_order, uneven_on_storage
from flatout.data.sampler import permutation
from flatout.records.errors import UserError
from flatout.workflow.pack import shuffle_files

CLASSES, FILES = 8, 640


@pytest.fixture
def source(tmp_path):
    """Return a folder of files that were written class by class, and one that is none's."""
    root = tmp_path / "source"
    for number in range(FILES):
        folder = root / f"class_{number * CLASSES // FILES}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04}.bin").write_bytes(bytes([number % 251]) * (number % 7 + 1))
    (root / "labels.csv").write_text("a,b\n")
    os.utime(root / "labels.csv", (1_000_000, 1_000_000))
    return root


def contents(root):
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def copied(source, folder, tell=lambda _: None, seed=0):
    with staging.locked(folder):
        return copy_shuffled(source, folder, seed=seed, tell=tell)


def test_each_file_is_there_once_as_it_was_and_nothing_else(source, tmp_path):
    names = copied(source, tmp_path / "out")

    assert contents(tmp_path / "out") == contents(source)
    assert sorted(names) == sorted(contents(source))
    assert (tmp_path / "out/labels.csv").stat().st_mtime == 1_000_000


def test_the_copies_lie_shuffled_where_the_files_lay_class_by_class(source, tmp_path):
    names = copied(source, tmp_path / "out")

    assert uneven_on_storage(source, names) > 20
    assert uneven_on_storage(tmp_path / "out", names) < 2


def test_files_are_written_in_the_order_of_the_permutation(source, tmp_path):
    names = copied(source, tmp_path / "out", seed=3)

    known = sorted(contents(source))
    order = permutation(len(known), seed=3, epoch=0).tolist()
    assert names == [known[number] for number in order]


@pytest.mark.parametrize("stopped_at", [1, 250, 500])
def test_a_copy_that_was_ended_goes_on_where_all_was_flushed(
    source, tmp_path, monkeypatch, stopped_at
):
    monkeypatch.setattr(file_order, "SYNC_FILES", 200)
    seen = []

    def end(progress):
        seen.append(progress)
        if len(seen) == stopped_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copied(source, tmp_path / "out", end)
    again = []
    copied(source, tmp_path / "out", again.append)

    assert contents(tmp_path / "out") == contents(source)
    assert len(again) == FILES + 1 - stopped_at // 200 * 200
    assert again[-1].done_share == 1.0


def test_what_a_copy_that_was_killed_at_its_end_left_is_of_no_other(source, tmp_path, monkeypatch):
    monkeypatch.setattr(file_order, "SYNC_FILES", 200)
    (tmp_path / "out/.pack").mkdir(parents=True)
    (tmp_path / "out/.pack/copied.json").write_text('{"files": 600}')

    def end(_progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copied(source, tmp_path / "out", end)
    copied(source, tmp_path / "out")

    assert contents(tmp_path / "out") == contents(source)


@pytest.mark.parametrize("change", ["seed", "file", "another pack"])
def test_a_copy_goes_on_only_with_what_it_began_with(source, tmp_path, change):
    def end(_progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copied(source, tmp_path / "out", end)
    if change == "file":
        (source / "labels.csv").write_text("other")
    if change == "another pack":
        (tmp_path / "out/.pack/plan.json").write_text("damaged")

    with pytest.raises(UserError, match="the beginning of another pack"):
        copied(source, tmp_path / "out", seed=int(change == "seed"))


def test_what_cannot_be_copied_is_named(source, tmp_path):
    (source / "gone.bin").symlink_to(source / "nowhere")

    with pytest.raises(UserError, match=r"gone\.bin cannot be read: No such file"):
        copied(source, tmp_path / "out")


def test_too_little_room_is_said_before_anything_is_copied(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))

    with pytest.raises(UserError, match="are needed and 10"):
        copied(source, tmp_path / "out")

    assert not (tmp_path / "out/class_0").exists()


def test_an_empty_folder_holds_nothing_to_copy(tmp_path):
    (tmp_path / "empty").mkdir()

    with pytest.raises(UserError, match="holds no files"):
        copied(tmp_path / "empty", tmp_path / "out")


@pytest.mark.parametrize(
    ("target", "folder", "words"),
    [
        ("nowhere", "out", "is no folder"),
        ("source", "source/out", "is in"),
        ("source", "full", "is not empty"),
    ],
)
def test_folders_that_cannot_be_used_are_named(source, tmp_path, target, folder, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")

    with pytest.raises(UserError, match=words):
        shuffle_files(
            str(tmp_path / target), tmp_path / folder, seed=0, tell=lambda _progress: None
        )

    assert contents(tmp_path / "full") == {"mine.txt": b"mine"}


def test_files_of_one_folder_have_no_classes():
    assert folder_classes(["/a/1", "/a/2"]) is None
    assert folder_classes(["/a/1", "/b/2", "/a/3"]).tolist() == [0, 1, 0]
    assert folder_classes([]) is None


def test_files_lie_in_the_order_of_their_inodes(tmp_path):
    for name in "dacb":
        (tmp_path / name).write_text("x")
    paths = [str(tmp_path / name) for name in "abcd"]

    order = lying_order(paths)

    inodes = [Path(paths[number]).stat().st_ino for number in order]
    assert inodes == sorted(inodes)
    assert sorted(order) == [0, 1, 2, 3]


def test_a_link_lies_where_its_file_is(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).write_text("x")
    (tmp_path / "a").symlink_to(tmp_path / "second")

    inodes = {name: (tmp_path / name).stat().st_ino for name in ("first", "a")}
    first, second = lying_order([str(tmp_path / "a"), str(tmp_path / "first")])

    assert first == int(inodes["first"] < inodes["a"])
    assert second == 1 - first
