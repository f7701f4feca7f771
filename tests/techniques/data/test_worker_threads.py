import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flatout.core.errors import NotApplicable
from flatout.core.journey import Journey
from flatout.core.technique import seams_of
from flatout.data.swapping import InWorker
from flatout.techniques.data.worker_threads import OneThread, WorkerThreads
from tests.rules.journey_facts import worker
from tests.techniques.data.samples import Numbers
from tests.techniques.facts import loader, machine, profile

PROMISE = ("pictures.py", {})

threadpoolctl = pytest.importorskip("threadpoolctl")


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


def test_the_scripts_own_start_of_a_worker_is_still_done():
    started = []

    OneThread(started.append)(3)

    assert started == [3]


def test_opencv_is_told_so_where_it_is_there(monkeypatch):
    told = []
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(setNumThreads=told.append))

    OneThread()(0)

    assert told == [0]


def test_without_workers_there_is_nothing_to_limit():
    with pytest.raises(NotApplicable, match="no workers"):
        WorkerThreads().epoch(DataLoader(Numbers()))


def test_a_loader_is_not_limited_twice():
    loader = WorkerThreads().epoch(DataLoader(Numbers(), num_workers=1, worker_init_fn=print))
    once = loader.worker_init_fn
    loader.worker_init_fn = InWorker(print, once)  # another lever's, on top

    assert WorkerThreads().epoch(loader).worker_init_fn.then is once
    assert once == OneThread(print)


def test_nothing_is_put_where_a_framework_puts_its_own_start_first():
    # Lightning gives its own to such a loader, to seed the workers, before the first epoch.
    assert seams_of(WorkerThreads) == {"epoch"}


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
