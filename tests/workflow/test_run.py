"""The verb `run`: the script's own training, with a recipe."""

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest

from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Workload
from flatout.workflow.run import RunOptions, run
from tests.paths import ROOT
from tests.support.trial_runs import copy_scripts

NOT_APPLIED = Recipe(choices=(Choice(technique="channels_last"),))
"""The scripts below have no convolution."""


RECIPE = '[flatout]\nversion = "0.1.0"\n'
IN_CONTAINER = ["unshare", "-Urpf", "--mount-proc"]
"""Runs a command as the first process, as a container without an init does."""


@pytest.fixture
def folder():
    folder = copy_scripts()
    yield folder
    shutil.rmtree(folder.parent)


def run_script(folder, command, **options):
    target, *arguments = command.split()
    return run(
        Workload(target=target, arguments=tuple(arguments), folder=folder, python=sys.executable),
        NOT_APPLIED,
        RunOptions(**options),
    )


def test_run_trains_to_the_end_and_keeps_what_the_script_saves(folder, capfd):
    code = run_script(folder, "plain_loop.py --epochs 2")

    assert code == 0
    assert len((folder / "log.txt").read_text().splitlines()) == 2
    assert (folder / "checkpoint.pt").exists()
    assert "channels_last was not applied (not_applicable)" in capfd.readouterr().err


def test_what_was_not_applied_is_said_in_the_reader_s_language(folder, capfd):
    run_script(folder, "plain_loop.py --epochs 1", language="ko")

    said = [line for line in capfd.readouterr().err.splitlines() if "channels_last" in line]
    assert said == [
        "flatout: channels_last: 적용하지 않았습니다(적용할 수 없음). "
        "바꿀 것이 없습니다. 모델에 2차원 합성곱이 없습니다"
    ]


@pytest.mark.slow
def test_what_a_technique_that_acted_found_is_said_in_the_reader_s_language(tmp_path, capfd):
    shutil.copy(ROOT / "tests/scripts/data/techniques.py", tmp_path)
    workload = Workload(
        target="techniques.py",
        arguments=("sorted", "0", "1"),
        folder=tmp_path,
        python=sys.executable,
    )
    recipe = Recipe(choices=(Choice(technique="block_order"),))

    code = run(workload, recipe, RunOptions(language="ko"))

    said = [line for line in capfd.readouterr().err.splitlines() if "flatout" in line]
    assert code == 0
    assert len(said) == 1
    assert said[0].startswith("flatout: block_order: 에폭 하나에 샘플 64개 중 64개가 한 번씩")


@pytest.mark.chaos
def test_run_passes_on_the_exit_code_of_a_script_that_fails(folder, capfd):
    code = run_script(folder, "endings.py crash")

    assert code == 1
    assert "expected a tensor of 7 columns" in capfd.readouterr().err


@pytest.mark.smoke
@pytest.mark.slow
def test_run_tells_what_was_not_applied_once_however_many_processes_there_are(folder, capfd):
    code = run_script(folder, "spawn_workers.py --epochs 1")

    assert code == 0
    assert capfd.readouterr().err.count("channels_last was not applied") == 1


@pytest.mark.slow
def test_what_a_helper_thread_of_the_script_started_outlives_the_thread(folder):
    assert run_script(folder, "helper_thread.py short") == 0


def command_line(folder, *script):
    (folder / "recipe.toml").write_text(RECIPE)
    return [sys.executable, "-m", "flatout", "run", "--with", "recipe.toml", *script]


def can_be_first():
    return not subprocess.run([*IN_CONTAINER, "true"], capture_output=True, check=False).returncode


@pytest.mark.slow
@pytest.mark.skipif(not can_be_first(), reason="namespaces are not allowed here")
def test_run_trains_where_flatout_is_the_first_process(folder, monkeypatch, tmp_path):
    # Not in the usual cache: what an older flatout runs there looks ended from in here.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [*IN_CONTAINER, *command_line(folder, "plain_loop.py", "--epochs", "1")]

    code = subprocess.run(command, cwd=folder, check=False).returncode

    assert code == 0
    assert (folder / "checkpoint.pt").exists()


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_script_that_is_told_to_end_has_the_time_to_save(folder, name):
    command = command_line(folder, "saves_when_told.py", name)
    number = getattr(signal, name)

    def heed() -> None:
        signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup

    with subprocess.Popen(command, cwd=folder, preexec_fn=heed) as flatout:
        wait_for(folder / "ready.txt")

        flatout.send_signal(number)

        assert flatout.wait(60.0) == 3
    assert (folder / "saved.txt").read_text() == "a checkpoint"


COUNTS = """
import pathlib, signal, time
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
pathlib.Path("ready.txt").touch()
while not told:
    time.sleep(0.05)
time.sleep(1.0)
raise SystemExit(10 + len(told))
"""


@pytest.mark.chaos
@pytest.mark.skipif(not can_be_first(), reason="namespaces are not allowed here")
def test_an_interrupt_of_a_containers_first_process_reaches_the_script(
    folder, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [*IN_CONTAINER, *command_line(folder, "saves_when_told.py", "SIGINT")]
    with subprocess.Popen(command, cwd=folder, start_new_session=True) as started:
        wait_for(folder / "ready.txt")

        psutil.Process(started.pid).children()[0].send_signal(signal.SIGINT)

        assert started.wait(60.0) == 3
    assert (folder / "saved.txt").read_text() == "a checkpoint"


@pytest.mark.chaos
def test_an_interrupt_of_a_group_reaches_the_script_once(folder):
    (folder / "counts.py").write_text(COUNTS)
    with subprocess.Popen(
        command_line(folder, "counts.py"), cwd=folder, start_new_session=True
    ) as flatout:
        wait_for(folder / "ready.txt")

        os.killpg(flatout.pid, signal.SIGINT)

        assert flatout.wait(60.0) == 11


@pytest.mark.chaos
def test_an_interrupt_from_the_keyboard_reaches_the_script_once(folder):
    (folder / "counts.py").write_text(COUNTS)
    ours, theirs = pty.openpty()

    def sit_down() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        command_line(folder, "counts.py"),
        cwd=folder,
        stdin=theirs,
        pass_fds=(theirs,),
        start_new_session=True,
        preexec_fn=sit_down,
    ) as flatout:
        wait_for(folder / "ready.txt")

        os.write(ours, b"\x03")

        assert flatout.wait(60.0) == 11
    os.close(ours)
    os.close(theirs)


@pytest.mark.chaos
def test_a_signal_that_the_script_does_not_catch_ends_it_and_gives_the_shells_code(folder):
    command = command_line(folder, "saves_when_told.py", "SIGUSR1")
    with subprocess.Popen(command, cwd=folder) as flatout:
        wait_for(folder / "ready.txt")

        flatout.terminate()

        assert flatout.wait(60.0) == 128 + signal.SIGTERM
    assert not (folder / "saved.txt").exists()


@pytest.mark.chaos
def test_a_hang_up_that_is_ignored_stays_so(folder):
    command = ["nohup", *command_line(folder, "saves_when_told.py", "SIGTERM")]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as flatout:
        wait_for(folder / "ready.txt")

        flatout.send_signal(signal.SIGHUP)
        flatout.terminate()

        assert flatout.wait(60.0) == 3


def wait_for(path, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
