import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.records.errors import NotApplicable
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Workload
from flatout.techniques.data.loader_workers import LoaderWorkers
from flatout.techniques.data.thread_loader import ThreadLoader, batch_threads, load_in_threads
from flatout.techniques.data.thread_loader.batch_threads import ThreadedCollate
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.trial_runner import TrialRunner
from tests.data.photographs import Photographs, photograph
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import loader, machine, pipeline, profile
from tests.techniques.guarded import machine as real_machine

PROMISE = "this module asks the guard"


@pytest.fixture
def threads_pay(monkeypatch):
    """What threads gain is timed, and timing decides no test."""
    monkeypatch.setattr(batch_threads, "times_faster", lambda *_, **__: 2.0)


def starved(**changes):
    return profile(phases_ms={"data_wait": 300.0}, loaders=(loader(**changes),))


@pytest.mark.usefixtures("threads_pay")
def test_one_worker_takes_the_place_of_several_and_batches_are_the_same(tmp_path):
    paths = [photograph(tmp_path, number) for number in range(12)]
    built = DataLoader(Photographs(paths), 5, shuffle=True, num_workers=2)
    torch.manual_seed(0)
    expected = [[x.tolist() for x in batch] for batch in built]

    ThreadLoader(threads=3).epoch(built)

    torch.manual_seed(0)
    assert [[x.tolist() for x in batch] for batch in built] == expected
    assert (built.num_workers, built.prefetch_factor) == (1, 4)
    assert ThreadLoader(threads=3).epoch(built) is built


class Torch(Numbers):
    def __getitem__(self, index):
        return torch.rand(3)


class Batched(Numbers):
    def __getitems__(self, indices):
        return indices


@pytest.mark.usefixtures("threads_pay")
@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Torch(), "torch's random stream"),
        (Batched(), "whole batches itself"),
        (Stream(), "iterable"),
    ],
)
def test_what_threads_cannot_share_is_left_alone_with_the_reason(dataset, reason):
    built = DataLoader(dataset, 4, num_workers=2)

    for _ in range(2):
        with pytest.raises(NotApplicable, match=reason):
            ThreadLoader().epoch(built)
    assert built.num_workers == 2
    assert not isinstance(built.collate_fn, ThreadedCollate)


def test_threads_that_hold_each_other_up_are_refused(monkeypatch):
    monkeypatch.setattr(batch_threads, "times_faster", lambda *_, **__: 1.02)

    with pytest.raises(NotApplicable, match=r"1\.02 times as fast as one"):
        load_in_threads(DataLoader(Numbers(), 4), 2)


def test_as_many_threads_as_cores_are_offered():
    (found,) = ThreadLoader.candidates(starved(), machine(usable_cores=4))

    assert found.threads == 4
    assert -300 <= found.predict(starved(), machine(usable_cores=4)).step_ms < -150


def test_where_worker_processes_are_expected_to_be_better_it_is_offered_all_the_same():
    two = machine(usable_cores=2)

    assert ThreadLoader(threads=2).predict(starved(num_workers=2), two).step_ms > 0
    assert ThreadLoader.candidates(starved(num_workers=2), two) == [ThreadLoader(threads=2)]


@pytest.mark.parametrize("threads", [2, 4, 8])
@pytest.mark.parametrize("batch_bytes", [0, 1_000_000, 40_000_000])
@pytest.mark.parametrize("changes", [{}, {"kind": "cuda"}, {"cpu_threads": 2}])
def test_no_more_is_promised_than_by_as_many_worker_processes(threads, batch_bytes, changes):
    facts = profile(
        phases_ms={"data_wait": 100.0}, loaders=(loader(batch_bytes=batch_bytes),), **changes
    )
    here = machine(usable_cores=4)

    by_threads = ThreadLoader(threads=threads).predict(facts, here).step_ms

    assert by_threads >= LoaderWorkers(num_workers=threads).predict(facts, here).step_ms


def test_what_was_measured_against_two_workers_is_foretold():
    # The record of the input pipeline, which the constants come from: 0.73x against two processes.
    phases = {"data_wait": 300.0, "forward": 0.0, "backward": 0.0}
    drained = profile(kind="cuda", phases_ms=phases, loaders=(loader(num_workers=2),))

    change_ms = ThreadLoader(threads=2).predict(drained, machine(usable_cores=2)).step_ms

    assert 300.0 / (300.0 + change_ms) == pytest.approx(0.73, abs=0.05)


def test_the_interpreters_lock_bounds_what_threads_add():
    locked, free = (
        replace(starved(num_workers=1), pipeline=pipeline(python=own, decode=10 - own))
        for own in (9, 1)
    )

    assert ThreadLoader(threads=8).predict(locked, machine()).step_ms > 0
    assert ThreadLoader(threads=8).predict(free, machine()).step_ms < -100


@pytest.mark.parametrize("facts", [starved(is_iterable=True), profile()])
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert ThreadLoader.candidates(facts, machine()) == ()


def test_there_is_at_least_one_thread():
    with pytest.raises(ValueError, match="at least 1"):
        ThreadLoader(threads=0)


SCRIPT_TO_TRAIN = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from flatout.techniques.data.thread_loader import batch_threads as threads

threads.times_faster = lambda *_, **__: 2.0


class Rows(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        noise = np.random.default_rng(index).normal(size=16) + random.random() + np.random.rand()
        return torch.from_numpy(noise).float(), index % 3


torch.manual_seed(0)
model = torch.nn.Linear(16, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    for x, y in DataLoader(Rows(), 8, shuffle=True, num_workers=2):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_the_guard_finds_samples_that_draw_random_numbers_the_same(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT_TO_TRAIN)
    workload = Workload(target="train.py", arguments=(), folder=tmp_path, python=sys.executable)
    lab = TrialRunner(workload=workload, machine=real_machine(), out=tmp_path, limit_s=200.0)

    verdict = GuardChecker(lab, lambda _: None).check(
        Recipe(choices=(Choice(technique="thread_loader", settings={"threads": 2}),))
    )

    assert verdict.passed, verdict.why
    assert not any(verdict.worst.values()), verdict.why
