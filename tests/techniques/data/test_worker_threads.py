import importlib
import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flatout.data.images.substitution import InWorker
from flatout.records.errors import NotApplicable
from flatout.records.journey import Journey
from flatout.records.technique import hook_points_of
from flatout.techniques.data.worker_threads import VARIABLES, OneThread, WorkerThreads, _libraries
from tests.rules.journey_facts import worker
from tests.techniques.data.samples import Numbers
from tests.techniques.facts import loader, machine, profile

PROMISE = ("pictures.py", {})

threadpoolctl = pytest.importorskip("threadpoolctl")


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Let libraries start two threads where nothing tells them otherwise."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "2")


class Threads(Numbers):
    """Each sample is the number of threads of the libraries in the process that makes it."""

    def __getitem__(self, index):
        np.ones((4, 4)) @ np.ones((4, 4))
        return max([info["num_threads"] for info in threadpoolctl.threadpool_info()])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_libraries_in_a_worker_have_one_thread(context):
    asked = {
        "dataset": Threads(2),
        "num_workers": 1,
        "batch_size": None,
        "multiprocessing_context": context,
    }

    found = list(WorkerThreads().epoch(DataLoader(**asked)))

    assert found == [1, 1]


def test_a_mapped_file_whose_name_is_not_utf8_hides_no_library(tmp_path):
    found = list(_libraries())
    path = os.fsdecode(bytes(tmp_path) + b"/\xc7\xd1.npy")  # as Windows in Korea wrote it
    mapped = np.memmap(path, np.uint8, "w+", shape=4)

    assert list(_libraries()) == found
    assert mapped.sum() == 0


class OpenCV(Numbers):
    """Each sample is the number of OpenCV's threads; OpenCV may be imported only here."""

    def __getitem__(self, index):
        cv2 = importlib.import_module("cv2")
        cv2.GaussianBlur(np.zeros((512, 512, 3), np.uint8), (5, 5), 0)
        return cv2.getNumThreads()


class Scipy(Numbers):
    """Each sample is the number of threads of the BLAS that comes with scipy, loaded only here."""

    def __getitem__(self, index):
        importlib.import_module("scipy.linalg")
        infos = threadpoolctl.threadpool_info()
        return max(info["num_threads"] for info in infos if "scipy.libs" in info["filepath"])


@pytest.mark.parametrize(("library", "dataset"), [("cv2", OpenCV), ("scipy", Scipy)])
def test_libraries_that_a_worker_imports_late_have_one_thread(library, dataset):
    pytest.importorskip(library)
    # A spawned worker has nothing that other tests imported.
    asked = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "spawn"}

    found = list(WorkerThreads().epoch(DataLoader(dataset(2), **asked)))

    assert found == [1, 1]


def test_opencv_that_a_worker_inherits_has_one_thread(request):
    cv2 = pytest.importorskip("cv2")
    threads = cv2.getNumThreads()
    request.addfinalizer(lambda: cv2.setNumThreads(threads))
    cv2.setNumThreads(2)
    asked = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}

    found = list(WorkerThreads().epoch(DataLoader(OpenCV(2), **asked)))

    assert found == [1, 1]


def test_the_scripts_own_start_of_a_worker_is_still_done():
    started = []

    OneThread(started.append)(3)

    assert started == [3]


def test_without_workers_there_is_nothing_to_limit():
    with pytest.raises(NotApplicable, match="no workers"):
        WorkerThreads().epoch(DataLoader(Numbers()))


def test_a_loader_is_not_limited_twice():
    loader = WorkerThreads().epoch(DataLoader(Numbers(), num_workers=1, worker_init_fn=print))
    once = loader.worker_init_fn
    loader.worker_init_fn = InWorker("a way", print, once)  # another technique's, on top

    assert WorkerThreads().epoch(loader).worker_init_fn.then is once
    assert once == OneThread(print)


def test_nothing_is_put_where_a_framework_puts_its_own_start_first():
    # Lightning gives its own to such a loader, to seed the workers, before the first epoch.
    assert hook_points_of(WorkerThreads) == {"epoch"}


def test_the_samples_are_the_same():
    asked = {"dataset": Numbers(), "batch_size": 5, "num_workers": 2}

    limited = list(WorkerThreads().epoch(DataLoader(**asked)))

    assert all(torch.equal(a, b) for a, b in zip(limited, list(DataLoader(**asked)), strict=True))


def using(cores_each, **changes):
    facts = Journey(
        workers=tuple(worker(n, user_share=cores_each, system_share=0.1) for n in (0, 1))
    )
    phases = {"data_wait": 100.0}
    return profile(phases_ms=phases, loaders=(loader(num_workers=2),), journey=facts, **changes)


def test_it_is_offered_where_workers_use_more_than_a_core():
    assert WorkerThreads.candidates(using(1.9), machine()) == [WorkerThreads()]
    assert WorkerThreads.candidates(using(0.8), machine()) == ()
    assert WorkerThreads.candidates(profile(), machine()) == ()


def test_the_gain_is_what_the_cores_are_short_of():
    narrow = WorkerThreads().predict(using(1.9), machine(usable_cores=2)).step_ms
    wide = WorkerThreads().predict(using(1.9), machine(usable_cores=16)).step_ms

    assert narrow == pytest.approx(-55.0)
    assert wide == pytest.approx(-55.0 / 4)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (using(0.8), "no worker uses clearly more than one core"),
        (profile(loaders=(loader(num_workers=2),)), "no one looked at what the workers use"),
    ],
)
def test_without_workers_that_fight_for_cores_nothing_is_predicted_and_the_reason_is_true(
    facts, why
):
    effect = WorkerThreads().predict(facts, machine())

    assert effect.step_ms == 0
    assert effect.why.startswith(why)


def test_dear_starts_of_workers_are_predicted_to_cost_short_epochs_something():
    short = using(0.8, epoch_steps=25, epoch_start_ms=400.0)
    kept = using(0.8, epoch_steps=25)

    assert WorkerThreads().predict(short, machine(usable_cores=2)).step_ms == pytest.approx(2.0)
    assert WorkerThreads().predict(kept, machine(usable_cores=2)).step_ms == 0
