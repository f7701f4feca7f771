"""A folder is held by one pack at a time, from before its source is looked at until it is tidy."""

import errno
import fcntl
import threading
from pathlib import Path

import numpy as np
import pytest

from flatout.data import staging, writer
from flatout.data.writer import PackOptions
from flatout.records.errors import UserError
from flatout.workflow import pack as verb
from tests.data.packs import image_folder


@pytest.fixture
def impatient(monkeypatch):
    """Do not wait long for a folder."""
    monkeypatch.setattr(staging, "LOCK_WAIT_S", 0.2)


def packed(source, folder):
    return verb.pack(str(source), folder, PackOptions(), lambda _progress: None)


@pytest.mark.usefixtures("impatient")
def test_a_second_pack_leaves_alone_what_the_first_still_converts(tmp_path, monkeypatch):
    source = image_folder(tmp_path / "photos")
    plain, seen = verb.open_source, []

    def converting(target, *, work, on_bad):
        if not seen:
            seen.append(work / "half.draft")
            seen[0].write_bytes(b"converted so far")
            with pytest.raises(UserError, match="another process is packing into"):
                packed(source, tmp_path / "a")
            assert seen[0].read_bytes() == b"converted so far"
        return plain(target, work=work, on_bad=on_bad)

    monkeypatch.setattr(verb, "open_source", converting)

    assert packed(source, tmp_path / "a").header.samples == 12
    assert seen
    assert not (tmp_path / "a/.pack").exists()


def test_who_waited_for_a_lock_that_was_removed_does_not_hold_the_folder(tmp_path):
    with staging.locked(tmp_path / "a"):
        waiting = staging._opened(tmp_path / "a")

    with staging.locked(tmp_path / "a"):
        assert not staging._is_ours(waiting, tmp_path / "a")


@pytest.mark.usefixtures("impatient")
def test_who_waited_holds_the_folder_afterwards(tmp_path):
    inside, end = threading.Event(), threading.Event()

    def second():
        with staging.locked(tmp_path / "a"):
            inside.set()
            end.wait(30)

    thread = threading.Thread(target=second)
    with staging.locked(tmp_path / "a"):
        assert not inside.is_set()
    thread.start()
    assert inside.wait(30)

    with pytest.raises(UserError, match="another process"), staging.locked(tmp_path / "a"):
        pass
    end.set()
    thread.join()
    assert not (tmp_path / "a").exists()


@pytest.fixture
def without_locks(tmp_path, monkeypatch):
    """Refuse locks below a folder, as Lustre does that is mounted without them."""
    plain, away = fcntl.flock, tmp_path / "away"

    def flock(descriptor, how):
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(away):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        plain(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return away


@pytest.mark.usefixtures("impatient")
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks for names as on Linux")
def test_a_folder_that_cannot_be_locked_is_held_by_one_pack_of_this_host(without_locks):
    for _ in range(2):
        with staging.locked(without_locks / "a"):
            with pytest.raises(UserError, match="another"), staging.locked(without_locks / "a"):
                pass
            with staging.locked(without_locks / "b"):
                pass


def test_where_nothing_can_be_locked_it_is_said(tmp_path, monkeypatch):
    def flock(_descriptor, _how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)

    with (
        pytest.raises(UserError, match="cannot be locked: Function not impl"),
        staging.locked(tmp_path / "a"),
    ):
        pass


def test_a_pack_that_never_began_leaves_none_of_the_folders_it_made(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((0, 2)))
    (tmp_path / "there").mkdir()

    with pytest.raises(UserError, match="nothing to pack"):
        packed(tmp_path / "a.npy", tmp_path / "there/b/c")

    assert list((tmp_path / "there").iterdir()) == []


def test_a_folder_that_was_there_before_stays(tmp_path):
    (tmp_path / "a").mkdir()

    with staging.locked(tmp_path / "a"):
        pass

    assert list((tmp_path / "a").iterdir()) == []


def test_a_finished_store_keeps_nothing_of_the_pack(tmp_path):
    (tmp_path / "a/.pack/more").mkdir(parents=True)
    (tmp_path / "a/.pack/plan.json").write_text("{}")
    (tmp_path / "a/header.json").write_text("{}")

    with staging.locked(tmp_path / "a"):
        pass

    assert [path.name for path in (tmp_path / "a").iterdir()] == ["header.json"]


def test_a_header_that_a_kill_left_half_written_is_removed_by_the_next_pack(tmp_path, monkeypatch):
    def killed(_header, folder):
        (folder / ".header.json.ab12cd").write_text("{")
        raise KeyboardInterrupt

    source = image_folder(tmp_path / "photos")
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_header", killed)
        patch.setattr(staging, "remove_drafts", lambda _folder: None)
        with pytest.raises(KeyboardInterrupt):
            packed(source, tmp_path / "a")

    packed(source, tmp_path / "a")

    assert [path.name for path in (tmp_path / "a").glob(".*")] == []


@pytest.mark.parametrize("data", [b"", b"PK\3\4 no archive", b"\0" * 100])
def test_a_damaged_part_of_an_interrupted_pack_is_named(tmp_path, data):
    path = staging.part_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(data)

    with pytest.raises(UserError, match=r"part-00000.npz cannot be read: .*; remove it and run"):
        staging.read_part(tmp_path, 0)
