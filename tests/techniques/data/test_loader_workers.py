import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.core.errors import NotApplicable
from flatout.techniques.data.loader_workers import LoaderWorkers, start_method
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import loader, machine, profile


def starved(wait_ms=300.0, **changes):
    return profile(phases_ms={"data_wait": wait_ms}, loaders=(loader(),), **changes)


def workers_of(candidates):
    return [candidate.num_workers for candidate in candidates]


def two_epochs(arguments):
    """Return all batches and where the trainer's random stream stands after each epoch."""
    torch.manual_seed(0)
    built = DataLoader(**arguments)
    seen = []
    for _ in range(2):
        seen += [batch.tolist() for batch in built]
        seen.append(torch.rand(1).item())
    return seen


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_and_random_stream_are_those_of_the_loader_without_workers(workers):
    asked = {"dataset": Numbers(), "batch_size": 5, "shuffle": True}
    technique = LoaderWorkers(num_workers=workers)

    assert two_epochs(technique.loader(asked)) == two_epochs(asked)


def test_two_cores_are_offered_two_workers_and_one():
    assert workers_of(LoaderWorkers.candidates(starved(), machine(usable_cores=2))) == [2, 1]


def test_many_cores_are_offered_what_the_step_needs_twice_that_and_all():
    found = LoaderWorkers.candidates(starved(wait_ms=250.0), machine(usable_cores=16))

    assert workers_of(found) == [3, 6, 16]


def test_the_present_number_is_not_offered_again():
    facts = profile(phases_ms={"data_wait": 50.0}, loaders=(loader(effective_workers=2),))

    found = LoaderWorkers.candidates(facts, machine(usable_cores=2))

    assert workers_of(found) == [1]


@pytest.mark.chaos
def test_a_small_shared_memory_lowers_the_prefetch_and_then_the_workers():
    big = loader(batch_bytes=10_000_000)
    waiting = profile(phases_ms={"data_wait": 300.0}, loaders=(big,))

    found = LoaderWorkers.candidates(waiting, machine(usable_cores=4, shm_free_bytes=40_000_000))

    assert [(c.num_workers, c.prefetch_factor) for c in found] == [(2, 1)]


def test_nothing_is_offered_without_a_wait_or_without_a_loader():
    assert LoaderWorkers.candidates(starved(wait_ms=1.0), machine()) == ()
    assert LoaderWorkers.candidates(profile(phases_ms={"data_wait": 50.0}), machine()) == ()


def test_an_iterable_data_set_is_offered_one_worker_at_most():
    waiting = profile(phases_ms={"data_wait": 300.0}, loaders=(loader(is_iterable=True),))

    assert workers_of(LoaderWorkers.candidates(waiting, machine())) == [1]


def test_workers_beside_a_gpu_hide_the_whole_wait():
    facts = starved(kind="cuda")

    effect = LoaderWorkers(num_workers=4).predict(facts, machine())

    assert effect.step_ms == pytest.approx(-300.0)


def test_workers_on_busy_cores_are_predicted_to_share_them():
    facts = starved(wait_ms=100.0, cpu_threads=2)

    effect = LoaderWorkers(num_workers=2).predict(facts, machine(usable_cores=2))

    assert -51 < effect.step_ms < -45


def test_an_iterable_data_set_is_left_with_the_workers_it_has():
    with pytest.raises(NotApplicable, match="every worker repeats it"):
        LoaderWorkers(num_workers=2).loader({"dataset": Stream(), "num_workers": 0})

    one = LoaderWorkers(num_workers=1).loader({"dataset": Stream(), "num_workers": 0})
    assert list(DataLoader(**one)) == [0, 1, 2, 3]


def test_a_data_set_that_cannot_be_pickled_is_left_alone_under_spawn_only():
    local = Numbers()
    local.transform = lambda x: x
    asked = {"dataset": local, "num_workers": 0}

    with pytest.raises(NotApplicable, match="spawned here, and dataset: "):
        LoaderWorkers().loader(asked | {"multiprocessing_context": "spawn"})
    assert LoaderWorkers().loader(asked | {"multiprocessing_context": "fork"})["num_workers"] == 2


def test_the_start_method_is_read_without_settling_it():
    assert start_method("spawn") == "spawn"
    assert start_method(multiprocessing.get_context("forkserver")) == "forkserver"
    before = multiprocessing.get_start_method(allow_none=True)

    assert start_method() in multiprocessing.get_all_start_methods()
    assert multiprocessing.get_start_method(allow_none=True) == before
