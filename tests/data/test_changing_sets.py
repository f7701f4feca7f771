"""Techniques that keep samples, or workers, give a script what it changed its data set to."""

import gc
from weakref import ref

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.data.caching import store_of
from flatout.data.proof.dataset_facts import ALIKE
from flatout.records.errors import NotApplicable
from flatout.techniques.data.device_cache import DeviceCache, batches_on_device
from flatout.techniques.data.dynamic_padding import Trimmed
from flatout.techniques.data.persistent_workers import PersistentWorkers
from flatout.techniques.data.ram_cache import RamCache, cache_samples
from tests.data.changing import CHANGES, Counting, Negatives, Sized, draw, grow, passed, seen
from tests.data.texts import Tokenizer

KEEPERS = [RamCache(), RamCache(fill_s=0), DeviceCache()]
"""Each test binds one: what it holds is that of one process."""


def asked(make, workers, **options):
    dataset = make()
    dataset.tokenizer = Tokenizer()
    return {
        "dataset": dataset,
        "batch_size": 5,
        "shuffle": True,
        "num_workers": workers,
        "prefetch_factor": None,
        **options,
    }


def with_technique(technique, arguments, change):
    built = DataLoader(**technique.loader(arguments))
    return seen(built, change, passed(technique.epoch), passed(technique.batches))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("technique", KEEPERS, ids=lambda technique: repr(technique))
def test_what_was_kept_is_dropped_when_the_script_changes_its_set(technique, workers, kind):
    technique = technique.bind()
    make, change = CHANGES[kind]
    expected = seen(DataLoader(**asked(make, workers)), change)

    found = with_technique(technique, asked(make, workers), change)

    assert found == expected
    assert "the script changed the data set" in technique.end()


@pytest.mark.parametrize("kind", CHANGES)
def test_workers_start_anew_when_the_script_changed_its_set(kind):
    technique = PersistentWorkers()
    make, change = CHANGES[kind]
    expected = seen(DataLoader(**asked(make, 2)), change)

    found = with_technique(technique, asked(make, 2), change)

    assert found == expected
    assert "in 2 of 3 later epochs" in technique.end()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Sized, Counting])
@pytest.mark.parametrize("technique", KEEPERS, ids=lambda technique: repr(technique))
def test_a_set_that_nobody_changes_stays_kept(technique, workers, make):
    technique = technique.bind()
    expected = seen(DataLoader(**asked(make, workers)), lambda _: None)

    found = with_technique(technique, asked(make, workers), lambda _: None)

    assert found == expected
    assert technique.end() == ""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_that_counts_its_reads_is_read_once_a_sample(workers):
    technique = RamCache(fill_s=0)
    built = DataLoader(**technique.loader(asked(Counting, workers)))

    for _ in range(3):
        technique.epoch(built)
        list(built)

    assert store_of(built.dataset).count == 24
    assert built.dataset.reads == (0 if workers else 24)


@pytest.mark.parametrize("make", [Sized, Counting])
def test_workers_of_a_set_that_nobody_changes_live_on(make):
    technique = PersistentWorkers()
    built = DataLoader(**technique.loader(asked(make, 2)))

    def process_ids():
        technique.epoch(built)
        list(built)
        return [worker.pid for worker in built._iterator._workers]

    assert process_ids() == process_ids()
    assert technique.end() == ""


def test_workers_that_start_anew_leave_none_behind():
    technique = PersistentWorkers()
    built = DataLoader(**technique.loader(asked(Sized, 2)))
    technique.epoch(built)
    list(built)
    workers = built._iterator._workers

    grow(built.dataset)
    technique.epoch(built)

    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.slow
def test_workers_that_start_anew_in_each_epoch_are_no_gain():
    technique = PersistentWorkers()
    built = DataLoader(**technique.loader(asked(Negatives, 2)))
    for _ in range(3):
        draw(built.dataset)
        technique.epoch(built)
        list(built)

    with pytest.raises(NotApplicable, match="before each epoch"):
        technique.end()


@pytest.mark.parametrize("wrap", [lambda collate: collate, Trimmed])
def test_a_collation_that_the_script_changes_reaches_new_workers(wrap):
    class Wide:
        width = 1

        def __call__(self, samples):
            return torch.stack(samples).repeat(1, self.width)

    def widen(_):
        collate.width = 3

    collate = Wide()
    expected = seen(DataLoader(**asked(Sized, 2, collate_fn=collate)), widen)
    collate = Wide()

    found = with_technique(PersistentWorkers(), asked(Sized, 2, collate_fn=wrap(collate)), widen)

    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_the_technique_is_refused_in_epochs_after_a_change(workers):
    for technique in KEEPERS:
        built = DataLoader(**technique.loader(asked(Sized, workers)))
        technique.epoch(built)
        grow(built.dataset)

        with pytest.raises(NotApplicable, match=r"changed the data set \(size\)"):
            technique.epoch(built)


def test_samples_kept_by_hand_are_the_scripts_own_after_a_change():
    data = cache_samples(Negatives(), budget_bytes=100_000)
    before = [data[i].tolist() for i in range(24)]

    data.ng_sample()

    assert [data[i].tolist() for i in range(24)] != before
    assert [data[i].tolist() for i in range(24)] == data.features


def test_a_change_within_an_epoch_shows_where_there_are_no_workers():
    for technique in KEEPERS:
        arguments = asked(Sized, 0)
        built = DataLoader(**technique.loader(arguments))
        technique.epoch(built)
        iterator = passed(technique.batches)(iter(built), built)
        next(iterator)

        grow(arguments["dataset"])

        assert next(iterator).shape == (5, 3)


@pytest.mark.slow
def test_spawned_workers_read_a_changed_set():
    technique = RamCache()
    arguments = asked(Sized, 1, multiprocessing_context="spawn")
    built = DataLoader(**technique.loader(arguments))
    technique.epoch(built)
    grow(built.dataset)

    assert {batch.shape[1] for batch in built} == {3}


def used_again(technique):
    """Return the sets of four epochs, each built again as some scripts do, that are still there."""
    left = []
    for _ in range(4):
        arguments = asked(Sized, 0)
        built = DataLoader(**technique.loader(arguments))
        passed(technique.epoch)(built)
        assert len(list(passed(technique.batches)(iter(built), built))) == 5
        left.append(ref(arguments["dataset"]))
        del arguments, built
    gc.collect()
    return sum(reference() is not None for reference in left)


@pytest.mark.parametrize("technique", KEEPERS, ids=lambda technique: repr(technique))
def test_what_is_kept_for_sets_that_are_built_anew_is_given_back(technique):
    assert used_again(technique.bind()) <= ALIKE


def test_batches_on_the_device_follow_a_changed_set():
    data = TensorDataset(torch.arange(10.0))
    built = DataLoader(data, batch_size=10)
    list(batches_on_device(built, "cpu"))

    data.tensors[0].mul_(2)
    data.tensors = (data.tensors[0], torch.ones(10))

    ((numbers, ones),) = batches_on_device(built, "cpu")
    assert torch.equal(numbers, 2 * torch.arange(10.0))
    assert torch.equal(ones, torch.ones(10))


def test_a_changed_set_gives_the_device_its_memory_back():
    technique = DeviceCache()
    built = DataLoader(**technique.loader(asked(Sized, 0)))
    grow(built.dataset)

    passed(technique.epoch)(built)

    assert technique.residents.known(built.dataset).whole is None
