"""How workers start, from real loaders."""

import multiprocessing
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.agent.worker_start import MOST_NAMES, note_start, other_threads
from tests.techniques.data.samples import Numbers


def noted(**options):
    asked = {}
    note_start(asked, DataLoader(Numbers(), **options))
    return asked


@pytest.fixture
def beside():
    """Let threads with given names be alive for the time of a test."""
    done, started = threading.Event(), []

    def begin(*names):
        for name in names:
            started.append(threading.Thread(target=done.wait, name=name))
            started[-1].start()

    yield begin
    done.set()
    for thread in started:
        thread.join()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_method_that_the_loader_names_is_noted(method):
    asked = noted(num_workers=1, multiprocessing_context=method)

    assert asked["start_method"] == method


def test_the_method_is_the_process_s_where_the_loader_names_none():
    loader = DataLoader(Numbers(), num_workers=1)
    asked = {}
    note_start(asked, loader)

    list(loader)

    assert asked["start_method"] == multiprocessing.get_start_method()


def test_a_loader_without_workers_starts_none():
    assert noted(num_workers=0) == {}


def test_workers_that_live_on_are_not_started_again(beside):
    loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True)
    asked = {}
    note_start(asked, loader)
    list(loader)
    beside("later")

    note_start(asked, loader)

    assert "later" not in asked["threads_at_start"]


def test_threads_that_are_alive_are_named_once_they_were_seen(beside):
    loader, asked = DataLoader(Numbers(), num_workers=1), {}
    beside("tqdm_monitor", "flatout-read-ahead")

    note_start(asked, loader)

    assert "tqdm_monitor" in asked["threads_at_start"]
    assert "flatout" not in asked["threads_at_start"]


def test_many_threads_are_counted(beside):
    before = len(other_threads())
    beside(*(f"thread {number}" for number in range(MOST_NAMES + 2 - before)))

    assert other_threads()[-1] == "2 more"


def test_cuda_counts_once_it_was_initialised(monkeypatch):
    assert noted(num_workers=1)["cuda_at_start"] is torch.cuda.is_initialized()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    assert noted(num_workers=1)["cuda_at_start"] is True
