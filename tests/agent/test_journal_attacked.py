"""The undo journal under attack: full disks, kills, other programs. Nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.agent import journal_file
from flatout.agent.undo_journal import UNRECORDED_EXIT_CODE
from flatout.launch import rollback as rolling
from flatout.launch.rollback import restore, rollback
from tests.agent.test_undo_journal import CHANGES, command, fill, filled, listing

FAULTS = """
import builtins, errno, fcntl, io, os, random, shutil, signal, sys, threading, time
from pathlib import Path
from flatout.agent import undo_journal as journal, journal_file
calls, FAIL_AT, HOW, ONLY = 0, {at}, {how!r}, {only!r}
def faulty(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global calls
        is_inside = any(
            frame.f_globals.get("__name__", "").startswith("flatout.agent.undo_journal")
            for frame in frames()
        )
        if is_inside and name in ONLY and not (name == "write" and args[0] == 2):
            calls += 1
            if calls == FAIL_AT:
                if HOW == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if HOW == "short":
                    return real(args[0], args[1][: len(args[1]) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)
    setattr(os, name, call)
def frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
for name in ("write", "fsync", "rename"):
    faulty(name)
journal.install(Path(sys.argv[1]), (sys.argv[2],))
try:
{body}
except OSError:
    pass  # scripts go on after errors
Path(sys.argv[1], "came-through").touch()
"""
BODY = """
with open('model.pt', 'w') as f:
    f.write('new')
with open('old/b.txt', 'a') as f:
    f.write('more')
os.remove('old/c.txt')
Path('new').write_text('1')
os.rename('new', 'newer')
os.rename('out', 'runs')
Path('runs/w.pt').write_text('2')
os.remove('latest')
shutil.rmtree('runs/deep')
os.replace('newer', 'model.pt')
os.mkdir('n')
Path('n/x').write_text('3')
"""
EXITS = {"fail": UNRECORDED_EXIT_CODE, "short": UNRECORDED_EXIT_CODE, "kill": -signal.SIGKILL}


def run_with_fault(tmp_path, at, how, only, body=BODY):
    """Run the script with the N-th such call of the journal failing; return how it ended."""
    folder = tmp_path / "trial"
    folder.mkdir()
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    program = FAULTS.format(at=at, how=how, only=only, body=indented)
    argv = [sys.executable, "-c", program, str(folder), str(tmp_path / "skipped")]
    ended = subprocess.run(argv, cwd=tmp_path / "work", stderr=subprocess.DEVNULL, check=False)
    return ended.returncode, (folder / "came-through").exists()


@pytest.mark.chaos
def run_in_trial(tmp_path, work, body):
    (tmp_path / "trial").mkdir()
    return subprocess.run(
        command(tmp_path, body), cwd=work, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("how", "only"),
    [
        ("fail", ("write",)),
        ("short", ("write",)),
        ("kill", ("write",)),
        ("fail", ("fsync",)),
        ("fail", ("rename",)),
        ("kill", ("rename", "fsync")),
    ],
)
def test_whichever_call_of_the_journal_fails_the_trial_ends_and_nothing_is_lost(
    tmp_path, how, only
):
    for at in range(1, 200):
        place = tmp_path / str(at)
        place.mkdir()
        work = filled(place)
        before = listing(work)

        code, came_through = run_with_fault(place, at, how, only)
        undone = rollback(place / "trial")

        assert listing(work) == before, (at, undone)
        assert undone.failed == []
        if came_through:
            break
        assert code == EXITS[how], at
    assert at > 3


def test_a_full_disk_ends_a_script_that_ignores_every_error(tmp_path):
    """The kernel's own limit of a file's size, in the place of a full disk."""
    work = filled(tmp_path)
    before = listing(work)
    body = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
for number in range(100):
    try:
        Path(f'file{number}').write_text('x')
        Path('model.pt').write_text('new')
        os.remove('old/b.txt')
    except BaseException:
        pass
print('went on')
"""

    ended = run_in_trial(tmp_path, work, body)
    rollback(tmp_path / "trial")

    assert ended.returncode == UNRECORDED_EXIT_CODE
    assert "cannot be recorded, so it was not done" in ended.stderr
    assert ended.stdout == ""
    assert listing(work) == before


def test_a_full_disk_ends_a_script_that_writes_a_name_which_is_not_utf8(tmp_path):
    work = filled(tmp_path)
    before = listing(work)
    body = r"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    Path('\udcc7\udcd1.txt').write_text('x')
except BaseException:
    pass
print('went on')
"""

    ended = run_in_trial(tmp_path, work, body)

    assert ended.returncode == UNRECORDED_EXIT_CODE
    assert r"it was not done: " in ended.stderr
    assert r"\udcc7\udcd1.txt" in ended.stderr
    assert ended.stdout == ""
    assert listing(work) == before


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"7", b"null", b'["moved", 1, 2, 3, 4]', b'["other", "/x"]', b"[" * 99_999],
)
def test_a_line_that_cannot_be_read_stops_no_rollback(tmp_path, line):
    work = filled(tmp_path)
    before = listing(work)
    folder = ran(tmp_path, "os.remove('model.pt')")
    with (folder / "journal").open("ab") as file:
        file.write(line + b"\n")

    undone = rollback(folder)

    assert listing(work) == before
    assert [text[:9] for text in undone.kept] == ["a line of"]


def ran(tmp_path, body):
    """Run a script with its journal, and return the trial's folder."""
    folder = tmp_path / "trial"
    folder.mkdir(exist_ok=True)
    subprocess.run(command(tmp_path, body), cwd=tmp_path / "work", check=True)
    return folder


REPLACED = "Path('part').write_text('newer'); os.replace('part', {path!r})"
"""What another program does, a Python without the journal."""


def other_program(work, path):
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from pathlib import Path; " + REPLACED.format(path=path),
        ],
        cwd=work,
        check=True,
    )


@pytest.mark.parametrize(
    "body",
    [
        "Path('model.pt').write_text('x')",
        "open('model.pt', 'a').write('x')",
        "os.remove('model.pt')",
        "Path('t').write_text('x'); os.replace('t', 'model.pt')",
    ],
)
def test_what_another_program_put_in_place_of_a_file_is_not_overwritten(tmp_path, body):
    work = filled(tmp_path)
    folder = ran(tmp_path, body + "\nid(0)")
    other_program(work, "model.pt")

    undone = rollback(folder)

    assert (work / "model.pt").read_text() == "newer"
    assert (work / "model.pt.flatout-original").read_text() == "the user's model.pt"
    assert [line for line in undone.kept if "model.pt.flatout-original" in line] == undone.kept
    assert len(undone.kept) == 1


def test_a_new_file_that_another_program_replaced_is_not_deleted(tmp_path):
    work = filled(tmp_path)
    folder = ran(tmp_path, "Path('new').write_text('x')\nid(0)")
    other_program(work, "new")

    undone = rollback(folder)

    assert (work / "new").read_text() == "newer"
    assert undone.kept == [f"{work / 'new'} was made by another program and stays"]


def test_a_new_folder_is_not_removed_with_what_another_program_put_in_place_of_a_file(tmp_path):
    work = filled(tmp_path)
    folder = ran(tmp_path, "os.mkdir('n'); Path('n/x').write_text('x'); Path('n/y').touch()\nid(0)")
    other_program(work, "n/x")

    undone = rollback(folder)

    assert [path.name for path in (work / "n").iterdir()] == ["x"]
    assert (work / "n/x").read_text() == "newer"
    assert len(undone.kept) == 2


def test_the_script_itself_does_not_write_over_another_program_s_file(tmp_path):
    work = filled(tmp_path)
    other = REPLACED.format(path="model.pt").replace("'", '"')
    other = f"import os; from pathlib import Path; {other}"
    body = "Path('model.pt').write_text('x')\nimport subprocess\n"
    body += f"subprocess.run([sys.executable, '-S', '-c', {other!r}])\n"
    body += "Path('model.pt').write_text('y')"
    folder = ran(tmp_path, body)

    rollback(folder)

    assert (work / "model.pt").read_text() == "newer"
    assert (work / "model.pt.flatout-original").read_text() == "the user's model.pt"


def test_a_file_that_was_edited_after_the_trial_was_killed_is_not_overwritten(tmp_path):
    work = filled(tmp_path)
    folder = ran(tmp_path, "Path('model.pt').write_text('x'); Path('new').write_text('x')\nid(0)")
    for path in (folder, *folder.iterdir()):
        os.utime(path, (1_650_000_000, 1_650_000_000))
    os.utime(work / "new", (1_650_000_000, 1_650_000_000))
    (work / "model.pt").write_text("edited in place")

    rollback(folder, ended=False)

    assert (work / "model.pt").read_text() == "edited in place"
    assert (work / "model.pt.flatout-original").read_text() == "the user's model.pt"
    assert not (work / "new").exists()


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_after_a_clock_step_a_file_that_was_edited_since_is_not_overwritten(
    tmp_path, monkeypatch, step_s
):
    work = filled(tmp_path)
    folder = ran(tmp_path, "Path('model.pt').write_text('x')\nid(0)")
    set_clock(monkeypatch, step_s)
    (work / "model.pt").write_text("edited in place")
    os.utime(work / "model.pt", (time.time() + step_s,) * 2)

    rollback(folder, ended=False)

    assert (work / "model.pt").read_text() == "edited in place"
    assert (work / "model.pt.flatout-original").read_text() == "the user's model.pt"


def set_clock(monkeypatch, step_s):
    """Let rollback find the wall clock set by so much since the trial began."""
    now_s = journal_file.clock_offset_s()
    monkeypatch.setattr(rolling, "clock_offset_s", lambda: now_s + step_s)


@pytest.mark.parametrize("step_s", [-3600, 0])
def test_a_file_from_the_future_that_a_program_moved_to_a_new_folder_is_not_deleted(
    tmp_path, monkeypatch, step_s
):
    work = filled(tmp_path)
    os.utime(work / "model.pt", (time.time() + (1000 if step_s == 0 else 1),) * 2)
    body = "os.mkdir('n'); import subprocess; subprocess.run(['mv', 'model.pt', 'n/'], check=True)"
    folder = ran(tmp_path, body)
    set_clock(monkeypatch, step_s)

    undone = rollback(folder)

    assert (work / "n/model.pt").read_text() == "the user's model.pt"
    assert [line for line in undone.kept if "stays" in line] != []


def test_a_clock_that_nobody_set_leaves_rollback_as_it_is(tmp_path):
    work = filled(tmp_path)
    before = listing(work)
    body = "os.mkdir('n'); import subprocess; subprocess.run(['touch', 'n/unseen'], check=True)"

    undone = rollback(ran(tmp_path, body))

    assert (listing(work), undone.kept) == (before, [])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_second_trial_touches_no_original_where_a_killed_one_was_not_rolled_back(tmp_path, order):
    work = filled(tmp_path)
    before = listing(work)
    body = "Path('model.pt').write_text('trial'); os.remove('old/b.txt')\nid(0)"
    folders, codes = [], []
    for name in ("trial-a", "trial-b"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        argv = command(tmp_path, body)
        argv[-2] = str(folders[-1])
        codes.append(subprocess.run(argv, cwd=work, check=False).returncode)

    undone = [rollback(folders[index]) for index in order]

    assert codes == [0, UNRECORDED_EXIT_CODE]
    assert listing(work) == before
    assert [one.differences for one in undone] == [(), ()]


def second_of_two(tmp_path, body, other):
    """Return a trial that ran while another one was at work in its folder; both are undone."""
    work = filled(tmp_path)
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial-b").mkdir()
    body += "; print('ready', flush=True); time.sleep(60)"
    first = subprocess.Popen(command(tmp_path, body), cwd=work, stdout=subprocess.PIPE)
    try:
        first.stdout.readline()
        argv = command(tmp_path, other)
        argv[-2] = str(tmp_path / "trial-b")
        second = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=False)
    finally:
        first.kill()
        first.communicate()
    rollback(tmp_path / "trial-b")
    rollback(tmp_path / "trial")
    assert listing(work) == reference(tmp_path)
    return second


def test_a_second_trial_does_not_begin_to_move_files_where_one_is_at_work(tmp_path):
    other = "Path('old/b.txt').write_text(''); Path('model.pt').write_text('y')"

    second = second_of_two(tmp_path, "Path('model.pt').write_text('x')", other)

    assert second.returncode == UNRECORDED_EXIT_CODE
    assert "another trial has moved files aside there" in second.stderr


def test_trials_that_compile_do_not_wait_for_each_other(tmp_path):
    # A compiler writes into a new folder, which the script then removes, as all temporary ones.
    body = "os.mkdir('{0}'); os.system('echo x > {0}/f'); shutil.rmtree('{0}')"

    second = second_of_two(tmp_path, body.format("t1"), body.format("t2"))

    assert second.returncode == 0, second.stderr


@pytest.mark.parametrize("name", ["n", "m"])
def test_a_new_folder_into_which_an_original_went_is_noted_alongside_it(tmp_path, name):
    work = filled(tmp_path)
    body = f"os.mkdir('n'); os.rename('old', 'n/old'); os.rename('n', '{name}')\n"

    ran(tmp_path, f"{body}shutil.rmtree('{name}')")

    (alongside,) = work.glob(f"{journal_file.BESIDE}*")
    assert f'["tree", "{work}/{name}"' in alongside.read_text()


BOTH_WRITE = {
    "a new file that both make": ("Path('f').write_text('a')", "Path('f').write_text('b')"),
    "a file that one moved to another folder": (
        "os.rename('model.pt', 'old/m.pt')",
        "os.remove('old/m.pt')",
    ),
    "a file in a folder that one moved": (
        "os.rename('old', 'older')",
        "Path('older/b.txt').write_text('b')",
    ),
    "a folder in which one changed a file": (
        "Path('old/b.txt').write_text('a')",
        "os.rename('old', 'older')",
    ),
    "a tree that one removed": ("shutil.rmtree('old')", "Path('old').mkdir()"),
    "a folder that one made": ("os.mkdir('n')", "Path('n/f').write_text('b')"),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", BOTH_WRITE)
def test_of_two_live_trials_that_change_one_file_the_second_ends(tmp_path, name, order):
    work = filled(tmp_path)
    before = listing(work)
    folders = [tmp_path / name for name in ("trial-a", "trial-b")]
    held = []
    for folder in folders:
        folder.mkdir()
        held.append(journal_file.open_claims(folder))  # as the supervisor does
    first, second = (command(tmp_path, body) for body in BOTH_WRITE[name])
    first[2] += "print('ready', flush=True); time.sleep(60)"
    first[-2], second[-2] = map(str, folders)
    a = subprocess.Popen(first, cwd=work, stdout=subprocess.PIPE)
    try:
        a.stdout.readline()
        b = subprocess.run(second, cwd=work, capture_output=True, text=True, check=False)
    finally:
        a.kill()
        a.communicate()
    undone = [rollback(folders[index]) for index in order]
    for number in held:
        os.close(number)

    assert b.returncode == UNRECORDED_EXIT_CODE
    assert "another trial that runs uses it" in b.stderr
    assert listing(work) == before
    assert [one.differences for one in undone] == [(), ()]


def test_trials_with_files_of_their_own_do_not_disturb_each_other(tmp_path):
    work = filled(tmp_path)
    before = listing(work)
    bodies = (
        "Path('old/b.txt').write_text('a'); Path('m').write_text('')",
        "Path('out/best.pt').unlink(); Path('n').write_text('b'); Path('empty/n').write_text('')",
    )
    folders, held = [], []
    for name, body in zip("ab", bodies, strict=True):
        folders.append(tmp_path / f"trial-{name}")
        folders[-1].mkdir()
        held.append(journal_file.open_claims(folders[-1]))
        argv = command(tmp_path, body)
        argv[-2] = str(folders[-1])
        subprocess.run(argv, cwd=work, check=True)

    undone = [rollback(folder).differences for folder in folders]
    for number in held:
        os.close(number)

    assert (listing(work), undone) == (before, [(), ()])


def reference(tmp_path):
    work = tmp_path / "reference"
    work.mkdir()
    fill(work)
    return listing(work)


ORIGINALS = [name for name in CHANGES if "journal" not in name and "other programs" not in name]


@pytest.mark.chaos
@pytest.mark.parametrize("name", ORIGINALS)
def test_the_folder_alone_is_enough_to_put_originals_back(tmp_path, name):
    work = filled(tmp_path)
    before = listing(work)
    folder = ran(tmp_path, CHANGES[name])
    for path in folder.iterdir():
        path.unlink()  # the cache is gone

    undone, num_used = restore(work)

    after = listing(work)
    lost = {path: what for path, what in before.items() if after.get(path) != what}
    assert (lost, undone.failed, num_used) == ({}, [], 0)
    assert not [path for path in work.rglob("*") if path.name.startswith(journal_file.BESIDE)]


def test_a_folder_that_had_another_name_in_a_container_is_put_right(tmp_path):
    work = filled(tmp_path)
    before = listing(work)
    ran(tmp_path, "os.remove('model.pt'); shutil.rmtree('out')")
    moved = work.rename(tmp_path / "on the host")

    refused, _ = restore(moved)
    undone, _ = restore(moved, work)

    assert [line for line in refused.failed if "left alone" in line] == refused.failed
    assert len(refused.failed) == 2
    assert (undone.failed, listing(moved)) == ([], before)


def test_a_planted_journal_changes_nothing_outside_the_folder(tmp_path):
    (tmp_path / "secret").write_text("mine")
    work = tmp_path / "work"
    work.mkdir()
    (work / "link").symlink_to(tmp_path)
    planted = work / ".x.flatout-1-0"
    planted.write_text("planted")
    lines = [
        journal_file._line("moved", str(tmp_path / "secret"), str(planted), 0),
        journal_file._line("moved", str(work / "link/secret"), str(planted), 0),
        journal_file._line("renamed", str(work / "got"), str(tmp_path / "secret"), 0),
        journal_file._line("tree", str(work / ".."), str(planted), 0),
        journal_file._line("new", str(tmp_path / "secret"), None, 0),
    ]
    (work / ".flatout-journal-trial-x").write_bytes(b"".join(lines))

    undone, _ = restore(work)

    assert (tmp_path / "secret").read_text() == "mine"
    assert len(undone.failed) == len(lines)


def test_a_journal_in_a_strangers_folder_changes_nothing_next_to_that(tmp_path):
    """As of an unpacked archive, where the folder above is put right."""
    home, folder = tmp_path / "home", tmp_path / "home/downloads/repository"
    folder.mkdir(parents=True)
    for name in ("settings", "linked", "moved"):
        (home / name).write_text("mine")
    planted = folder / ".x.flatout-1-0"
    planted.write_text("planted")
    lines = [
        journal_file._line("moved", str(home / "settings"), str(planted), 0),
        journal_file._line("tree", str(home / "downloads"), str(planted), 0),
        journal_file._line("link", str(home / "linked"), "/etc/passwd", 0),
        journal_file._line("new", str(home / "moved"), None, 0),
        journal_file._line("renamed", str(folder / "got"), str(home / "moved"), 0),
    ]
    (folder / ".flatout-journal-trial-x").write_bytes(b"".join(lines))

    undone, _ = restore(home)

    assert [(home / name).read_text() for name in ("settings", "linked", "moved")] == ["mine"] * 3
    assert len(undone.failed) == len(lines)


@pytest.mark.parametrize("other", [None, "", ".", "aside", "/", "a\0b"])
@pytest.mark.parametrize("kind", ["moved", "copied", "tree", "renamed"])
def test_a_damaged_entry_does_not_touch_the_current_folder(tmp_path, monkeypatch, kind, other):
    """shutil.move copies a folder and removes it where it cannot be renamed, "." too."""
    work, here = filled(tmp_path), tmp_path / "here"
    (here / "aside").mkdir(parents=True)
    (here / "aside" / "mine").write_text("mine")
    monkeypatch.chdir(here)
    before = listing(work)
    line = journal_file._line(kind, str(work / "gone"), other, 0)
    (work / ".flatout-journal-trial-x").write_bytes(line)
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "journal").write_bytes(line)

    restore(work)
    if other != "/":
        rollback(tmp_path / "trial")

    assert (here / "aside" / "mine").read_text() == "mine"
    (work / ".flatout-journal-trial-x").unlink(missing_ok=True)
    assert listing(work) == before


def test_what_could_not_be_put_back_is_named_and_tried_again(tmp_path, monkeypatch):
    work = filled(tmp_path)
    before = listing(work)
    folder = ran(tmp_path, "os.remove('model.pt'); os.remove('old/b.txt'); os.mkdir('n')")
    real = Path.replace
    names = []

    def fails(self, target):
        if str(target).endswith("model.pt"):
            names.append(target)
            raise OSError(5, "Input/output error")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        first = rollback(folder)
    second = rollback(folder)

    assert len(first.failed) == 1
    assert "model.pt could not be put back: Input/output error" in first.failed[0]
    assert second.failed == []
    assert listing(work) == before
