import random
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.data import caching
from flatout.data.caching import is_cached, store_of
from flatout.data.images import pillow
from flatout.records.errors import NotApplicable
from flatout.techniques.data import ram_cache
from flatout.techniques.data.ram_cache import RamCache, cache_samples
from tests.data.photographs import Photographs, photograph
from tests.techniques.data.samples import Centred, Epochs, Numbers, Stream
from tests.techniques.facts import GIB, loader, machine, pipeline, profile

PROMISE = ("pictures.py", {})


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number) for number in range(12)]


@pytest.fixture
def undo_decoding(monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", ImageFile.ImageFile.load)
    monkeypatch.setattr(pillow, "_ACTIVE", [])


def two_epochs(arguments):
    torch.manual_seed(0)
    random.seed(0)
    built = DataLoader(**arguments)
    found = [[x.tolist() for x in batch] for _ in range(2) for batch in built]
    return found, torch.rand(1).item(), random.random()


def waiting(**changes):
    return profile(phases_ms={"data_wait": 300.0}, loaders=(loader(**changes),))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_random_streams_are_the_same_bit_by_bit(paths, workers):
    asked = {
        "dataset": Photographs(paths),
        "batch_size": 5,
        "shuffle": True,
        "num_workers": workers,
    }

    wanted = RamCache().loader(asked)

    assert is_cached(wanted["dataset"])
    assert two_epochs(wanted) == two_epochs(asked)


def test_samples_lie_in_memory_as_the_data_set_has_them():
    class ChannelsLast(Numbers):
        def __getitem__(self, index):
            return torch.full((2, 4, 5, 3), float(index)).permute(0, 3, 1, 2)

    kept = cache_samples(ChannelsLast(), budget_bytes=100_000)

    assert [kept[3].stride(), kept[3].stride()] == [ChannelsLast()[3].stride()] * 2
    assert store_of(kept).count == 1


def test_the_store_is_filled_before_the_first_epoch(paths):
    technique = RamCache()
    built = DataLoader(**technique.loader({"dataset": Photographs(paths), "batch_size": 5}))

    technique.epoch(built)

    assert store_of(built.dataset).count == 12


@pytest.mark.usefixtures("undo_decoding")
@pytest.mark.parametrize("workers", [0, 2])
def test_of_random_samples_only_the_decoding_is_kept(paths, workers):
    technique, dataset = RamCache(), Photographs(paths, flips=True)
    asked = {"dataset": dataset, "batch_size": 5, "num_workers": workers}
    expected = two_epochs(asked)

    wanted = technique.loader(asked)

    assert wanted["dataset"] is dataset
    assert technique.decoded[0].count == 12
    assert two_epochs(wanted) == expected


def test_random_samples_without_a_file_to_decode_are_left_alone():
    class Noise(Numbers):
        def __getitem__(self, index):
            return torch.rand(3)

    with pytest.raises(NotApplicable, match=r"draws random numbers, and Pillow decodes no file"):
        RamCache().loader({"dataset": Noise()})


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Stream(), "iterable"),
        (Epochs(), "set_epoch"),
        (TensorDataset(torch.zeros(3)), "in memory already"),
        ([1, 2, 3], "in memory already"),
        (torch.zeros(3, 2), "in memory already"),
        (Numbers(0), "empty"),
        (Centred(), "differ from its single samples"),
    ],
)
def test_sets_for_which_there_is_nothing_to_keep(dataset, words):
    with pytest.raises(NotApplicable, match=words):
        RamCache().loader({"dataset": dataset})


def test_spawned_workers_that_would_not_find_the_store_are_left_alone(monkeypatch, tmp_path):
    technique = RamCache()
    monkeypatch.setattr(caching, "DESCRIPTORS", tmp_path / "none")  # as on macOS
    spawned = {"num_workers": 2, "multiprocessing_context": "spawn"}
    one, other = Numbers(), Numbers()

    kept = technique.loader({"dataset": one, "num_workers": 2, "multiprocessing_context": "fork"})
    assert is_cached(kept["dataset"])
    for dataset in (one, other):
        with pytest.raises(NotApplicable, match="spawned workers find the kept samples through"):
            technique.loader({"dataset": dataset, **spawned})
    with pytest.raises(NotApplicable, match="spawned workers find the kept samples through"):
        technique.epoch(DataLoader(other))


def test_the_reason_is_the_same_at_every_epoch():
    technique = RamCache()
    built = DataLoader(TensorDataset(torch.zeros(3)))
    with pytest.raises(NotApplicable, match="in memory already"):
        technique.loader({"dataset": built.dataset})

    with pytest.raises(NotApplicable, match="in memory already"):
        technique.epoch(built)


def test_too_little_memory_is_said(monkeypatch, paths):
    monkeypatch.setattr(ram_cache, "free_memory_bytes", lambda: 1000)

    with pytest.raises(NotApplicable, match="GB of memory for them"):
        RamCache().loader({"dataset": Photographs(paths)})


def test_the_function_does_the_same_and_refuses_random_samples(paths):
    data = cache_samples(Photographs(paths), budget_bytes=1_000_000)

    assert is_cached(data)
    with pytest.raises(NotApplicable, match="random"):
        cache_samples(Photographs(paths, flips=True), budget_bytes=1_000_000)


def test_it_is_offered_where_the_step_waits_and_the_set_fits():
    assert RamCache.candidates(waiting(), machine()) == [RamCache()]
    assert RamCache.candidates(waiting(is_iterable=True), machine()) == ()
    assert RamCache.candidates(waiting(dataset_len=1_000_000), machine(memory_bytes=GIB)) == ()
    assert RamCache.candidates(profile(loaders=(loader(),)), machine()) == ()


def test_half_a_set_saves_half_of_the_making():
    whole = RamCache().predict(waiting(), machine(memory_bytes=16 * GIB)).step_ms
    half = RamCache().predict(waiting(), machine(memory_bytes=100_000_000)).step_ms

    assert -300 < whole < -295
    assert whole / 2 - 3 < half < whole / 2 + 3


def test_of_samples_that_change_only_the_decoding_is_saved():
    stages = {"decode": 1.0, "transform": 3.0}
    random, same = (
        replace(waiting(), pipeline=pipeline(is_repeated=is_same, **stages))
        for is_same in (False, True)
    )

    assert RamCache().predict(random, machine()).step_ms == pytest.approx(-0.8 * 0.25 * 300)
    assert RamCache().predict(same, machine()).step_ms < -295
    assert "decoded" in RamCache().predict(random, machine()).why
