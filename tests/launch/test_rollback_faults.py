"""A rollback whose N-th call fails, or that is killed there, for every N: the next one ends it."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from flatout.agent.journal_file import Entry, JournalWriter
from flatout.launch import rollback as rolling
from flatout.launch.rollback import KEPT_SUFFIX, rollback, undo
from flatout.launch.trial_process import _discard
from tests.agent.test_journal_attacked import ran
from tests.agent.test_journal_races import ended, forked
from tests.agent.test_undo_journal import filled, listing

CALLS = frozenset(
    {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.symlink"}
    | {"os.utime", "os.listdir", "os.scandir", "fsync"}
)
"""What a rollback does, reads included, as the interpreter announces it before it happens."""
BODY = """
Path('model.pt').rename('b')
Path('model.pt').write_text('n')
with open('old/b.txt', 'a') as f:
    f.write('more')
os.remove('old/c.txt')
os.rename('out', 'runs')
Path('runs/w.pt').write_text('2')
os.remove('latest')
shutil.rmtree('runs/deep')
os.mkdir('n')
Path('n/x').write_text('3')
os.rename('b', 'n/b')
os.rmdir('empty')
id(0)
"""


def faulty_rollback(folder, at, how):
    """Roll back with the N-th call failing (once, or all from there on), or killed there."""
    count = 0

    def fault(event, args):
        nonlocal count
        if event not in CALLS or (event == "open" and not str(args[0]).startswith(str(folder))):
            return
        count += 1
        if count < at or (how == "once" and count > at):
            return
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    real = os.fsync

    def fsync(number):
        sys.audit("fsync")
        real(number)

    os.fsync = fsync
    sys.addaudithook(fault)
    rollback(folder)
    os._exit(0 if count < at else 3)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("how", [pytest.param("once", marks=pytest.mark.smoke), "for ever", "kill"])
def test_whichever_call_of_a_rollback_fails_the_next_one_ends_it(tmp_path, how):
    for at in range(1, 400):
        place = tmp_path / str(at)
        place.mkdir()
        work = filled(place)
        before = listing(work)
        folder = ran(place, BODY)

        code = ended(forked(work, faulty_rollback, folder, at, how))
        _discard(folder)  # as flatout does when its supervisor has rolled back
        second = rollback(folder) if folder.exists() else rolling.Undone()

        after = listing(work)
        assert {name: after.get(name) for name in before} == before, (at, second)
        # What was in the way has this name, and a line that says so.
        assert all(name.endswith(KEPT_SUFFIX) for name in after.keys() - before.keys()), at
        assert second.failed == []
        assert code in (0, 3, -signal.SIGKILL), at
        if code == 0:
            break
    assert at > 20


def test_a_journal_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    work = filled(tmp_path)
    before = listing(work)
    folder = ran(tmp_path, "os.remove('model.pt')")
    real = Path.read_bytes

    def fails(path):
        if path == folder / "journal":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fails)
        first = rollback(folder)
        _discard(folder)
    second = rollback(folder)

    assert "Too many open files" in first.failed[0]
    assert (second.failed, listing(work)) == ([], before)


def test_a_copy_that_finds_no_room_stays_where_nothing_can_be_noted_either(tmp_path, monkeypatch):
    """The disk is full: neither does the original fit, nor a note that it did not."""
    work, folder = filled(tmp_path), tmp_path / "trial"
    folder.mkdir()
    aside = folder / ".model.pt.flatout-1-0"
    aside.write_text("the user's model.pt")
    writer = JournalWriter(folder)
    writer.note_original("copied", str(work / "model.pt"), str(aside))
    writer.note("new", str(work / "made"))
    (work / "model.pt").write_text("of the trial")
    (work / "made").write_text("of the trial")

    def full(*arguments):
        if arguments[0].kind == "copied":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        undo(*arguments)

    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(rolling, "undo", full)
        patch.setattr(rolling, "_write_lines", no_room)
        first = rollback(folder)
        _discard(folder)
    kept = aside.exists()
    second = rollback(folder)

    assert kept
    assert "No space left on device" in " ".join(first.failed)
    assert second.failed == []
    assert (work / "model.pt").read_text() == "the user's model.pt"
    assert not (work / "made").exists()


def test_of_many_new_files_each_costs_what_one_does(tmp_path):
    work, folder = tmp_path / "work", tmp_path / "trial"
    work.mkdir()
    folder.mkdir()
    writer = JournalWriter(folder)
    for number in range(10_000):
        path = work / str(number)
        writer.note("new", str(path))
        path.touch()
        writer.note("made", str(path), path.lstat().st_ino)
    began_s = time.process_time()

    undone = rollback(folder)

    assert time.process_time() - began_s < 5  # half a minute where each looks at all others
    assert (undone.num_entries, undone.differences) == (10_000, ())
    assert not any(work.iterdir())


def test_to_rename_a_file_looks_at_no_other_and_to_rename_a_folder_at_what_is_in_it():
    entries = []
    for number in range(10_000):
        name = f"/work/{number}"
        entries.append(Entry("new", f"{name}.part", None, 0, 0))
        entries.append(Entry("renamed", f"{name}.part", name, 0, 0))
        entries.append(Entry("made", name, None, number, 0))
    began_s = time.process_time()

    owned = rolling._owned(entries)

    assert time.process_time() - began_s < 5  # many times that where each looks at all others
    assert [owned[3 * number] for number in range(10_000)] == [{n} for n in range(10_000)]
    entries += [
        Entry("renamed", "/work", "/other", 0, 0),
        Entry("renamed", "/other", "/third/work", 0, 0),
        Entry("made", "/third/work/7", None, -1, 0),
    ]
    assert rolling._owned(entries)[21] == {7, -1}
