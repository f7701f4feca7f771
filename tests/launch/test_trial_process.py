"""How a child process is set up and what killed ones leave, without starting one."""

import json
import os
import py_compile
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flatout.agent.journal_file import open_claims
from flatout.launch import trial_folders, trial_process
from flatout.launch import trial_folders as jobs
from flatout.launch.folder_lock import hold_folder
from flatout.launch.trial_process import (
    ProcessOptions,
    clean_up_stale_trials,
    last_output,
    not_journaled,
    run_process,
    scratch_root,
)
from flatout.records.errors import UserError
from flatout.records.trial import Workload
from flatout.tuning.trials import TrialOptions, outcome_of
from tests.paths import ROOT
from tests.support.programs import python, workload_of


def test_tritons_own_cache_is_kept_from_trial_to_trial():
    assert str(Path.home() / ".triton") in not_journaled({}, Path("/work"))
    assert "/data/.triton" in not_journaled({"TRITON_HOME": "/data"}, Path("/work"))


@pytest.mark.parametrize("name", ["HF_HOME", "TMPDIR", "XDG_CACHE_HOME"])
def test_a_folder_below_a_cache_is_as_before_after_a_trial(monkeypatch, tmp_path, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial_process, "can_overlay", lambda *_: False)
    (tmp_path / "data/work").mkdir(parents=True)
    (tmp_path / "data/work/last.pt").write_text("epoch 90")
    (tmp_path / "data/work/train.py").write_text("open('last.pt', 'w').write('epoch 1')")
    environment = {"HOME": str(tmp_path), name: str(tmp_path / "data")}

    ending = run_process(
        workload_of(tmp_path / "data/work", "train.py"),
        ProcessOptions(entry="nothing", environment=environment),
    )

    assert ending.exit_code == 0
    assert (tmp_path / "data/work/last.pt").read_text() == "epoch 90"


def test_a_helper_that_a_script_interrupts_ends_as_without_flatout(tmp_path):
    (tmp_path / "train.py").write_text(
        "import signal, subprocess\n"
        "with subprocess.Popen(['sleep', '60']) as helper:\n"
        "    helper.send_signal(signal.SIGINT)\n"
        "    try:\n"
        "        raise SystemExit(-helper.wait(10))\n"
        "    finally:\n"
        "        helper.kill()\n"
    )

    ending = run_process(workload_of(tmp_path, "train.py"), ProcessOptions(entry="nothing"))

    assert ending.exit_code == signal.SIGINT


def test_no_python_is_started_with_an_option_that_python_3_10_lacks():
    sources = (ROOT / "src").rglob("*.py")

    assert [path.name for path in sources if '"-P"' in path.read_text()] == []


def environment_of_a_trial(site, cache, **variables):
    """Return what a flatout that finds torch in `site` adds to a trial's environment."""
    code = (
        "import json, os; from flatout.launch.trial_process import byte_code; "
        "print(json.dumps(byte_code(os.environ)))"
    )
    mine = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(cache), **variables}
    done = python(["-B", "-c", code], env=mine, check=True)
    return json.loads(done.stdout)


def torch_without_byte_code(folder):
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("version = 1\n")
    return folder


def test_what_a_trial_compiles_is_kept_in_the_scratch_folder_where_torch_has_no_byte_code(tmp_path):
    site = torch_without_byte_code(tmp_path / "site")

    added = environment_of_a_trial(site, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1")
    mine = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", **added}
    subprocess.run([sys.executable, "-c", "import torch"], env=mine, check=True)

    kept = [path.name for path in (tmp_path / "cache/flatout/bytecode").rglob("*.pyc")]
    assert any(name.startswith("__init__.") for name in kept)
    assert not list(site.rglob("*.pyc"))


def test_byte_code_that_is_there_is_used_and_none_is_written(tmp_path):
    site = torch_without_byte_code(tmp_path / "site")
    py_compile.compile(str(site / "torch/__init__.py"))

    added = environment_of_a_trial(site, tmp_path / "cache")

    assert added == {"PYTHONDONTWRITEBYTECODE": "1"}


def ended_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def leave_trial(cache, **facts):
    """Leave the folder of a trial whose flatout is gone, and return it."""
    folder = cache / "flatout/trial-left"
    folder.mkdir(parents=True)
    spec = {**jobs.owner(), "owner": ended_process(), **facts}
    (folder / "supervisor.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"host": "node2", "boot_id": "another", "owner_started": 1},
        {"host": "4f1c", "pid_namespace": "pid:[1]", "owner_started": 1},
    ],
)
def test_a_trial_of_another_machine_or_container_is_left_alone(monkeypatch, tmp_path, elsewhere):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = leave_trial(tmp_path, **elsewhere)

    clean_up_stale_trials()

    assert folder.exists()


@pytest.mark.parametrize("before", [{}, {"boot_id": "an earlier one"}])
def test_a_trial_that_ended_here_or_before_this_boot_is_cleared_away(monkeypatch, tmp_path, before):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = leave_trial(tmp_path, **before)

    clean_up_stale_trials()

    assert not folder.exists()


def test_a_trial_that_an_older_flatout_left_is_cleared_away(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = leave_trial(tmp_path)
    (folder / "supervisor.json").write_text(json.dumps({"owner": ended_process()}))

    clean_up_stale_trials()

    assert not folder.exists()


def test_a_trial_planted_in_a_shared_folder_is_not_rolled_back(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"flatout-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)

    with pytest.raises(UserError, match="other users can write to"):
        clean_up_stale_trials()


def test_a_relative_cache_folder_is_not_made_in_the_users_project(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")

    root = scratch_root()

    assert root == tmp_path / "home/.cache/flatout"


def test_without_a_cache_folder_trials_go_to_a_private_one_in_tmp(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    root = scratch_root()

    assert root == tmp_path / f"flatout-{os.getuid()}"
    assert root.stat().st_mode & 0o777 == 0o700


def test_of_endless_output_only_the_end_is_read_and_its_secrets_are_hidden(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        log.truncate(1 << 40)
        log.seek(0, os.SEEK_END)
        log.write(b"logged in with ghp_" + b"a" * 36)

    text = last_output(tmp_path / "log")

    assert len(text) < 20_000
    assert text.endswith("logged in with _hidden_")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for number in range(100):
    try:
        Path(sys.argv[1], str(number)).write_text("x")
        Path(sys.argv[1], "mine").write_text("x")
    except OSError:
        pass
"""


def test_a_trial_that_fills_the_disk_fails_for_that_and_everything_is_as_before(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("the user's")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(FULL_DISK)
    workload = workload_of(tmp_path / "work", "train.py", str(tmp_path / "data"))

    ending = run_process(
        workload, ProcessOptions(entry="nothing", environment={"HOME": str(tmp_path / "home")})
    )
    outcome, message = outcome_of(ending, TrialOptions())

    assert (ending.why, outcome.value) == ("unrecorded", "crash")
    assert "could not be noted for undoing (No space left on device)" in message
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mine"]
    assert (tmp_path / "data" / "mine").read_text() == "the user's"
    assert list((tmp_path / "cache" / "flatout").glob("trial-*")) == []


def test_a_trial_ends_before_it_changes_what_another_one_that_runs_has_changed(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shared = tmp_path / "shared"
    shared.write_text("the user's")
    other = scratch_root() / "trial-other"
    for name in ("work", str(other)):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "train.py").write_text(f"open({str(shared)!r}, 'w').write('x')")
    workload = Workload(target="train.py", folder=tmp_path / "work", python=sys.executable)
    options = ProcessOptions(entry="nothing", environment={"HOME": str(tmp_path / "home")})
    number = open_claims(other)
    os.write(number, b"\0%b\0" % os.fsencode(shared))

    refused = run_process(workload, options)
    left = shared.read_text()
    os.close(number)  # the other trial has ended
    done = run_process(workload, options)

    assert (refused.why, left) == ("unrecorded", "the user's")
    assert "let another trial that changes it end first" in outcome_of(refused, TrialOptions())[1]
    assert (done.why, done.exit_code, shared.read_text()) == ("ended", 0, "the user's")


def test_a_second_trial_in_a_folder_waits_and_is_refused_in_the_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial_folders, "WAIT_S", 0.3)
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to("work")
    workload = Workload(target="train.py", folder=tmp_path / "link")

    with hold_folder(tmp_path / "work", tmp_path), pytest.raises(UserError, match="at work in"):
        run_process(workload, ProcessOptions(entry="nothing"))

    assert "waiting" in capsys.readouterr().err


def test_no_trial_begins_where_a_killed_one_left_originals_aside(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / ".flatout-journal-trial-x").touch()

    with pytest.raises(UserError, match="flatout restore"):
        run_process(Workload(target="train.py", folder=tmp_path), ProcessOptions(entry="nothing"))


def test_a_trial_that_finds_no_room_for_its_ending_does_not_begin(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trial_folders.os, "posix_fallocate", full)

    with pytest.raises(UserError, match="No space left on device; make room there"):
        run_process(Workload(target="train.py", folder=tmp_path), ProcessOptions(entry="nothing"))


INTERRUPTED_AT_EVERY_LINE = """
import os, signal, sys
from pathlib import Path
from flatout.launch.trial_process import ProcessOptions, run_process
from flatout.records.trial import Workload

def at_each_line(frame, event, _argument):
    if frame.f_code.co_name == "run_process" and Path("written.txt").exists():
        signal.raise_signal(signal.SIGINT)
    return at_each_line

sys.settrace(at_each_line)
workload = Workload(target="train.py", folder=Path())
try:
    run_process(workload, ProcessOptions(entry="nothing", environment=dict(os.environ)))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_an_interrupt_at_every_line_leaves_no_folder_and_the_files_as_before(tmp_path):
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    cache.mkdir()
    (work / "train.py").write_text(
        "import os, time\nopen('kept.txt', 'w').write('of the trial')\n"
        f"open({str(tmp_path / 'written.txt')!r}, 'w')\ntime.sleep(300)\n"
    )
    (work / "kept.txt").write_text("the user's")

    done = python(
        ["-c", INTERRUPTED_AT_EVERY_LINE.replace("written.txt", "../written.txt")],
        cwd=work,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        timeout=120,
        check=True,
    )

    assert done.stdout == "interrupted\n"
    assert list((cache / "flatout").glob("trial-*")) == []
    assert (work / "kept.txt").read_text() == "the user's"
