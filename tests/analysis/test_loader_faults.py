"""Loaders that end badly: a clear line with the cause, and nothing left behind."""

import re
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from flatout.analysis.loader_faults import (
    FAULTS,
    OF_WORKERS,
    fewer_workers,
    find_fault,
    half_of_own_workers,
)
from flatout.records.messages import messages
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome
from flatout.reporting.tuning.trial import render_failure
from tests.left_behind import left_behind, left_since
from tests.paths import ROOT
from tests.support.programs import ran
from tests.support.trial_runs import run_alone

SCRIPT = ROOT / "tests/scripts/whole/loader_faults.py"
PAGE = ROOT / "docs/loader-faults.md"


def trial_of(how, recipe=Recipe(), **options):
    return run_alone(SCRIPT, (how,), recipe, **{"limit_s": 60.0, "measure_s": 20.0} | options)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("worker_killed", "worker_killed", "was killed: out of memory"),
        ("worker_crashed", "worker_crashed", "Segmentation fault"),
        ("worker_exited", "worker_exited", "num_workers=0 shows what it prints"),
        ("not_picklable", "not_picklable", "cannot be sent to a spawned worker"),
        ("empty_data", "empty_data", "the data set is empty"),
        ("bad_image", "bad_image", "37.png' cannot be decoded"),
        ("cut_image", "bad_image", "cannot be decoded: it is cut short"),
        ("file_gone", "file_gone", "37.png' is in the data set's list and cannot be found"),
        ("uneven_samples", "uneven_samples", "[8] at entry 0 and [9] at entry 1"),
    ],
)
def test_a_bad_end_names_its_cause_and_leaves_nothing(how, code, words):
    before = left_behind()

    trial = trial_of(how)

    assert trial.outcome is Outcome.CRASH
    assert trial.details["fault"] == code, trial.message + trial.traceback
    assert trial.message.startswith(f"{code}: ")
    assert words in trial.message
    assert left_since(before) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no_sample", "the data set Faulty has no sample"),
        ("empty_stream", "the iterable data set Stream yields no sample"),
        ("few_samples", "of the 3 samples of Faulty comes no whole batch of 4, and drop_last=True"),
        ("part_of_a_batch", "of what Stream yields comes no whole batch of 4, and drop_last=True"),
    ],
)
def test_a_loader_that_has_nothing_to_give_is_named_in_place_of_the_missing_steps(how, words):
    trial = trial_of(how)

    assert trial.outcome is Outcome.NO_STEPS
    assert trial.details["fault"] == "empty_data"
    assert "without a training step: its loader of loader_faults.py:main had" in trial.message
    assert f" nothing to give, {words}" in trial.message
    assert "flatout.step" not in trial.message
    said = " ".join(render_failure(trial).split())
    assert "look where its samples come from" in said
    assert re.search("[a-z]{4}", messages("ko").text(trial.message)[:20]) is None


IN_SMALL_SHM = [
    *("unshare", "-rm", "sh", "-c"),
    'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"',
    "sh",
]
"""Runs a command where /dev/shm has one MiB, for this command alone."""


@pytest.fixture(scope="module")
def small_shm():
    done = ran([*IN_SMALL_SHM, "true"])
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
@pytest.mark.usefixtures("small_shm")
@pytest.mark.parametrize(
    ("how", "words"), [("shm_full", "No space left on device"), ("bus_error", "Bus error")]
)
def test_shared_memory_that_is_full_is_named_however_it_ends(tmp_path, how, words):
    shutil.copy(SCRIPT, tmp_path)
    before = left_behind()

    done = ran(
        [*IN_SMALL_SHM, sys.executable, "-m", "flatout", "measure", "--quick", SCRIPT.name, how],
        cwd=tmp_path,
    )

    said = " ".join(done.stderr.split())
    assert "The script failed: shm_full: /dev/shm is too small" in said, done.stdout
    assert words in said
    assert left_since(before) == set()


@pytest.mark.slow
@pytest.mark.chaos
def test_a_hung_worker_is_told_from_a_hung_script():
    before = left_behind()

    trial = trial_of("worker_hung", hang_s=20.0, limit_s=120.0)

    assert trial.outcome is Outcome.HANG
    assert trial.details["fault"] == "worker_hung"
    assert "the loop waits for a batch" in trial.message
    assert "sleeping" in trial.message
    assert left_since(before) == set()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory.",
            "shm_full",
        ),
        ("RuntimeError: unable to write to file </torch_71_8_0>: No space left on device (28)",
         "shm_full"),
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_71_8_0>: No space "
         "left on device (28)", "shm_full"),
        ("RuntimeError: unable to mmap 960 bytes from file </torch_9>: Cannot allocate memory (12)",
         "shm_full"),
        ('reductions.py", line 538, in rebuild_storage_fd\n    fd = df.detach()\n'
         "ConnectionResetError: [Errno 104] Connection reset by peer", "worker_gone"),
        ("OSError: [Errno 24] Too many open files", "open_files"),
        ("RuntimeError: received 0 items of ancdata", "open_files"),
        ("RuntimeError: DataLoader worker (pid(s) 5, 6) exited unexpectedly", "worker_exited"),
        ("RuntimeError: DataLoader timed out after 5 seconds", "worker_hung"),
        ("AttributeError: Can't pickle local object 'main.<locals>.<lambda>'", "not_picklable"),
        ("TypeError: cannot pickle '_io.BufferedReader' object", "not_picklable"),
        ("An attempt has been made to start a new process before the\n        current process has "
         "finished its bootstrapping phase.", "no_main_guard"),
    ],
)  # fmt: skip
def test_what_torch_and_python_say_is_understood(text, code):
    fault = find_fault(text)

    assert fault.code == code
    assert "{" not in fault.sentence(text)


IN_LOADER = 'File "/lib/torch/utils/data/_utils/fetch.py", line 54, in fetch\n    data = [...]\n'


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (
            "    raise UnidentifiedImageError(msg)\nPIL.UnidentifiedImageError: cannot identify "
            "image file '/photos/a b.jpg'",
            "bad_image",
            "bad_image: '/photos/a b.jpg' cannot be decoded",
        ),
        (
            "cannot identify image file <_io.BufferedReader name='/photos/a.jpg'>",
            "bad_image",
            "'/photos/a.jpg' cannot be decoded",
        ),
        ("cannot identify image file <_io.BytesIO object at 0x7f>", "bad_image", "does not name"),
        ("OSError: image file is truncated (12 bytes not processed)", "bad_image", "cut short"),
        (
            f"{IN_LOADER}FileNotFoundError: [Errno 2] No such file or directory: '/photos/7.jpg'",
            "file_gone",
            "file_gone: '/photos/7.jpg' is in the data set's list",
        ),
        (
            f"{IN_LOADER}RuntimeError: stack expects each tensor to be equal size, but got [3, 4] "
            "at entry 0 and [3, 5] at entry 6",
            "uneven_samples",
            "differ in size ([3, 4] at entry 0 and [3, 5] at entry 6)",
        ),
        (
            f"{IN_LOADER}RuntimeError: each element in list of batch should be of equal size",
            "uneven_samples",
            "lists of several lengths",
        ),
    ],
)
def test_what_is_wrong_with_the_data_is_named_with_its_place(text, code, words):
    fault = find_fault(text)

    assert fault.code == code
    assert words in fault.sentence(text)
    assert fault.code not in OF_WORKERS


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: expected a tensor of 7 columns",
        "FileNotFoundError: [Errno 2] No such file or directory: 'config.json'",
        "RuntimeError: stack expects each tensor to be equal size, but got [3] at entry 0 and [4] "
        "at entry 1",
        f"{IN_LOADER}KeyError: 7\nFileNotFoundError: [Errno 2] No such file or directory: 'a.json'",
    ],
)
def test_an_error_that_is_not_the_loaders_is_not_taken_for_one(text):
    assert find_fault(text) is None


def test_an_error_of_the_scripts_own_is_not_explained_away():
    assert find_fault("ValueError: expected a tensor of 7 columns") is None
    assert find_fault("", exit_code=-7).code == "shm_full"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
def test_each_fault_has_its_section_on_the_page(fault):
    assert f"## {fault.code}\n" in PAGE.read_text()


def recipe_with(workers):
    return Recipe(
        choices=(
            Choice(technique="pinned_memory"),
            Choice(technique="loader_workers", settings={"num_workers": workers}),
        )
    )


@pytest.mark.parametrize(
    ("workers", "code", "left"),
    [(8, "shm_full", 4), (3, "worker_killed", 1), (1, "shm_full", None), (8, "empty_data", None)],
)
def test_fewer_workers_are_offered_where_they_may_do(workers, code, left):
    choice = fewer_workers(recipe_with(workers), code)

    assert (choice.settings["num_workers"] if choice else None) == left


def own(*workers, prefetch=None):
    loaders = [
        {"address": f"main:{number}", "num_workers": count, "prefetch_factor": prefetch}
        for number, count in enumerate(workers)
    ]
    return {"fault": "worker_killed", "loaders": loaders}


def test_a_script_with_workers_of_its_own_may_do_with_half_of_them():
    recipe = half_of_own_workers(own(16, 2, 12, prefetch=4))

    assert recipe.label == "loader_workers num_workers=8 prefetch_factor=4"
    assert recipe.training_loaders == ("main:0", "main:2")
    assert half_of_own_workers(own(3)).label == "loader_workers num_workers=1"


@pytest.mark.parametrize(
    "details", [{}, own(), own(1), own(0), own(16) | {"fault": "bad_image"}, {"fault": None}]
)
def test_fewer_of_a_scripts_own_workers_are_no_way_out_of_everything(details):
    assert half_of_own_workers(details) is None


@pytest.mark.slow
@pytest.mark.chaos
def test_the_workers_that_a_failed_script_asked_for_are_told():
    trial = trial_of("worker_killed")

    (loader,) = trial.details["loaders"]
    assert loader["num_workers"] == 2
    assert half_of_own_workers(trial.details).training_loaders == (loader["address"],)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_store_in_memory_is_gone_after_a_killed_trial():
    before = left_behind()
    known = holders()
    recipe = Recipe(choices=(Choice(technique="ram_cache", settings={"fill_s": 1.0}),))

    trial = trial_of("worker_killed", recipe)

    assert trial.outcome is Outcome.CRASH
    assert left_since(before) == set()
    # Trials of others on this machine may hold a store of theirs for a while.
    assert psutil.wait_procs(holders() - known, timeout=60)[1] == []


def holders():
    """Return the processes that have a store open, as far as they may be asked."""
    return {process for process in psutil.process_iter() if "flatout-store" in open_files(process)}


def open_files(process):
    try:
        links = Path(f"/proc/{process.pid}/fd").iterdir()
        return " ".join(str(link.readlink()) for link in links)
    except OSError:
        return ""
