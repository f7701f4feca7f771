"""What docs/faults.md promises about code, folders and the page itself."""

import os
import re
import sys
from pathlib import Path

import pytest

from flatout.agent import journal_file
from flatout.agent.journal_file import JournalWriter
from tests.paths import ROOT
from tests.support.programs import python, ran

PAGE = ROOT / "docs/faults.md"
CODE_FROM_DATA = "S102,S301,S302,S306,S307,S701"
"""ruff's names for exec, pickle, marshal, mktemp, eval, and templates that escape nothing."""
KNOWN = {
    "src/flatout/data/values.py": "S301",
    "src/flatout/kernels/sdpa_rewrite.py": "S102",
}
COMMAND = "import sys; from flatout.cli import main; main()"
PLANTED = (
    *("json", "torch", "numpy", "click", "rich", "pathlib", "tomllib"),
    *("sitecustomize", "usercustomize", "conftest"),
)


def test_every_row_of_the_page_names_tests_that_exist():
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| (?!fault )", line)]
    named = {row: re.findall(r"`(test_\w+)`", row.split("|")[-2]) for row in rows}
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))

    assert [row for row, tests in named.items() if not tests] == []
    tests = [test for row in rows for test in named[row]]
    assert [test for test in tests if f"def {test}(" not in sources] == []
    assert len(rows) >= 50


def test_code_is_made_of_data_in_known_places_only():
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    words = ["check", "--ignore-noqa", "--select", CODE_FROM_DATA, "--output-format", "concise"]
    done = ran([str(ruff), *words, "src"], cwd=ROOT)

    found = dict(re.findall(r"^(src/\S+?\.py):\d+:\d+: (S\d+)", done.stdout, re.MULTILINE))
    assert found == KNOWN


@pytest.mark.parametrize("start", [["-I", "-c", COMMAND], ["-m", "flatout"]])
@pytest.mark.parametrize("words", [["techniques"], ["compare", "a.json", "a.json"]])
def test_a_hostile_folder_runs_no_code(tmp_path, start, words):
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n")
    plain = (ROOT / "tests/reporting/data/profile_busy.json").read_text()
    (tmp_path / "a.json").write_text(plain)

    done = python([*start, *words], cwd=tmp_path)

    assert done.returncode in (0, 1), done.stderr
    assert not (tmp_path / "ran").exists()


def test_an_original_moves_only_after_its_note_is_on_the_disk(tmp_path, monkeypatch):
    """Power loss as far as the order of calls shows it: what is written is synced in that call."""
    calls = []
    for name in ("write", "fsync"):
        real = getattr(os, name)

        def noted(number, *data, name=name, real=real):
            calls.append((name, str(Path(f"/proc/self/fd/{number}").readlink())))
            return real(number, *data)

        monkeypatch.setattr(journal_file.os, name, noted)
    (tmp_path / "trial").mkdir()
    (tmp_path / "work").mkdir()
    copy = str(tmp_path / "work/.flatout-journal-trial")

    JournalWriter(tmp_path / "trial").note_original("moved", str(tmp_path / "work/a"), "b")

    assert calls == [
        ("write", str(tmp_path / "trial/journal")),
        ("fsync", str(tmp_path / "work")),
        ("write", copy),
        ("fsync", copy),
    ]
