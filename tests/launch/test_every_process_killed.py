"""kill -9 of each process of a trial, and of all, at every write of its journal loses nothing."""

import os
import time

import pytest

from flatout.launch.rollback import restore
from flatout.launch.trial_process import ProcessOptions, clean_up_stale_trials, run_process
from tests.agent.test_undo_journal import filled, listing
from tests.support.programs import ran, workload_of

SCRIPT = """
import json, os, shutil, signal, sys
from pathlib import Path
place, at, whom = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.chdir(place)
processes = {"script": [os.getpid()], "supervisor": [os.getppid()]}
spec = json.loads(Path(os.environ["FLATOUT_SPEC"]).with_name("supervisor.json").read_text())
processes["flatout"] = [spec["owner"]]
processes["all"] = [spec["owner"], os.getppid(), os.getpid()]
calls, real = 0, os.write
def write(number, data):
    global calls
    calls += 1
    if calls == at:
        for process in processes[whom]:
            os.kill(process, signal.SIGKILL)
    return real(number, data)
os.write = write
with open("model.pt", "w") as f:
    f.write("new")
with open("old/b.txt", "a") as f:
    f.write("more")
os.remove("old/c.txt")
os.rename("out", "runs")
os.remove("latest")
shutil.rmtree("runs/deep")
os.mkdir("n")
Path("n/x").write_text("3")
Path("../came-through").touch()
"""
"""Its files are not in its working folder, so they are journaled with an overlay, too."""


def run_trial(place, at, whom):
    """Run a trial in a process of its own, which is its flatout."""
    child = os.fork()
    if child == 0:
        try:
            arguments = (str(place / "work"), str(at), whom)
            workload = workload_of(place / "code", "train.py", *arguments)
            environment = {"HOME": str(place / "home")}
            run_process(workload, ProcessOptions(entry="nothing", environment=environment))
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def is_at_work(place):
    """Return whether a process of the trial still lives: it may be rolling back."""
    found = ran(["pgrep", "-f", str(place / "cache")])
    return bool(found.stdout.strip())


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("whom", ["script", "supervisor", "flatout", "all"])
def test_at_every_write_of_the_journal_each_process_may_be_killed(tmp_path, monkeypatch, whom):
    for at in range(1, 100):
        place = tmp_path / str(at)
        (place / "code").mkdir(parents=True)
        (place / "code/train.py").write_text(SCRIPT)
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        work = filled(place)
        before = listing(work)

        run_trial(place, at, whom)
        ends_at = time.monotonic() + 60
        while is_at_work(place) and time.monotonic() < ends_at:
            time.sleep(0.02)
        clean_up_stale_trials()

        assert listing(work) == before, at
        assert restore(work)[0].differences == ()
        assert list((place / "cache/flatout").glob("trial-*")) == []
        if (place / "came-through").exists():
            break
    assert at > 10
