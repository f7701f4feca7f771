"""The undo journal, in real processes: an audit hook can not be taken away again."""

import subprocess
import sys

import pytest

from flatout.seams.journal import rollback

PROGRAM = """
import sys
from pathlib import Path
from flatout.seams import journal
journal.install(Path(sys.argv[1]), (sys.argv[2],))
{body}
"""


def run(tmp_path, body):
    folder, work = tmp_path / "trial", tmp_path / "work"
    folder.mkdir()
    work.mkdir(exist_ok=True)
    program = PROGRAM.format(body=body)
    subprocess.run(
        [sys.executable, "-c", program, str(folder), str(tmp_path / "skipped")],
        cwd=work,
        check=True,
    )
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
    with (folder / "journal").open("a") as journal:
        journal.write('["moved", "/half')

    rollback(folder)

    assert files(work) == {"model.pt": "old"}


def test_rolling_back_twice_is_harmless(tmp_path):
    folder, work = run(tmp_path, "open('model.pt', 'w').write('new')")

    assert rollback(folder) == 1
    assert rollback(folder) == 0
    assert files(work) == {}


def test_folders_that_are_nobodys_are_left_alone(tmp_path):
    skipped = tmp_path / "skipped"
    skipped.mkdir()

    folder, _ = run(tmp_path, f"open({str(skipped / 'cache')!r}, 'w').write('kept')")

    assert rollback(folder) == 0
    assert files(skipped) == {"cache": "kept"}


def test_reading_is_not_noted(tmp_path):
    folder, _ = run(tmp_path, "open(__import__('os').__file__).read()")

    assert rollback(folder) == 0
