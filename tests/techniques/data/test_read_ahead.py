import time

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import flatout.data
from flatout.data.packed_store import PackedStore
from flatout.data.reader import PackedDataset
from flatout.records.errors import NotApplicable
from flatout.records.journey import Journey
from flatout.techniques.data import read_ahead as read_ahead_module
from flatout.techniques.data.read_ahead import ReadAhead, read_ahead, warm_up
from tests.data.packs import image_folder, packed
from tests.data.page_cache import cached_pages, cached_share, evict, wait_for
from tests.data.photographs import Photographs, photograph
from tests.rules.journey_facts import MIB, leg, worker
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import loader, machine, profile

PROMISE = ("pictures.py", {})


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number) for number in range(40)]


def two_epochs(arguments, technique=None):
    torch.manual_seed(0)
    built = DataLoader(**(technique.loader(arguments) if technique else arguments))
    found = []
    for _ in range(2):
        iterator = iter(built)
        batches = technique.batches(iterator, built) if technique else iterator
        found += [[x.tolist() for x in batch] for batch in batches]
        found.append(torch.rand(1).item())
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_random_stream_are_the_same_bit_by_bit(paths, workers):
    asked = {
        "dataset": Photographs(paths),
        "batch_size": 3,
        "shuffle": True,
        "num_workers": workers,
    }

    assert two_epochs(asked, ReadAhead(batches_ahead=4)) == two_epochs(asked)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_left_early_leaves_the_loaders_generator_where_it_was(paths, workers):
    def two_starts(technique):
        generator = torch.Generator().manual_seed(3)
        asked = {"dataset": Photographs(paths), "batch_size": 3, "num_workers": workers}
        built = DataLoader(**asked, shuffle=True, generator=generator)
        found = []
        for _ in range(2):
            iterator = iter(built)
            batches = technique.batches(iterator, built) if technique else iterator
            found += [next(batches)[1].tolist() for _ in range(5)]
            found.append(generator.get_state().tolist())
        return found

    assert two_starts(ReadAhead(batches_ahead=16)) == two_starts(None)


def test_files_are_there_before_their_batch(paths):
    built = DataLoader(Photographs(paths), batch_size=2)
    for path in paths:
        evict(path)
    if cached_pages(paths[9]):
        pytest.skip("this file system keeps its pages")

    batches = read_ahead(built, batches_ahead=5)
    next(batches)
    for _ in range(200):
        if cached_pages(paths[9]):
            break
        time.sleep(0.02)

    assert cached_pages(paths[9])
    # The last one was looked at when its name was searched for; one in between was not asked for.
    assert not cached_pages(paths[29])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dataset": Stream()}, "iterable"),
        (
            {"dataset": Numbers(), "sampler": WeightedRandomSampler([1.0] * 12, 12)},
            "WeightedRandomSampler may draw",
        ),
        (
            {
                "dataset": Numbers(),
                "sampler": RandomSampler(
                    range(12), replacement=True, num_samples=40, generator=torch.Generator()
                ),
            },
            "with replacement",
        ),
    ],
)
def test_loaders_that_must_not_be_drawn_from_early(asked, words):
    with pytest.raises(NotApplicable, match=words):
        ReadAhead().loader(asked)


def test_a_set_without_files_is_left_alone():
    built = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)

    with pytest.raises(NotApplicable, match="names the files"):
        ReadAhead().batches(iter(built), built)


def test_batches_are_the_same_while_all_files_are_brought_in(paths):
    asked = {"dataset": Photographs(paths), "batch_size": 3, "shuffle": True, "num_workers": 2}

    assert two_epochs(asked, ReadAhead(warms_up=True)) == two_epochs(asked)


def test_all_files_are_there_after_the_warm_up(paths):
    for path in paths:
        evict(path)
    if cached_pages(paths[29]):
        pytest.skip("this file system keeps its pages")

    work = warm_up(Photographs(paths))
    work.wait()
    for _ in range(200):
        if all(map(cached_pages, paths)):
            break
        time.sleep(0.02)

    assert all(map(cached_pages, paths))
    assert work.asked_bytes == sum(path.stat().st_size for path in paths)


def test_a_data_set_is_warmed_up_once_however_many_epochs_there_are(paths, monkeypatch):
    begun = []
    monkeypatch.setattr(read_ahead_module, "warm_up", lambda dataset: begun.append(dataset))
    data = Photographs(paths)

    technique = ReadAhead(warms_up=True)
    two_epochs({"dataset": data, "batch_size": 3}, technique)
    technique.loader({"dataset": data, "batch_size": 2})

    assert begun == [data]


def test_one_rank_of_a_host_warms_up_for_all(paths, monkeypatch):
    begun = []
    monkeypatch.setattr(read_ahead_module, "warm_up", lambda dataset: begun.append(dataset))
    monkeypatch.setenv("LOCAL_RANK", "1")

    ReadAhead(warms_up=True).loader({"dataset": Photographs(paths), "batch_size": 3})

    assert begun == []


def test_the_shards_of_a_packed_store_are_brought_in_too(tmp_path):
    technique = ReadAhead(warms_up=True)
    packed(image_folder(tmp_path / "photos", 20), tmp_path / "a")
    data = flatout.data.open(tmp_path / "a")
    built = DataLoader(**technique.loader({"dataset": data, "batch_size": 4}))
    batches = iter(built)

    assert technique.batches(batches, built) is batches
    work = technique.warm_ups.known(data)
    work.wait()
    assert work.asked_bytes == sum(shard.bytes for shard in data.header.shards)


SAMPLES, SAMPLE_BYTES, BATCH = 64, 256 << 10, 4


@pytest.fixture(scope="module")
def cold_store(tmp_path_factory):
    """Return a store of arrays of 256 KiB in one shard."""
    root = tmp_path_factory.mktemp("store")
    rows = np.random.default_rng(0).integers(0, 256, (SAMPLES, SAMPLE_BYTES), dtype=np.uint8)
    np.savez(root / "rows.npz", x=rows)
    packed(root / "rows.npz", root / "a")
    return root / "a"


class Unread(PackedDataset):
    """A store's data set whose samples nobody reads, so that all that comes was asked for."""

    def __getitems__(self, indices):
        return list(indices)


class Halves(Dataset):
    """A script's own data set around a store, whose numbers are those of the source."""

    def __init__(self, folder):
        self.data = flatout.data.open(folder, order="source")
        self.is_read = True

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]["x"][: SAMPLE_BYTES // 2] if self.is_read else index


def cold_pages(store):
    """Forget the shards; return what tells the share of a record's pages that are in memory."""
    shards = [store.folder / shard.name for shard in store.header.shards]
    for path in shards:
        evict(path)
    if any(map(cached_pages, shards)):
        pytest.skip("this file system keeps its pages")

    def share(place):
        shard, begin, end = (int(column[0]) for column in store.spans([place]))
        return cached_share(shards[shard], begin, end)

    return share


@pytest.mark.parametrize("order", ["stored", "source"])
def test_records_of_a_store_are_there_before_their_batch_and_no_others(cold_store, order):
    data = Unread(PackedStore(cold_store), order=order)
    drawn = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    shuffled = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    built = DataLoader(data, BATCH, sampler=shuffled)

    assert_announced_records_come(data, built, data.places[drawn.numpy()])


def test_records_behind_a_data_set_of_the_scripts_own_are_there_before_their_batch(cold_store):
    own, technique = Halves(cold_store), ReadAhead(batches_ahead=3)
    technique.loader({"dataset": own, "batch_size": BATCH})
    own.is_read = False

    assert_announced_records_come(own.data, DataLoader(own, BATCH), own.data.places, technique)


def assert_announced_records_come(data, built, places, technique=None):
    share = cold_pages(data.store)

    ahead = technique or ReadAhead(batches_ahead=3)
    batches = ahead.batches(iter(built), built)
    next(batches)

    announced, others = places[: 4 * BATCH], places[4 * BATCH :]
    assert wait_for(lambda: all(share(place) == 1.0 for place in announced))
    # The first and the last page of a record are also its neighbours'.
    assert max(share(place) for place in others) < 0.1


def test_a_store_in_full_permutation_gives_the_same_batches_when_it_reads_ahead(cold_store):
    asked = {
        "dataset": flatout.data.open(cold_store),
        "batch_size": BATCH,
        "shuffle": True,
        "num_workers": 1,
        "collate_fn": checksums,
    }

    assert two_epochs(asked, ReadAhead()) == two_epochs(asked)


def checksums(samples):
    return [sample["x"].sum() for sample in samples]


def test_a_data_set_that_mixes_samples_of_a_store_is_left_alone(cold_store):
    class Mixed(Halves):
        def __getitem__(self, index):
            return self.data[index]["x"] + self.data[index - 1]["x"]

    with pytest.raises(NotApplicable, match="is made of"):
        ReadAhead().loader({"dataset": Mixed(cold_store), "batch_size": BATCH})


def test_files_that_do_not_fit_are_told_at_the_end(paths, monkeypatch):
    monkeypatch.setattr(
        "flatout.techniques.data.read_ahead.dataset_files.free_memory_bytes", lambda: 1_000
    )
    technique = ReadAhead(warms_up=True)
    assert technique.end() == ""

    technique.loader({"dataset": Photographs(paths), "batch_size": 3})
    technique.warmed[0].wait()

    assert "more than 50% of the free memory" in technique.end()


def reading(stored, read_ms=60.0):
    seen = Journey(
        legs=(leg("read", read_ms), leg("decode", 20.0), leg("collate", 20.0)),
        workers=(worker(storage_bytes_per_step=stored),),
    )
    return profile(phases_ms={"data_wait": 50.0}, loaders=(loader(),), journey=seen)


def test_it_is_offered_only_where_cold_reads_are_the_measured_limit():
    assert ReadAhead.candidates(reading(stored=2.0 * MIB), machine()) == [ReadAhead()]
    assert ReadAhead.candidates(reading(stored=0.0), machine()) == ()
    assert ReadAhead.candidates(reading(stored=2.0 * MIB, read_ms=1.0), machine()) == ()
    assert ReadAhead.candidates(profile(phases_ms={"data_wait": 50.0}), machine()) == ()


def test_the_share_that_is_blocked_is_what_may_go():
    effect = ReadAhead().predict(reading(stored=2.0 * MIB), machine())

    assert effect.step_ms == pytest.approx(-30.0)
    assert "60%" in effect.why
