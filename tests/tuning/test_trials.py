"""Trials of real scripts: what is seen at the hook points, how they end, what they leave behind."""

import fcntl
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace

import psutil
import pytest

from flatout.hardware.limits import MemoryShortage
from flatout.launch import trial_process
from flatout.launch.trial_process import Ending, ProcessOptions, run_process
from flatout.records.phase_clock import NAMES
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Workload
from flatout.records.trial_result import Segment, TrialResult
from flatout.tuning.trials import TrialOptions, _shortage_words, _trial, outcome_of
from tests.left_behind import left_behind, left_since
from tests.support.programs import python
from tests.support.trial_runs import copy_scripts, profile_of, trial_of
from tests.techniques.facts import machine


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["plain_loop.py", "gan.py", "accumulation.py", "grad_scaler.py", "own_batches.py"]
)
def test_phases_add_up_to_the_step(command):
    profile = profile_of(command)

    assert sum(profile.phases_ms.values()) == pytest.approx(profile.step_ms.median)
    assert min(profile.phases_ms[name] for name in ("forward", "backward", "optimizer")) > 0


@pytest.mark.smoke
@pytest.mark.slow
def test_plain_loop_shows_its_loader_model_and_optimizer():
    profile = profile_of("plain_loop.py")

    training = {loader.address: loader.is_training for loader in profile.loaders}
    assert training == {"plain_loop.py:<module>#0": True, "plain_loop.py:<module>#1": False}
    assert profile.samples_per_step == 8
    assert profile.epoch_steps == 12
    assert profile.models[0].parameters == 32 * 64 + 64 + 64 * 4 + 4
    assert profile.optimizers[0].name == "AdamW"
    assert profile.losses[0] == pytest.approx(1.4, abs=0.3)


@pytest.mark.slow
def test_evaluation_between_epochs_is_no_training_step():
    profile = profile_of("plain_loop.py")

    assert profile.backwards_per_step == 1
    assert profile.batches_per_step == 1


@pytest.mark.smoke
@pytest.mark.slow
def test_two_alternating_optimizers_make_one_step():
    profile = profile_of("gan.py")

    assert profile.batches_per_step == 1
    assert profile.backwards_per_step == 3
    assert len(profile.models) == 2


@pytest.mark.slow
def test_accumulation_in_the_script_is_one_step():
    profile = profile_of("accumulation.py")

    assert profile.backwards_per_step == 4
    assert profile.samples_per_step == 32
    assert profile.epoch_steps == 4096 / 8 / 4


@pytest.mark.smoke
@pytest.mark.slow
def test_losses_under_a_gradient_scaler_are_the_unscaled_ones():
    profile = profile_of("grad_scaler.py")

    assert profile.losses[0] == pytest.approx(1.1, abs=0.4)
    assert profile.models[0].used_autocast


@pytest.mark.slow
def test_script_without_a_loader_counts_the_samples_its_model_is_called_with():
    profile = profile_of("own_batches.py")

    assert profile.samples_per_step == 4
    assert any("no DataLoader" in note for note in profile.notes)


@pytest.mark.slow
def test_iterable_data_and_batches_of_the_scripts_own_are_understood():
    profile = profile_of("stream.py")

    loader = profile.training_loaders[0]
    assert loader.is_iterable
    assert profile.samples_per_step == 8
    assert loader.batch_bytes == 8 * (16 * 4 + 8)


@pytest.mark.slow
def test_script_that_ends_without_clean_up_is_measured():
    trial = trial_of("stream.py")

    assert trial.outcome is Outcome.OK
    assert trial.details["why"] == "ended"


@pytest.mark.slow
def test_script_without_an_optimizer_steps_at_backward():
    profile = profile_of("own_batches.py --by-hand")

    assert profile.backwards_per_step == 1
    assert profile.phases_ms["optimizer"] == 0


@pytest.mark.slow
def test_model_compiled_by_the_script_is_recognised():
    profile = profile_of("user_compiled.py")

    assert profile.models[0].is_compiled


@pytest.mark.slow
def test_spawned_workers_do_not_disturb_the_count():
    profile = profile_of("spawn_workers.py")

    assert profile.samples_per_step == 2
    assert profile.training_loaders[0].num_workers == 1


@pytest.mark.slow
def test_script_with_arguments_siblings_and_relative_files():
    trial = trial_of("nested/job.py --name resource_tracker --budget 3")

    assert trial.outcome is Outcome.OK, trial.traceback


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("how", "outcome", "words"),
    [
        ("at_once", Outcome.CRASH, "no such data set: imagenet"),
        ("crash", Outcome.CRASH, "expected a tensor of 7 columns"),
        ("nan", Outcome.NAN, "step 6"),
        ("oom", Outcome.OOM, "out of memory"),
        ("killed", Outcome.OOM, "out of memory"),
        ("short", Outcome.TOO_SHORT, "made 2 training steps, at least"),
        ("untrained", Outcome.NO_STEPS, "no training step"),
    ],
)
def test_every_ending_is_a_result(how, outcome, words):
    trial = trial_of(f"endings.py {how}")

    assert trial.outcome is outcome
    assert words in trial.message


@pytest.mark.chaos
def test_out_of_memory_is_told_where_the_script_was_too_slow_to_end():
    result = TrialResult(why="crash", crash="OutOfMemoryError: CUDA out of memory", crashed_at=1.0)
    ending = Ending(why="result", exit_code=None, results=(result,), log="", wall_s=1.0)

    outcome, message = outcome_of(ending, TrialOptions())

    assert outcome is Outcome.OOM
    assert "ran out of memory" in message


@pytest.mark.parametrize(
    ("exit_code", "shortage", "outcome", "words"),
    [
        (-9, MemoryShortage(1, 0.0), Outcome.OOM, "out of memory, as the kernel counted"),
        (-9, MemoryShortage(0, 0.0), Outcome.OOM, "the kernel counted no such kill"),
        (1, MemoryShortage(2, 0.0), Outcome.CRASH, "the kernel killed 2 processes of this control"),
    ],
)
def test_a_kill_for_memory_is_known_by_the_kernels_count(exit_code, shortage, outcome, words):
    ending = Ending(
        why="ended", exit_code=exit_code, results=(), log="", wall_s=1.0, shortage=shortage
    )

    found, message = outcome_of(ending, TrialOptions())

    assert found is outcome
    assert words in message


def test_a_loss_that_is_not_finite_in_the_only_step_is_told_without_a_profile():
    only = Segment(who=0, seconds=[0.1] * len(NAMES), end=1.0, losses=[math.nan])
    ending = Ending(
        why="ended", exit_code=0, results=(TrialResult(segments=[only]),), log="", wall_s=1.0
    )

    trial = _trial(Recipe(), ending, machine(), TrialOptions())

    assert (trial.outcome, trial.profile) == (Outcome.NAN, None)


def test_a_trial_that_waits_for_memory_says_so(monkeypatch, tmp_path):
    """Near-limit thrash: it fits, but pages are thrown out and read again."""
    counts = iter([MemoryShortage(5, 1.0), MemoryShortage(5, 10_001.0)])
    monkeypatch.setattr(trial_process, "memory_shortage", lambda: next(counts))
    (tmp_path / "train.py").touch()
    workload = Workload(target="train.py", folder=tmp_path, python=sys.executable)

    ending = run_process(workload, ProcessOptions(entry="nothing"))

    assert ending.shortage == (0, 10_000.0)
    (note,) = _shortage_words(replace(ending, wall_s=40_000.0))
    assert note.startswith("processes of this control group waited for memory in 25 % of the time")
    assert not list(_shortage_words(replace(ending, wall_s=200_000.0)))


def test_the_frame_around_a_launchers_words_is_not_what_it_said():
    log = f"{'=' * 60}\nno module named job\n{'=' * 60}\n"
    ending = Ending(why="ended", exit_code=1, results=(), log=log, wall_s=1.0)

    assert outcome_of(ending, TrialOptions())[1].endswith("exit code 1: no module named job")


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.chaos
def test_failure_shows_the_scripts_own_traceback():
    trial = trial_of("endings.py crash")

    assert 'raise ValueError("expected a tensor of 7 columns")' in trial.traceback
    assert "flatout/workflow" not in trial.traceback


def test_a_script_that_trains_in_a_thread_until_the_limit_is_told_so_and_not_to_wait_longer():
    ending = Ending(
        why="limit", exit_code=None, results=(), log="", wall_s=9.0, trains_elsewhere=True
    )

    outcome, message = outcome_of(ending, TrialOptions())

    assert outcome is Outcome.NO_STEPS
    assert "trains in a thread of its own" in message


@pytest.mark.slow
@pytest.mark.chaos
def test_hang_is_noticed():
    trial = trial_of("endings.py hang", hang_s=8.0)

    assert trial.outcome is Outcome.HANG
    assert "8 s" in trial.message


@pytest.mark.slow
def test_slow_start_takes_nothing_from_the_measured_time():
    trial = trial_of("endings.py late", measure_s=2.5)

    assert trial.outcome is Outcome.OK
    assert trial.profile.step_ms.n >= 50


@pytest.mark.slow
@pytest.mark.chaos
def test_nothing_is_below_us_after_a_trial():
    before = left_behind()

    trial_of("endings.py orphans")

    assert left_since(before) == set()


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("command", ["plain_loop.py", "stubborn.py"])
def test_trial_leaves_the_folder_as_it_was(command):
    trial = trial_of(command)

    assert trial.outcome is Outcome.OK
    assert trial.changed_files == ()


@pytest.mark.smoke
@pytest.mark.slow
def test_trial_without_overlay_rolls_back(monkeypatch):
    monkeypatch.setattr("flatout.launch.trial_process.can_overlay", lambda *_: False)

    # A generous window: both a checkpoint and a log were written by then.
    trial = trial_of("plain_loop.py", measure_s=24.0)

    assert not trial.details["is_overlaid"]
    assert trial.undone > 0
    assert trial.changed_files == ()


PARENT = """
import sys
from pathlib import Path
from flatout.records.recipe import Recipe
from flatout.records.trial import Workload
from flatout.hardware.machine import read_machine
from flatout.tuning.trials import TrialOptions, run_trial
run_trial(
    Workload(target="endings.py", arguments=("hang", sys.argv[1]), folder=Path(sys.argv[1]),
             python=sys.executable),
    Recipe(), read_machine(torch=False), TrialOptions(measure_s=300.0),
)
"""


WITH_INPUT = """
import sys
from pathlib import Path
from flatout.records.recipe import Recipe
from flatout.records.trial import Workload
from flatout.hardware.machine import read_machine
from flatout.tuning.trials import TrialOptions, run_trial
for _ in range(int(sys.argv[3])):
    trial = run_trial(
        Workload(target="endings.py", arguments=(sys.argv[2],), folder=Path(sys.argv[1]),
                 python=sys.executable),
        Recipe(), read_machine(torch=False), TrialOptions(measure_s=2.0),
    )
    print(trial.outcome, trial.message)
"""


def test_script_that_asks_its_terminal_for_the_width_is_answered():
    folder = copy_scripts()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    done = python(["-c", WITH_INPUT, str(folder), "terminal", "1"], stdin=theirs, check=True)

    os.close(ours)
    os.close(theirs)
    assert done.stdout.strip() == "Outcome.OK", done.stdout


@pytest.mark.slow
def test_each_trial_reads_the_file_that_flatout_was_given_as_its_input(tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text("lr: 0.01")

    with settings.open() as file:
        done = python(["-c", WITH_INPUT, str(copy_scripts()), "input", "2"], stdin=file, check=True)

    assert done.stdout.split() == ["Outcome.OK", "Outcome.OK"], done.stdout


def processes_with(word):
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if word in " ".join(process.info["cmdline"] or [])
    ]


@pytest.mark.chaos
def test_everything_ends_when_flatout_is_killed(monkeypatch, tmp_path):
    folder = copy_scripts()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = left_behind()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)])
    wait_until(lambda: processes_with(f"endings.py hang {folder}"))
    time.sleep(1)

    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    wait_until(lambda: not processes_with(f"endings.py hang {folder}"))
    wait_until(lambda: not processes_with(str(tmp_path)))
    assert left_since(before) == set()


def armed_below(folder):
    return [
        process.pid
        for process in psutil.process_iter(["environ"])
        if str(folder) in (process.info["environ"] or {}).get("FLATOUT_SPEC", "")
    ]


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.chaos
def test_everything_ends_and_is_undone_when_only_the_supervisor_is_killed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("flatout.launch.trial_process.can_overlay", lambda *_: False)

    trial = trial_of("helper_thread.py kill")

    assert armed_below(tmp_path) == []
    assert trial.changed_files == ()


@pytest.mark.slow
def test_what_a_helper_thread_started_outlives_the_thread():
    trial = trial_of("helper_thread.py")

    assert trial.outcome is Outcome.OK, trial.message + trial.traceback


def wait_until(claim, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.mark.slow
def test_trial_of_a_technique_that_refuses_ends_in_its_first_steps():
    refuses = ("channels_last",)  # there is no convolution

    trial = trial_of("plain_loop.py", techniques=refuses, ends_when_refused=True)
    whole = trial_of("plain_loop.py", techniques=refuses)

    assert (trial.outcome, trial.profile) == (Outcome.REFUSED, None)
    assert [item.status for item in trial.not_applied] == ["not_applicable"]
    assert whole.outcome is Outcome.OK
    assert whole.not_applied == trial.not_applied


@pytest.mark.slow
def test_trial_whose_technique_acts_goes_its_whole_way():
    trial = trial_of("plain_loop.py", techniques=("fused_optimizer",), ends_when_refused=True)

    assert (trial.outcome, trial.not_applied) == (Outcome.OK, ())
