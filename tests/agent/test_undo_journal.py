"""The undo journal, in real processes: an audit hook can not be taken away again."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flatout.launch import rollback as rolling
from flatout.launch.rollback import rollback, undo

PROGRAM = """
import os, shutil, sys, threading, time
from pathlib import Path
from flatout.agent import undo_journal as journal
journal.install(Path(sys.argv[1]), (sys.argv[2],))
{body}
"""


def run(tmp_path, body):
    folder, work = tmp_path / "trial", tmp_path / "work"
    folder.mkdir()
    work.mkdir(exist_ok=True)
    subprocess.run(command(tmp_path, body), cwd=work, check=True)
    return folder, work


def files(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "body",
    [
        "open('model.pt', 'w').write('new')",
        "open('model.pt', 'a').write('more')",
        "open('model.pt', 'r+').write('XX')",
        "Path('model.pt').unlink()",
        "import os; os.rename('model.pt', 'other.pt')",
        "open('tmp', 'w').write('new'); import os; os.replace('tmp', 'model.pt')",
        "import os; os.truncate('model.pt', 0)",
        "import os; f = os.open('model.pt', os.O_WRONLY | os.O_TRUNC); os.write(f, b'z')",
        "Path('runs').mkdir(); open('runs/events', 'w').write('x')",
        "import os; os.makedirs('a/b/c'); open('a/b/c/d', 'w').write('x')",
        "import shutil; shutil.copy('model.pt', 'copy.pt')",
        "import os\nif os.fork() == 0:\n open('model.pt', 'w').write('child'); os._exit(0)\n"
        "os.wait()",
    ],
)
def test_folder_is_as_before_after_rollback(tmp_path, body):
    work = tmp_path / "work"
    work.mkdir()
    (work / "model.pt").write_text("old")

    folder, work = run(tmp_path, body)
    rollback(folder)

    assert files(work) == {"model.pt": "old"}
    assert [p for p in work.iterdir() if p.is_dir()] == []


@pytest.mark.chaos
def test_rollback_works_after_a_crash_in_mid_write(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "model.pt").write_text("old")
    folder, work = run(tmp_path, "open('model.pt', 'w').write('new')")
    with (folder / "journal").open("a") as half:
        half.write('["moved", "/half')

    rollback(folder)

    assert files(work) == {"model.pt": "old"}


def test_rolling_back_twice_is_harmless(tmp_path):
    folder, work = run(tmp_path, "open('model.pt', 'w').write('new')")

    assert rollback(folder).num_entries == 1
    assert rollback(folder).num_entries == 0
    assert files(work) == {}


def test_folders_that_are_nobodys_are_left_alone(tmp_path):
    skipped = tmp_path / "skipped"
    skipped.mkdir()

    folder, _ = run(tmp_path, f"open({str(skipped / 'cache')!r}, 'w').write('kept')")

    assert rollback(folder).num_entries == 0
    assert files(skipped) == {"cache": "kept"}


def test_reading_is_not_noted(tmp_path):
    folder, _ = run(tmp_path, "open(__import__('os').__file__).read()")

    assert rollback(folder).num_entries == 0


def command(tmp_path, body):
    program = PROGRAM.format(body=body)
    return [sys.executable, "-c", program, str(tmp_path / "trial"), str(tmp_path / "skipped")]


def filled(tmp_path):
    """Return a folder with what users have in it."""
    work = tmp_path / "work"
    work.mkdir()
    fill(work)
    return work


def fill(work):
    """Make what users have: checkpoints, links to them, read-only data, an empty folder."""
    (work / "out" / "deep").mkdir(parents=True)
    (work / "old").mkdir()
    (work / "empty").mkdir(mode=0o750)
    for name in ("model.pt", "out/best.pt", "out/deep/a.txt", "old/b.txt", "old/c.txt"):
        (work / name).write_text(f"the user's {name}")
        os.utime(work / name, (1_600_000_000, 1_600_000_000))
    (work / "latest").symlink_to("out/best.pt")
    (work / "newest").symlink_to("out")
    (work / "dangling").symlink_to("nowhere")
    for name in ("latest", "newest", "dangling"):
        os.utime(work / name, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
    (work / "out/best.pt").chmod(0o400)
    (work / "out/deep").chmod(0o555)


def listing(folder):
    """Return names, kinds, modes, contents, links and times; a folder's time is no file's."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        if path.is_symlink():
            what = (str(path.readlink()), status.st_mtime_ns)
        elif path.is_dir():
            what = None
        else:
            what = (path.read_text(), status.st_mtime_ns)
        found[str(path.relative_to(folder))] = (oct(status.st_mode), what)
    return found


SAVE = "Path(p).mkdir(); Path(p, 'w.pt').write_text('new'); Path(p, 'best.pt').write_text('n')"
REPORTED = "shutil.rmtree('out'); os.remove('latest'); os.makedirs('backup')\n"
REPORTED += "os.rename('old', 'backup/old')"
FD = "fd = os.open('out', os.O_RDONLY)\n"
CHANGES = {
    "as reported": REPORTED,
    "rmtree": "shutil.rmtree('out')",
    "rmtree of a path in bytes": "shutil.rmtree(b'out')",
    "rmtree, made again": f"shutil.rmtree('out'); p = 'out'; {SAVE}",
    "rmtree, a file of its name": "shutil.rmtree('out'); Path('out').write_text('new')",
    "rotation": f"for _ in range(3):\n p = 'out'; shutil.rmtree(p); {SAVE}",
    "rotation by rename": "for _ in range(3):\n p = 'tmp'; "
    f"{SAVE}; shutil.rmtree('out'); os.rename('tmp', 'out')",
    "rmtree of a link fails": "shutil.rmtree('newest', ignore_errors=True)",
    "rmtree through a link": "shutil.rmtree('newest/deep')",
    "rmtree of what was moved in": "os.mkdir('n'); os.rename('old', 'n/old'); shutil.rmtree('n')",
    "rmtree of what was written": "Path('old/b.txt').write_text('x'); shutil.rmtree('old')",
    "rmtree of our working folder": "os.chdir('old'); shutil.rmtree('../old')",
    "rmtree in a child": "if os.fork() == 0:\n shutil.rmtree('out'); os._exit(0)\nos.wait()",
    "by descriptor": FD + "os.unlink('best.pt', dir_fd=fd); os.mkdir('m', dir_fd=fd)\n"
    "os.rename('deep', 'd', src_dir_fd=fd, dst_dir_fd=fd)",
    "link by descriptor": FD + "os.symlink('x', 'y', dir_fd=fd); os.link('model.pt', 'h', "
    "dst_dir_fd=fd); os.mkdir('z', dir_fd=fd); os.rmdir('z', dir_fd=fd)",
    "files one by one": "for p in Path('old').iterdir():\n p.unlink()\nos.rmdir('old')",
    "rmdir": "os.rmdir('empty')",
    "rmdir, a file of its name": "os.rmdir('empty'); Path('empty').write_text('x')",
    "rmdir that fails": "try:\n os.rmdir('old')\nexcept OSError:\n pass",
    "removed, a folder of its name": f"os.remove('model.pt'); p = 'model.pt'; {SAVE}",
    "moved into a new folder": "os.makedirs('n/m'); os.rename('old', 'n/m/old')",
    "moved, then changed": "os.rename('old', 'n'); Path('n/b.txt').write_text('x'); "
    "os.remove('n/c.txt'); Path('n/new').write_text('x')",
    "moved, another in its place": f"os.rename('old', 'n'); p = 'old'; {SAVE}",
    "chain of folders": "os.rename('old', 'b'); os.rename('b', 'c'); os.rename('c', 'd')",
    "chain of files": "os.rename('model.pt', 'b'); os.rename('b', 'c')\n"
    "Path('model.pt').write_text('n'); Path('c').write_text('n')",
    "swap": "os.rename('old', 't'); os.rename('out', 'old'); os.rename('t', 'out')",
    "onto an empty folder": "os.rename('old', 'empty')",
    "onto a full folder": "try:\n os.rename('old', 'out')\nexcept OSError:\n pass",
    "onto itself": "os.rename('model.pt', 'model.pt')",
    "out of the journal": "os.mkdir({skipped}); shutil.move('old', {skipped} + '/old')\n"
    "shutil.move('model.pt', {skipped}); shutil.rmtree({skipped})",
    "link removed": "os.remove('latest'); os.remove('newest'); os.remove('dangling')",
    "link renamed": "os.rename('latest', 'l'); os.rename('newest', 'n')",
    "link replaced": "for _ in range(2):\n os.symlink('model.pt', 't'); os.replace('t', 'latest')",
    "link replaced by a folder": f"os.remove('newest'); p = 'newest'; {SAVE}",
    "written through a link": "Path('dangling').write_text('x'); "
    "Path('newest/deep/a.txt').write_text('x')",
    "hard link": "os.link('model.pt', 'h'); open('h', 'w').write('x')",
    "hard link replaced": "os.link('model.pt', 'h'); os.replace('h', 'model.pt')",
    "long name": "p = Path('\u00e9' * 120); p.write_text('1')\nif os.fork() == 0:\n "
    "p.write_text('2'); os._exit(0)\nos.wait()",
    "other programs write in a new folder": "os.makedirs('n/m')\n"
    "os.system('echo x > n/m/f; mkdir n/k; echo y > n/k/g')",
    "nothing": "pass",
}


@pytest.mark.parametrize("name", CHANGES)
def test_everything_is_as_before_after_rollback(tmp_path, name):
    work = filled(tmp_path)
    before = listing(work)

    folder, work = run(tmp_path, CHANGES[name].replace("{skipped}", repr(f"{tmp_path}/skipped")))
    rollback(folder)

    assert listing(work) == before


def test_script_finds_what_it_expects_after_its_changes(tmp_path):
    work = filled(tmp_path)

    run(tmp_path, REPORTED + f"\np = 'out'; {SAVE}; os.rmdir('empty')")

    assert {p.name for p in work.iterdir() if not p.name.startswith(".")} == {
        *("model.pt", "backup", "out", "newest", "dangling")
    }
    assert {p.name for p in (work / "out").iterdir()} == {"w.pt", "best.pt"}
    assert (work / "backup/old/b.txt").read_text() == "the user's old/b.txt"


def test_what_another_program_moved_into_a_new_folder_is_kept(tmp_path):
    work = filled(tmp_path)

    folder, work = run(tmp_path, "os.mkdir('backup'); os.system('mv old backup/old')")
    rollback(folder)

    assert (work / "backup/old/b.txt").read_text() == "the user's old/b.txt"


def test_what_another_program_put_in_the_place_of_a_renamed_folder_gives_way(tmp_path):
    work = filled(tmp_path)

    folder, work = run(tmp_path, "os.rename('old', 'n'); os.system('mkdir old; echo x > old/x')")
    rollback(folder)

    assert (work / "old/b.txt").read_text() == "the user's old/b.txt"
    assert (work / "old.flatout-kept/x").read_text() == "x\n"


def test_checkpoints_that_the_trial_made_are_not_kept_when_it_removes_them(tmp_path):
    _, work = run(tmp_path, f"for p in 'ab':\n {SAVE}\n shutil.rmtree(p)")

    assert list(work.iterdir()) == []


WITHOUT_RIGHTS = """
import os
import flatout.agent.undo_journal
if os.getuid() == 0:
    os.setuid(65534)
"""
"""Root may rename in every folder."""


@pytest.mark.chaos
@pytest.mark.parametrize("num_undone", range(5))
def test_a_rollback_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch, num_undone):
    work = filled(tmp_path)
    before = listing(work)
    body = "os.rename('model.pt', 'b'); Path('model.pt').write_text('new'); os.remove('latest'); "
    folder, work = run(tmp_path, body + "os.mkdir('n')")
    calls = itertools.count()

    def killed(*entry):
        if next(calls) == num_undone:
            undo(*entry)  # and killed before the entry is cut off
            raise KeyboardInterrupt
        undo(*entry)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(rolling, "undo", killed)
        rollback(folder)
    rollback(folder)

    assert listing(work) == before


@pytest.mark.chaos
def test_killed_in_the_middle_and_rolled_back_by_the_parent(tmp_path):
    folder, work = tmp_path / "trial", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    fill(work)
    before = listing(work)
    body = f"{REPORTED}; p = 'out'; {SAVE}\nos.replace('newest', 'latest')\n"
    body += "for i in range(10**9):\n print(i, flush=True)\n"
    body += " os.rename('model.pt', 'm'); Path('model.pt').write_text('x')\n"
    body += " os.replace('m', 'model.pt'); shutil.rmtree('out'); os.mkdir('out')"

    with subprocess.Popen(command(tmp_path, body), cwd=work, stdout=subprocess.PIPE) as child:
        for _ in range(20):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    rollback(folder)

    assert listing(work) == before


def test_another_thread_is_journaled_while_one_copies(tmp_path):
    work = filled(tmp_path)
    before = listing(work)
    body = """
copy = shutil.copy2
is_copying = threading.Event()
def slow(*args):
    is_copying.set()
    time.sleep(0.3)
    return copy(*args)
shutil.copy2 = slow
large = threading.Thread(target=lambda: open('old/c.txt', 'a').write('more'))
large.start()
is_copying.wait()
open('model.pt', 'w').write('new')
os.remove('old/b.txt')
large.join()
"""

    folder, work = run(tmp_path, body)
    rollback(folder)

    assert listing(work) == before


def test_a_child_forked_while_another_thread_copies_is_not_stuck(tmp_path):
    work = filled(tmp_path)
    before = listing(work)
    body = """
copy = shutil.copy2
is_copying, is_over = threading.Event(), threading.Event()
def slow(*args):
    is_copying.set()
    is_over.wait()
    return copy(*args)
shutil.copy2 = slow
large = threading.Thread(target=lambda: open('old/c.txt', 'a').write('more'))
large.start()
is_copying.wait()
if os.fork() == 0:
    open('model.pt', 'w').write('new')
    os._exit(0)
os.wait()
is_over.set()
large.join()
"""

    folder, work = run(tmp_path, body)
    rollback(folder)

    assert listing(work) == before


def test_a_file_in_a_folder_that_allows_no_rename_is_copied():
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name, "trial"), Path(name, "work")
        work.mkdir()
        fill(work)
        folder.mkdir()
        (work / "model.pt").chmod(0o666)
        for path, mode in ((work, 0o555), (folder, 0o777), (Path(name), 0o755)):
            path.chmod(mode)
        before = listing(work)
        argv = command(Path(name), "open('model.pt', 'w').write('new')")
        argv[2] = WITHOUT_RIGHTS + argv[2]

        subprocess.run(argv, cwd=work, check=True)
        written = (work / "model.pt").read_text()
        rollback(folder)
        after = listing(work)
        work.chmod(0o755)

    assert written == "new"
    assert after == before
