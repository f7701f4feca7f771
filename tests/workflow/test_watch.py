"""Watching real jobs: processes of their own that train, end and are killed."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.hardware.counters import CounterSample, Sources
from flatout.hardware.gpus import Driver, Gpu
from flatout.records.errors import UserError
from flatout.records.live import ENDING, QUIET, STARTING, TRAINING, LiveTrainer
from flatout.workflow import watch as watching
from flatout.workflow.watch import Watcher, look_once, read_job, watch

TRAIN = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=16)
end = time.monotonic() + 90
while time.monotonic() < end:
    for (x,) in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
"""
PROGRAM = "import sys; from flatout.cli import main; main()"
WAIT_S = 60.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a script, and a scratch root that nobody else uses."""
    from flatout.records.recipe import Choice, Recipe
    from flatout.workflow.recipe_files import write_recipe

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(watching.__file__).parents[2]))
    (tmp_path / "train.py").write_text(TRAIN)
    write_recipe(Recipe(choices=(Choice(technique="channels_last"),)), tmp_path / "recipe.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def started(*arguments, **options):
    """Run flatout beside the test; whatever is left of it is ended."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], **pipes | options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def job_that_trains():
    """Return the first view that shows a training process with a loss."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        view = look_once()
        if view.job and view.job.trainers and view.job.trainers[0].loss is not None:
            return view
    raise AssertionError("no job began to train")


def test_a_running_job_shows_its_speed_its_loss_and_its_memory(folder):
    with started("run", "--with", "recipe.toml", "train.py") as process:
        view = job_that_trains()
        named = look_once(Path(view.job.folder)).job

    (trainer,) = view.job.trainers
    assert (view.job.kind, view.job.workload, view.job.pid) == ("run", "train.py", process.pid)
    assert (view.job.state, trainer.rank, trainer.device_kind) == (TRAINING, 0, "cpu")
    assert sum(trainer.shares.values()) == pytest.approx(1)
    assert trainer.samples_per_s == pytest.approx(16 * 1e3 / trainer.step_ms, rel=0.01)
    assert trainer.step > 0
    assert trainer.memory_bytes > 0
    assert named.folder == view.job.folder
    assert json.loads(json.dumps(view.to_json()))["job"]["samples_per_s"] > 0


def test_a_killed_job_ends_the_watch_and_is_named_when_asked_for(folder):
    with started("run", "--with", "recipe.toml", "train.py") as job:
        run_folder = Path(job_that_trains().job.folder)
        with started("watch", str(run_folder)) as watcher:
            seen = [watcher.stdout.readline() for _ in range(3)]
            job.send_signal(signal.SIGKILL)
            job.wait(WAIT_S)
            said = watcher.stdout.read()
            code = watcher.wait(WAIT_S)

    assert "train.py (run" in seen[2]
    assert "the job has ended" in said
    assert code == 0
    assert read_job(run_folder) is None
    with pytest.raises(UserError, match="has ended: its flatout process is gone"):
        look_once(run_folder)


def test_a_job_that_ends_while_a_view_is_shown_is_told_of_in_the_last_one(folder):
    views = []

    with started("run", "--with", "recipe.toml", "train.py") as job:
        for view in watch(Path(job_that_trains().job.folder)):
            views.append(view)
            job.kill()
            job.wait(WAIT_S)

    assert ["the job has ended" in view.notes for view in views] == [False, True]


def test_a_measurement_is_seen_as_well_and_leaves_nothing_when_interrupted(folder):
    with started("measure", "train.py") as process:
        view = job_that_trains()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)

    assert view.job.kind == "measure"
    assert process.returncode == 130
    assert list((folder / "cache/flatout").glob("trial-*")) == []


def test_without_a_job_and_without_a_terminal_one_view_is_shown(folder):
    with started("watch") as process:
        said, errors = process.communicate(timeout=WAIT_S)

    assert (process.returncode, errors) == (0, "")
    assert said.count("flatout watch") == 1
    assert "no flatout job is running" in said
    assert "host" in said


def test_a_view_for_scripts_is_one_json_document(folder):
    with started("watch", "--once", "--json", "-") as process:
        said, _ = process.communicate(timeout=WAIT_S)

    document = json.loads(said)
    assert (document["schema"], document["job"]) == ("flatout.watch/1", None)
    assert document["host"]["cores"] == os.cpu_count()


def test_interrupting_the_live_view_on_a_terminal_is_its_ordinary_end(folder):
    ours, theirs = pty.openpty()
    with started("watch", stdout=theirs, stdin=theirs) as process:
        os.close(theirs)
        shown = os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=WAIT_S)
        errors = process.stderr.read()
    os.close(ours)

    assert shown
    assert (code, errors) == (0, "")


def test_a_folder_of_no_job_is_refused(folder):
    with pytest.raises(UserError, match="is not the folder of a running job"):
        look_once(folder)


def announce(folder):
    """Announce a job of this process."""
    from flatout.launch.trial_folders import announce as announced

    run_folder = folder / "cache/flatout/run-x"
    run_folder.mkdir(parents=True)
    announced(run_folder, "run", "train.py")
    return run_folder


def record(**changes):
    plain = {
        "pid": os.getpid(),
        "rank": 0,
        "at_s": time.perf_counter(),
        "step": 5,
        "over_s": 1.0,
        "over_steps": 4,
        "over_samples": 64,
        "seconds": {"data_wait": 0.25, "forward": 0.75},
        "loss": 0.5,
        "loss_step": 3,
        "device": {"kind": "cuda", "uuid": "5a1f", "allocated_bytes": 9},
    }
    return json.dumps(plain | changes)


def test_a_job_before_its_first_step_is_starting_and_after_its_last_one_ending(folder):
    run_folder = announce(folder)
    watcher = Watcher()

    before = watcher.look().job
    (run_folder / "status-1.json").write_text(record())
    during = watcher.look().job
    (run_folder / "status-1.json").unlink()
    after = watcher.look().job

    assert [job.state for job in (before, during, after)] == [STARTING, TRAINING, ENDING]


def test_ranks_are_shown_in_order_and_their_samples_add_up(folder):
    run_folder = announce(folder)
    (run_folder / "status-7.json").write_text(record(rank=1))
    (run_folder / "status-8.json").write_text(record(rank=0))

    job = read_job(run_folder)

    assert [trainer.rank for trainer in job.trainers] == [0, 1]
    assert job.samples_per_s == 128
    assert job.trainers[0].shares["data_wait"] == 0.25


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", record(pid=2**22 + 1), record(device=3)])
def test_a_record_that_is_broken_or_of_a_dead_process_is_left_out(folder, text):
    run_folder = announce(folder)
    (run_folder / "status-1.json").write_text(text)

    assert read_job(run_folder).trainers == ()


def test_a_job_whose_last_step_is_long_ago_is_quiet(folder):
    run_folder = announce(folder)
    (run_folder / "status-1.json").write_text(record(at_s=time.perf_counter() - 60))

    assert read_job(run_folder).state == QUIET


def test_what_a_record_lacks_is_missing_with_its_reason(folder):
    run_folder = announce(folder)
    (run_folder / "status-1.json").write_text(record(loss=None, over_samples=0, over_steps=0))

    (trainer,) = read_job(run_folder).trainers

    assert {"loss", "samples_per_s", "step_ms", "busy_share"} == set(trainer.missing)
    assert isinstance(trainer, LiveTrainer)


class Source:
    """Stands for a GPU, since there may be none here."""

    uuid = "GPU-5a1f"

    def sample(self, *, is_full):
        return CounterSample(at_s=1.0, values={"util_share": 0.7}, pids=frozenset({1, 2}))

    def close(self):
        pass


def test_gpus_are_shown_with_and_without_a_job_and_that_of_the_job_is_marked(folder, monkeypatch):
    driver = Driver(gpus=(Gpu(index=3, kind="cuda", name="NVIDIA H200", uuid="GPU-5a1f"),))
    monkeypatch.setattr(watching, "open_sources", lambda _: Sources(found=(Source(),)))
    monkeypatch.setattr(watching, "read_driver", lambda: driver)

    alone = look_once().gpus[0]
    (announce(folder) / "status-1.json").write_text(record())
    used = look_once().gpus[0]

    assert (alone.index, alone.name, alone.readings.util_share) == (3, "NVIDIA H200", 0.7)
    assert (alone.is_of_job, used.is_of_job) == (False, True)
