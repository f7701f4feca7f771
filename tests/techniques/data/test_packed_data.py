import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from flatout.data import writer
from flatout.data.format import TIMED_SAMPLE, Encoding
from flatout.data.sources import open_source
from flatout.data.sources.source import SourceSample, sampled_numbers
from flatout.data.writer import PackOptions
from flatout.records.errors import NotApplicable
from flatout.records.journey import Journey
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome
from flatout.techniques.data.packed_data import PackedData, find_stores, read_from
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.ranking import Search, rank
from flatout.tuning.trial_runner import TrialRunner
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.workflow.demo import scenarios
from tests.data.packs import image_folder, packed, photograph
from tests.rules.journey_facts import MIB, leg, worker
from tests.techniques.facts import loader, machine, profile
from tests.techniques.facts import pipeline as diagnosis
from tests.techniques.guarded import machine as real_machine
from tests.techniques.guarded import recipe_of, workload_of

PROMISE = "this module asks the guard"

RAW = Encoding(kind="raw")


class Photographs(Dataset):
    """Files of a folder, flipped at random, as people write it."""

    def __init__(self, root, seed=0):
        self.paths = sorted(Path(root).rglob("*.jpeg"))
        random.Random(seed).shuffle(self.paths)
        self.classes = sorted({path.parent.name for path in self.paths})
        self.own = random.Random(0)
        self.draws_from_own = False

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = Image.open(path).convert("RGB").resize((24, 24))
        stream = self.own if self.draws_from_own else random
        if stream.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        shift = torch.randint(0, 9, ()).item() + np.random.randint(9)
        return torch.from_numpy(np.array(image)) + shift, self.classes.index(path.parent.name)


class TorchvisionLike(Photographs):
    """Opens the file first and gives Pillow the open file."""

    def __getitem__(self, index):
        with self.paths[index].open("rb") as file:
            image = Image.open(file).convert("RGB")
        return torch.from_numpy(np.array(image.resize((24, 24)))), index % 2


class Arrays(Dataset):
    """Samples that are the same each time."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"x": torch.full((2, 3), float(index)), "y": index % 3}


class Changing(Arrays):
    def __getitem__(self, index):
        return {"x": torch.rand(2, 3), "y": index % 3}


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("p") / "photos", 60)


@pytest.fixture(scope="module")
def store(photos):
    folder = photos.parent / "raw.packed"
    packed(photos, folder, encoding=RAW)
    return str(folder)


def epoch(dataset, **options):
    """Return an epoch's batches and where the streams stand afterwards."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    batches = [x.tolist() for pair in DataLoader(dataset, 8, shuffle=True, **options) for x in pair]
    return [*batches, torch.rand(1).item(), random.random()]


@pytest.mark.parametrize("kind", [Photographs, TorchvisionLike])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_random_streams_are_those_of_the_files(photos, store, kind, workers):
    plain = epoch(kind(photos), num_workers=workers)

    changed = PackedData(path=store).loader({"dataset": kind(photos)})["dataset"]

    assert epoch(changed, num_workers=workers) == plain


def test_a_table_may_name_its_files_by_whole_paths(tmp_path):
    photos = image_folder(tmp_path / "photos", 6)
    rows = "".join(f"{path},0\n" for path in sorted(photos.rglob("*.jpeg")))
    (tmp_path / "photos.csv").write_text(f"path,label\n{rows}")
    packed(tmp_path / "photos.csv", tmp_path / "a.packed", encoding=RAW)
    plain = TorchvisionLike(photos)

    found = read_from(plain, str(tmp_path / "a.packed"))

    for path in plain.paths:
        path.write_bytes(b"")
    assert len({found[number][0].float().mean().item() for number in range(6)}) == 6


def test_the_files_are_not_decoded_any_more(photos, store, tmp_path):
    moved = tmp_path / "photos"
    moved.mkdir()
    for path in photos.rglob("*.jpeg"):
        (moved / path.parent.name).mkdir(exist_ok=True)
        (moved / path.parent.name / path.name).write_bytes(path.read_bytes())
    data = Photographs(moved)
    expected = epoch(data)
    changed = read_from(data, store, root=str(moved))

    for path in moved.rglob("*.jpeg"):
        path.write_bytes(b"no image")

    assert epoch(changed) == expected


def test_what_a_script_asks_of_its_data_set_is_still_there(photos, store):
    data = Photographs(photos)

    changed = read_from(data, store)

    assert isinstance(changed, Photographs)
    assert changed.classes == data.classes
    assert len(changed) == len(data)


def test_a_part_of_the_data_set_reads_from_the_store_too(photos, store):
    part = Subset(TorchvisionLike(photos), range(5, 25))

    changed = read_from(part, store)

    assert epoch(changed) == epoch(part)


def test_it_can_be_sent_to_spawned_workers(photos, store):
    data = TorchvisionLike(photos)
    changed = read_from(data, store)

    again = pickle.loads(pickle.dumps(changed))

    assert torch.equal(again[3][0], data[3][0])


def test_other_images_are_still_opened_as_before(photos, store, tmp_path):
    photograph(1).save(tmp_path / "other.png")
    read_from(Photographs(photos), store)[0]

    with Image.open(tmp_path / "other.png") as image:
        assert image.tobytes() == photograph(1).tobytes()


def test_a_file_that_changed_is_noticed(photos, tmp_path):
    source = image_folder(tmp_path / "photos", 20)
    packed(source, tmp_path / "a")
    photograph(99).save(source / "cat/0002.jpeg")

    with pytest.raises(NotApplicable, match="of the store differs"):
        read_from(Photographs(source), str(tmp_path / "a"))


def test_a_folder_that_was_not_packed_is_noticed(store, tmp_path):
    other = image_folder(tmp_path / "others", 20)

    with pytest.raises(NotApplicable, match="does not come from the packed folder"):
        read_from(Photographs(other), store)


def test_randomness_that_cannot_be_repeated_is_refused(photos, store):
    data = Photographs(photos)
    data.draws_from_own = True
    before = data.own.getstate()

    with pytest.raises(NotApplicable, match="another one each time"):
        read_from(data, store)
    assert data.own.getstate() == before


def test_a_lossy_store_is_refused(photos, tmp_path):
    packed(photos, tmp_path / "a", encoding=Encoding(kind="raw", short_side=16))

    with pytest.raises(NotApplicable, match="is lossy"):
        read_from(Photographs(photos), str(tmp_path / "a"))


def sampled(source, folder, size, monkeypatch, encoding=RAW):
    """Pack some samples of a source, as a tuning does to time them; return the store."""
    whole = open_source(str(source), work=folder.parent / "work")
    sample = SourceSample(whole=whole, size=size)
    writer.pack(sample, folder, PackOptions(encoding=encoding), lambda _: None)
    monkeypatch.setenv(TIMED_SAMPLE, str(folder))
    return str(folder)


def test_images_of_a_sample_stand_for_those_that_it_lacks(tmp_path, monkeypatch):
    source = image_folder(tmp_path / "photos", 40)
    data = TorchvisionLike(source)
    data.paths.sort()
    known = {int(n): data[int(n)][0] for n in sampled_numbers(40, 10)}
    sample = sampled(source, tmp_path / "sample", 10, monkeypatch)
    changed = read_from(data, sample)

    for path in source.rglob("*.jpeg"):
        path.write_bytes(b"no image")

    seen = [changed[index][0] for index in range(len(changed))]
    assert len(seen) == 40
    assert sum(any(torch.equal(one, other) for other in known.values()) for one in seen) == 40
    assert {str(one.sum()) for one in seen} == {str(one.sum()) for one in known.values()}


def test_the_images_that_a_sample_has_are_compared(tmp_path, monkeypatch):
    source = image_folder(tmp_path / "photos", 40)
    sample = sampled(source, tmp_path / "sample", 10, monkeypatch)
    inorder = TorchvisionLike(source)
    inorder.paths.sort()
    photograph(99).save(inorder.paths[sampled_numbers(40, 10)[3]])

    with pytest.raises(NotApplicable, match="of the store differs"):
        read_from(inorder, sample)


def test_a_sample_of_whole_items_stands_for_all(tmp_path, monkeypatch):
    script = "from tests.techniques.data.test_packed_data import Arrays\ndata = Arrays()\n"
    (tmp_path / "some_made_here.py").write_text(script)
    target, whole = f"{tmp_path / 'some_made_here.py'}:data", Encoding()
    sample = sampled(target, tmp_path / "sample", 7, monkeypatch, whole)

    changed = read_from(Arrays(), sample)

    assert len(changed) == 30
    values = [changed[index]["x"][0, 0].item() for index in range(30)]
    numbers = sampled_numbers(30, 7).tolist()
    assert set(values) == set(numbers)
    assert [values[number] for number in numbers] == numbers
    with pytest.raises(NotApplicable, match="the store has 30 samples, the data set 10"):
        read_from(Subset(Arrays(), range(10)), sample)


def test_a_sample_is_refused_and_not_offered_outside_the_trials_that_time_it(tmp_path, monkeypatch):
    source = image_folder(tmp_path / "photos", 40)
    sample = sampled(source, tmp_path / "some.packed", 10, monkeypatch)
    monkeypatch.delenv(TIMED_SAMPLE)
    monkeypatch.chdir(tmp_path)
    waiting = profile(phases_ms={"data_wait": 100.0}, loaders=(loader(),))

    assert PackedData.candidates(waiting, machine()) == []
    with pytest.raises(NotApplicable, match="holds 10 of 40 samples"):
        read_from(TorchvisionLike(source), sample)


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    """Return a store that was packed from a data set's own items."""
    script = "from tests.techniques.data.test_packed_data import Arrays\ndata = Arrays()\n"
    (tmp_path / "made_here.py").write_text(script)
    packed(f"{tmp_path / 'made_here.py'}:data", tmp_path / "items")
    return str(tmp_path / "items")


def test_whole_samples_come_from_a_store_of_the_data_set_itself(arrays):
    changed = read_from(Arrays(), arrays)

    plain, found = (list(DataLoader(d, 7)) for d in (Arrays(), changed))

    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(plain, found, strict=True))
    assert all(torch.equal(a["y"], b["y"]) for a, b in zip(plain, found, strict=True))


class ChannelsLast(Arrays):
    """Pictures whose channels lie next to each other."""

    def __init__(self, channels):
        self.channels = channels

    def __getitem__(self, index):
        x = torch.arange(40.0 * self.channels).reshape(2, 5, 4, self.channels) + index
        return x.permute(0, 3, 1, 2), index


GREY, COLOUR = ChannelsLast(1), ChannelsLast(3)


@pytest.mark.parametrize("name", ["GREY", "COLOUR"])
def test_whole_samples_lie_in_memory_as_the_data_set_has_them(tmp_path, name):
    script = f"from tests.techniques.data.test_packed_data import {name}\n"
    (tmp_path / f"made_here_{name}.py").write_text(script)
    packed(f"{tmp_path / f'made_here_{name}.py'}:{name}", tmp_path / "items")
    plain = globals()[name]

    changed = read_from(plain, str(tmp_path / "items"))

    for number in range(len(plain)):
        (x, y), (found, label) = plain[number], changed[number]
        assert torch.equal(found, x)
        assert found.stride() == x.stride()
        assert label == y


class Scaled(Arrays):
    """The same samples until the script sets another factor."""

    factor = 1.0

    def __init__(self):
        self.factor = 1.0

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"x": sample["x"] * self.factor}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_script_changes_between_epochs_shows_and_is_told(arrays, workers):
    technique = PackedData(path=arrays)
    changed = technique.loader({"dataset": Scaled()})["dataset"]
    built = DataLoader(changed, 30, num_workers=workers)
    (before,) = built
    assert technique.end() == ""

    built.dataset.factor = 3.0
    (after,) = built

    assert torch.equal(after["x"], 3 * before["x"])
    assert "(factor)" in technique.end()


def test_a_random_or_shorter_data_set_is_not_replaced(arrays):
    with pytest.raises(NotApplicable, match="a store holds one version"):
        read_from(Changing(), arrays)
    with pytest.raises(NotApplicable, match="the store has 30 samples, the data set 10"):
        read_from(Subset(Arrays(), range(10)), arrays)
    with pytest.raises(NotApplicable, match="differs"):
        read_from(Subset(Arrays(), list(range(29, -1, -1))), arrays)


def test_without_a_store_there_is_nothing_to_do(photos, tmp_path):
    with pytest.raises(NotApplicable, match="no store is named"):
        PackedData().loader({"dataset": Photographs(photos)})
    with pytest.raises(NotApplicable, match="there is no packed store"):
        read_from(Photographs(photos), str(tmp_path / "nothing"))
    with pytest.raises(NotApplicable, match="iterable"):
        read_from(Endless(), str(tmp_path))


def test_stores_that_are_named_or_lie_there_are_offered(photos, store, tmp_path, monkeypatch):
    monkeypatch.chdir(photos.parent)
    packed(photos, tmp_path / "lossy", encoding=Encoding(kind="jpeg"))
    packed(photos, tmp_path / "other")
    monkeypatch.setenv("FLATOUT_PACKED", f"{tmp_path / 'other'}:{tmp_path / 'lossy'}")
    waiting = profile(phases_ms={"data_wait": 100.0}, loaders=(loader(),))

    found = PackedData.candidates(waiting, machine())

    assert [item.path for item in found] == [str(tmp_path / "other"), store]
    gains = [item.predict(waiting, machine()).step_ms for item in found]
    assert gains[1] < gains[0] < 0


def cold(stored=2.0 * MIB):
    """Return a profile of 2 workers that are blocked for most of the making of a batch."""
    seen = Journey(
        legs=(leg("read", 160.0), leg("decode", 20.0), leg("collate", 20.0)),
        workers=tuple(worker(number, storage_bytes_per_step=stored) for number in (0, 1)),
    )
    waiting = {"data_wait": 100.0}
    return profile(phases_ms=waiting, loaders=(loader(num_workers=2),), journey=seen)


def expected(technique, facts):
    """Return the ratio that the tuner expects of a technique."""
    found = rank(facts, Search(machine=machine(), ceiling=Numerics.EXACT, only=("packed_data",)))
    (candidate,) = [item for item in found if item.choice.settings == technique.settings()]
    return candidate.ratio


def test_a_store_of_the_files_themselves_is_worth_a_trial_where_reads_are_cold(
    photos, store, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLATOUT_PACKED", f"{tmp_path / 'original'}:{store}")
    packed(photos, tmp_path / "original")
    original = PackedData(path=str(tmp_path / "original"))

    assert expected(original, cold()) > 1.2
    assert "not cached" in original.predict(cold(), machine()).why
    assert expected(original, cold(stored=0.0)) < 1.01


def test_a_store_of_pixels_saves_the_share_of_decoding_that_was_measured(store):
    waiting = profile(phases_ms={"data_wait": 100.0}, loaders=(loader(),))
    mostly = replace(waiting, pipeline=diagnosis(decode=7.0, python=3.0, transport=9.0))
    hardly = replace(waiting, pipeline=diagnosis(decode=1.0, python=9.0))

    gains = [
        PackedData(path=store).predict(facts, machine()).step_ms
        for facts in (mostly, waiting, hardly)
    ]

    assert gains == pytest.approx([-72.0, -42.0, -12.0])


def test_nothing_is_offered_without_a_wait_or_a_store(monkeypatch, tmp_path, store):
    waiting = profile(phases_ms={"data_wait": 100.0}, loaders=(loader(),))
    assert PackedData.candidates(profile(loaders=(loader(),)), machine()) == ()
    monkeypatch.chdir(tmp_path)

    assert find_stores() == []
    assert PackedData.candidates(waiting, machine()) == []


@pytest.mark.slow
def test_an_unmodified_script_trains_on_the_same_numbers(tmp_path):
    scenario = scenarios() / "starved_images"
    source = image_folder(tmp_path / "photos", 80, suffix="png")
    packed(source, tmp_path / "a", encoding=RAW)
    workload = workload_of(f"train.py --data {source} --image-size 32 --width 4", scenario)

    plain, changed = (
        run_trial(workload, recipe, real_machine(), TrialOptions(limit_s=120.0))
        for recipe in (recipe_of("cudnn_autotune"), recipe_of("packed_data", path=f"{tmp_path}/a"))
    )

    assert changed.outcome is Outcome.OK
    assert changed.not_applied == ()
    pairs = list(zip(changed.profile.losses, plain.profile.losses, strict=False))
    assert len(pairs) > 10
    assert all(a == b for a, b in pairs)

    lab = TrialRunner(workload=workload, machine=real_machine(), out=tmp_path, limit_s=200.0)
    check = GuardChecker(lab, lambda _: None).check(recipe_of("packed_data", path=f"{tmp_path}/a"))

    assert check.status == "same", check.why
