import os

import pytest
from torch.utils.data import DataLoader

from flatout.data.images.substitution import InWorker
from flatout.records.errors import NotApplicable
from flatout.records.technique import hook_points_of
from flatout.techniques.data.persistent_workers import PersistentWorkers
from flatout.techniques.data.worker_niceness import StepBack, WorkerNiceness, own_niceness
from tests.techniques.data.samples import Numbers
from tests.techniques.facts import loader, machine, profile

PROMISE = ("pictures.py", {})


class Niceness(Numbers):
    """Each sample is the nice value of the process that makes it."""

    def __getitem__(self, index):
        return own_niceness()


def loader_of(dataset=None, **asked):
    return DataLoader(dataset or Niceness(2), **{"num_workers": 1, "batch_size": None} | asked)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_give_way_and_the_training_process_does_not(context):
    before = own_niceness()

    found = list(WorkerNiceness(niceness=3).epoch(loader_of(multiprocessing_context=context)))

    assert found == [before + 3] * 2
    assert own_niceness() == before


def test_workers_that_live_on_step_back_once():
    asked = {"dataset": Niceness(2), "num_workers": 1, "batch_size": None}
    loader = DataLoader(**PersistentWorkers().loader(asked))

    found = []
    for _ in range(3):
        for technique in (WorkerNiceness(niceness=3), PersistentWorkers()):
            technique.epoch(loader)
        found += list(loader)

    assert loader.persistent_workers
    assert found == [own_niceness() + 3] * 6


def test_a_start_that_is_gone_through_twice_changes_nothing_more(monkeypatch):
    values = [0]
    monkeypatch.setattr(os, "nice", lambda more: values.append(values[-1] + more))
    monkeypatch.setattr(os, "getpriority", lambda *_: values[-1])
    start = StepBack(5)

    start(0)
    start(0)

    assert values[-1] == 5


def test_no_worker_goes_below_the_last(monkeypatch):
    monkeypatch.setattr(os, "getpriority", lambda *_: 17)

    loader = WorkerNiceness(niceness=5).epoch(loader_of())

    assert loader.worker_init_fn == StepBack(19)


def test_the_scripts_own_start_of_a_worker_is_still_done(monkeypatch):
    monkeypatch.setattr(os, "nice", lambda more: more)
    started = []

    StepBack(5, started.append)(3)

    assert started == [3]


def test_a_loader_steps_back_once():
    loader = WorkerNiceness().epoch(loader_of(Numbers(), worker_init_fn=print))
    once = loader.worker_init_fn
    loader.worker_init_fn = InWorker("a way", print, once)  # another technique's, on top

    assert WorkerNiceness().epoch(loader).worker_init_fn.then is once
    assert once.then is print


def test_without_workers_there_is_nobody_to_give_way():
    with pytest.raises(NotApplicable, match="no workers"):
        WorkerNiceness().epoch(DataLoader(Numbers()))


def test_where_processes_have_no_priority_it_is_not_offered_and_refuses(monkeypatch):
    monkeypatch.delattr(os, "nice")

    with pytest.raises(NotApplicable, match="no nice value"):
        WorkerNiceness().epoch(loader_of())


@pytest.mark.parametrize("niceness", [0, 20])
def test_it_gives_way_and_no_more_than_there_is(niceness):
    with pytest.raises(ValueError, match="from 1 to 19"):
        WorkerNiceness(niceness=niceness)


WORKERS = (loader(num_workers=2),)


def test_it_is_offered_where_workers_put_off_several_threads_or_a_device():
    facts = profile(cpu_threads=2, delay_share=1.0, loaders=WORKERS)
    on_gpu = profile(kind="cuda", cpu_threads=8, delay_share=0.6, loaders=WORKERS)

    (found,) = WorkerNiceness.candidates(facts, machine())

    assert found.predict(facts, machine()).step_ms == pytest.approx(-100 * 0.5 / 4)
    assert WorkerNiceness.candidates(on_gpu, machine()) == [found]
    assert found.predict(on_gpu, machine()).step_ms == pytest.approx(-100 * 0.5 * 0.2)


@pytest.mark.parametrize(
    "facts",
    [
        {"cpu_threads": 2, "delay_share": 0.03, "loaders": WORKERS},
        {"cpu_threads": 2, "delay_share": 1.0, "loaders": (loader(num_workers=0),)},
        {"cpu_threads": 1, "delay_share": 1.0, "loaders": WORKERS},
    ],
)
def test_it_is_not_offered_where_it_cannot_help(facts):
    assert WorkerNiceness.candidates(profile(**facts), machine()) == ()


def test_one_thread_on_the_cpu_is_told_to_lose():
    facts = profile(cpu_threads=1, delay_share=0.6, loaders=WORKERS)

    assert WorkerNiceness().predict(facts, machine()).step_ms > 0


def test_nothing_is_put_where_a_framework_puts_its_own_start_first():
    # Lightning gives its own to such a loader, to seed the workers, before the first epoch.
    assert hook_points_of(WorkerNiceness) == {"epoch"}


def test_the_samples_are_the_same():
    asked = {"dataset": Numbers(), "batch_size": 5, "num_workers": 2}
    expected = [batch.tolist() for batch in DataLoader(**asked)]

    found = [batch.tolist() for batch in WorkerNiceness().epoch(DataLoader(**asked))]

    assert found == expected
