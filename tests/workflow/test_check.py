import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.records.errors import UserError
from flatout.records.finding import SourceCheck, SourceFinding
from flatout.records.json_records import from_plain, to_plain
from flatout.workflow import check as checking
from flatout.workflow import check_worker
from flatout.workflow.check import Codes, check, diff, fix
from tests.support.programs import python, ran

FOUND = "import torch\nx = torch.zeros(3000).cuda()\n"
FIXED = 'import torch\nx = torch.zeros(3000, device="cuda")\n'


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty folder, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def codes(found):
    return {path: finding.code for path, finding in found.findings()}


def why(found):
    return {each.path: each.not_analysable for each in found.files if each.not_analysable}


def test_files_below_a_folder_are_checked_and_those_of_others_are_not(project):
    for name in ("a.py", "deep/b.py", ".venv/c.py", "env/d.py", "__pycache__/e.py", "f.txt"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(FOUND)
    (project / "env/pyvenv.cfg").touch()

    assert codes(check([Path()])) == {"a.py": "SYN10", "deep/b.py": "SYN10"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"import torch\n\xff\xfe", "not utf-8: byte 13"),
        (b"import torch\nx = '\0'\n", "source code string cannot contain null bytes"),
        (b"import torch\nprint 'hello'\n", "line 2: Missing parentheses in call to 'print'"),
        (b"import torch\nx = " + b"(" * 10_000 + b")" * 10_000, "too many nested parentheses"),
        (b"import torch\nx = " + b"-" * 10_000 + b"1\n", "nested too deeply"),
        (b"import torch\nx = " + b"+".join([b"1"] * 200_000), "nested too deeply"),
        (b"import torch\nx = '" + b"a" * (50 << 20) + b"'\n", "50.0 MiB; at most 2 MiB"),
        (b"# -*- coding: klingon -*-\nimport torch\n", "not text: unknown encoding"),
        (b"import torch\nif x:\n\ty\n        z\n", "inconsistent use of tabs"),
    ],
)
def test_what_is_no_python_gets_one_line_and_ends_nothing(project, content, reason):
    (project / "bad.py").write_bytes(content)
    (project / "good.py").write_text(FOUND)

    found = check([Path()])

    assert list(why(found)) == ["bad.py"]
    assert reason in why(found)["bad.py"]
    assert "\n" not in why(found)["bad.py"]
    assert codes(found) == {"good.py": "SYN10"}


def test_pipes_and_loops_of_links_are_named_and_do_not_block(project):
    os.mkfifo(project / "pipe.py")
    (project / "loop.py").symlink_to("loop.py")
    (project / "around").symlink_to(project)
    (project / "good.py").write_text(FOUND)

    found = check([Path()])

    assert why(found) == {
        "pipe.py": "not a regular file",
        "loop.py": "Too many levels of symbolic links",
    }
    assert codes(found) == {"good.py": "SYN10"}


def test_nothing_of_a_repository_is_run(project):
    witness = project / "ran"
    for name in ("torch", "sitecustomize", "conftest", "json", "ast", "click", "tokenize"):
        (project / f"{name}.py").write_text(f"import torch\nopen({str(witness)!r}, 'w')\n")
    (project / "train.py").write_text(FOUND)
    flatout = Path(sys.executable).parent / "flatout"

    done = ran([flatout, "check", "."], cwd=project)

    assert done.returncode == 1, done.stderr
    assert "train.py:2:5: SYN10" in done.stdout
    assert not witness.exists()


def test_a_file_that_ends_the_worker_ends_no_other(project, monkeypatch):
    for number in range(3):
        (project / f"{number}.py").write_text(FOUND + "#" * number)
    dying = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(1)"]
    real = checking.module_command
    commands = iter([dying])
    monkeypatch.setattr(checking, "module_command", lambda *words: next(commands, real(*words)))

    found = check([Path()])

    assert list(why(found)) == ["0.py"]
    assert set(codes(found)) == {"1.py", "2.py"}


def test_a_file_that_takes_too_long_is_given_up(project, monkeypatch):
    (project / "slow.py").write_text(FOUND)
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(checking, "module_command", lambda *words: sleeping)
    monkeypatch.setattr(checking, "MAX_S", 0.5)
    start = time.monotonic()

    found = check([Path()])

    assert "took more than" in why(found)["slow.py"]
    assert time.monotonic() - start < 30


def test_a_file_that_keeps_the_parser_busy_gives_up_on_its_own(monkeypatch):
    monkeypatch.setattr(check_worker, "MAX_S", 0.2)
    monkeypatch.setattr(check_worker.source, "check_text", lambda text: spin())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=[json.dumps(__file__).encode()]))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    monkeypatch.setattr(check_worker.resource, "setrlimit", lambda *limits: None)
    monkeypatch.setattr(check_worker.gc, "disable", lambda: None)
    before = signal.getsignal(signal.SIGPROF)

    try:
        check_worker.main()
    finally:
        signal.signal(signal.SIGPROF, before)

    assert "takes more than" in json.loads(said.getvalue())["not_analysable"]


def spin():
    while True:
        pass


def test_what_was_found_is_remembered_by_content(project, monkeypatch):
    (project / "a.py").write_text(FOUND)
    first = check([Path()])
    shutil.copy("a.py", "b.py")
    monkeypatch.setattr(checking, "_ask", lambda paths: pytest.fail(f"asked for {paths}"))

    again = check([Path()])

    assert codes(again) == {"a.py": "SYN10", "b.py": "SYN10"}
    assert again.files[0] == first.files[0]


DAMAGES = (
    *("{", "[]", "null", "[" * 99_999, '{"KEY": 1}', '{"KEY": {}}', '{"KEY": {"findings": 3}}'),
    '{"KEY": {"findings": [3], "notes": [], "not_analysable": ""}}',
    '{"KEY": {"findings": [], "notes": [[]], "not_analysable": ""}}',
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(project, damage):
    (project / "a.py").write_text(FOUND)
    check([Path()])
    (place,) = (project.parent / "cache").rglob("check/*.json")
    (key,) = json.loads(place.read_text())
    place.write_text(damage.replace("KEY", key))

    assert codes(check([Path()])) == {"a.py": "SYN10"}


@pytest.mark.parametrize(
    ("options", "settings", "left"),
    [
        (Codes(), "", {"SYN10", "DS01"}),
        (Codes(select=("ds",)), "", {"DS01"}),
        (Codes(ignore=("SYN10",)), "", {"DS01"}),
        (Codes(), 'ignore = ["DS"]', {"SYN10"}),
        (Codes(), 'select = ["SYN10"]', {"SYN10"}),
        (Codes(select=("DS01",)), 'select = ["SYN10"]', {"DS01"}),
        (Codes(ignore=("DS",)), 'ignore = ["SYN"]', set()),
    ],
)
def test_codes_are_chosen_by_options_and_in_pyproject(project, options, settings, left):
    (project / "pyproject.toml").write_text(f"[tool.flatout.check]\n{settings}\n")
    (project / "a").mkdir()
    (project / "a/b.py").write_text(FOUND + "m = torch.nn.DataParallel(m)\n")

    found = check([Path("a")], options)

    assert {finding.code for _path, finding in found.findings()} == left


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('select = ["XYZ1"]', "unknown code 'XYZ1'"),
        ("ignore = 3", "ignore in .tool.flatout.check. is a list"),
        ("ignore = [", "cannot read"),
        ("x = '" + "y" * 200_000 + "'", "cannot read .*larger than"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_reason(project, settings, said):
    (project / "pyproject.toml").write_text(f"[tool.flatout.check]\n{settings}\n")

    with pytest.raises(UserError, match=said):
        check([Path()])


@pytest.mark.parametrize("text", ["tool = 3", "[tool]\nflatout = []", "[tool.flatout]\ncheck = 3"])
def test_a_setting_in_the_place_of_a_table_is_refused(project, text):
    (project / "pyproject.toml").write_text(text)

    with pytest.raises(UserError, match="is no table"):
        check([Path()])


def test_a_comment_silences_its_line(project):
    comments = [
        "",
        "  # flatout: ignore",
        "  # flatout: ignore[SYN10]",
        "  # noqa",
        "  # flatout: ignore[DS01, syn10]",
        "  # flatout: ignore[DS01]",
    ]
    lines = ["import torch", *(f"x = torch.zeros(3000).cuda(){comment}" for comment in comments)]
    (project / "a.py").write_text("\n".join(lines))

    found = check([Path()])

    assert [finding.line for _path, finding in found.findings()] == [2, 5, 7]


@pytest.mark.parametrize(
    "start", [b"", b"\xef\xbb\xbf", "# -*- coding: latin-1 -*-\nä = 1\n".encode("latin-1")]
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_fix_keeps_every_other_byte(project, start, end):
    before = (
        start
        + FOUND.encode().replace(b"\n", end)
        + "# f\u00fcr".encode("latin-1" if b"latin" in start else "utf-8")
    )
    path = project / "a.py"
    path.write_bytes(before)
    path.chmod(0o755)

    left = fix(check([Path()]), suggested=False)

    assert path.read_bytes() == before.replace(b"(3000).cuda()", b'(3000, device="cuda")')
    assert path.stat().st_mode & 0o777 == 0o755
    assert (left.fixed, left.count()) == (1, 0)


def test_files_without_a_fix_are_not_written(project):
    for name, text in {
        "a.py": "import torch\nm = torch.nn.DataParallel(m)\n",
        "b.py": "x=1",
    }.items():
        (project / name).write_text(text)
        (project / name).chmod(0o444)
    before = {path: path.stat().st_mtime_ns for path in project.iterdir()}

    fix(check([Path()]), suggested=True)

    assert {path: path.stat().st_mtime_ns for path in project.iterdir()} == before


def test_a_fix_goes_through_a_link_and_keeps_it(project):
    (project / "real").mkdir()
    (project / "real/a.py").write_text(FOUND)
    (project / "a.py").symlink_to("real/a.py")

    fix(check([Path("a.py")]), suggested=False)

    assert (project / "a.py").is_symlink()
    assert (project / "real/a.py").read_text() == FIXED


def test_a_link_in_a_folder_does_not_lead_a_fix_out_of_it(project):
    outside = project.parent / "outside.py"
    outside.write_text(FOUND)
    (project / "a.py").symlink_to(outside)

    fix(check([Path()]), suggested=False)

    assert outside.read_text() == FOUND


def test_an_edit_while_a_file_is_checked_is_not_lost(project, monkeypatch):
    path = project / "a.py"
    path.write_text(FOUND)
    found, real = check([Path()]), checking.source.fixed_text

    def edited_meanwhile(*arguments, **settings):
        path.write_text("edited")
        return real(*arguments, **settings)

    monkeypatch.setattr(checking.source, "fixed_text", edited_meanwhile)

    with pytest.raises(UserError, match=r"a.py was changed meanwhile"):
        fix(found, suggested=False)

    assert path.read_text() == "edited"
    assert [one.name for one in project.iterdir()] == ["a.py"]


@pytest.mark.parametrize("why", ["write-protected", "a second name", "belongs to another user"])
def test_what_would_be_another_file_after_a_fix_is_left_as_it_is(project, monkeypatch, why):
    path = project / "a.py"
    path.write_text(FOUND)
    if why == "write-protected":
        path.chmod(0o444)
    elif why == "a second name":
        (project / "b.txt").hardlink_to(path)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)

    with pytest.raises(UserError, match=why):
        fix(check([path]), suggested=False)

    assert path.read_text() == FOUND


WITHOUT_ROOM = """
import resource, signal, sys
from pathlib import Path
from flatout.workflow.check import check, fix
found = check([Path("a.py")])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
fix(found, suggested=False)
"""


def test_a_full_disk_leaves_a_file_without_its_fix(project):
    (project / "a.py").write_text(FOUND)

    done = python(["-c", WITHOUT_ROOM])

    assert "UserError: cannot write a.py: File too large" in done.stderr
    assert {path.name: path.read_text() for path in project.iterdir()} == {"a.py": FOUND}


def test_the_diff_can_be_applied_and_writes_nothing(project):
    (project / "a.py").write_text("import torch\nx = torch.rand(3000).cuda()")

    text = diff(check([Path()]))

    assert (project / "a.py").read_text().endswith(".cuda()")
    subprocess.run(["patch", "-p1"], input=text, text=True, check=True, cwd=project)
    assert (project / "a.py").read_text() == 'import torch\nx = torch.rand(3000, device="cuda")'


@pytest.mark.parametrize(
    ("encoding", "head"),
    [
        ("utf-8-sig", ""),
        ("latin-1", "# -*- coding: latin-1 -*-\n# Größe\n"),
        ("utf-8", "# a page\f ends here, a line\u2028 does not\n"),
    ],
)
def test_the_diff_fits_the_bytes_of_each_file(project, encoding, head):
    (project / "my a.py").write_bytes((head + FOUND).encode(encoding))
    (project / "b.py").write_text(FOUND)
    flatout = Path(sys.executable).parent / "flatout"

    made = subprocess.run([flatout, "check", "--diff", "."], capture_output=True, check=False)

    subprocess.run(["git", "apply", "--check"], input=made.stdout, check=True)
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=made.stdout, check=True)
    assert (project / "my a.py").read_bytes() == (head + FIXED).encode(encoding)
    assert (project / "b.py").read_text() == FIXED


def test_the_diff_of_a_link_is_that_of_its_file_and_comes_once(project):
    (project / "real.py").write_text(FOUND)
    (project / "a.py").symlink_to("real.py")

    for paths in ([Path()], [Path("a.py")]):
        subprocess.run(["git", "apply", "--check"], input=diff(check(paths)), text=True, check=True)


def test_a_finding_survives_its_way_between_processes():
    found = check_one(FOUND)

    assert from_plain(SourceFinding, json.loads(json.dumps(to_plain(found)))) == found


def check_one(text):
    from flatout.rules import source

    return source.check_text(text)[0][0]


def test_a_path_that_does_not_exist_is_refused(project):
    with pytest.raises(UserError, match=r"there is no gone\.py"):
        check([Path("gone.py")])


def test_a_named_file_that_cannot_be_analysed_is_misuse(project):
    (project / "bad.py").write_text("import torch\n(")

    assert check([Path("bad.py")]).exit_code == 2
    assert check([Path()]).exit_code == 0
    assert SourceCheck(files=()).exit_code == 0


TRAINS = """
import sys
import torch


def pick():
    return "cpu"


device = pick()
torch.manual_seed(0)
data = torch.randn(64, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = torch.zeros(2000).to(device)  # a sum
for x in data.split(8):
    bias = torch.full((2000,), 0.5).to(device)
    with torch.cpu.amp.autocast():
        loss = (model(x) - bias[:1]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss
    print(repr(loss.item()), file=sys.stderr)
print(repr(total[0].item()))
"""


@pytest.mark.slow
def test_a_script_trains_to_the_same_losses_after_its_safe_fixes(project):
    path = project / "train.py"
    path.write_text(TRAINS)
    before = losses(path)

    left = fix(check([path]), suggested=False)

    text = path.read_text()
    assert left.fixed == 4
    assert 'torch.autocast("cpu")' in text
    assert "total += loss.detach()" in text
    assert text.count("device=device") == 2
    assert losses(path) == before


def losses(path):
    command = [sys.executable, "-W", "ignore", path]
    done = ran(command, check=True)
    assert done.stderr.count("\n") == 8
    return done.stderr, done.stdout


def test_a_notebook_is_not_taken_for_an_expression_of_python(project):
    (project / "train.ipynb").write_text('{"cells": [{"source": ["import torch"]}]}')

    found = check([Path("train.ipynb")])

    assert "nbconvert" in why(found)["train.ipynb"]
    assert found.exit_code == 2
