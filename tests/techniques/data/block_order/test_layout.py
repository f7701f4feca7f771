from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import Dataset, Subset

import flatout.data
from flatout.data.caching import free_memory_bytes
from flatout.data.sampler import unevenness
from flatout.records.errors import NotApplicable
from flatout.techniques.data.block_order.layout import (
    StorageLayout,
    arrange,
    block_shuffle,
    layout_of,
)
from tests.data.packs import Items, image_folder, packed
from tests.data.page_cache import cached_pages, evict, wait_for

COUNT, CLASSES = 9_000, 9
"""Two windows of files."""


class Files(Dataset):
    """Opens the files of a list."""

    def __init__(self, paths):
        self.paths = [str(path) for path in paths]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return len(Path(self.paths[index]).read_bytes())


@pytest.fixture(scope="module")
def sorted_folder(tmp_path_factory):
    """Return files that were written class by class, as they lie in most folders."""
    root = tmp_path_factory.mktemp("sorted")
    paths = []
    for number in range(COUNT):
        folder = root / f"{number * CLASSES // COUNT}"
        folder.mkdir(exist_ok=True)
        paths.append(folder / f"{number}.bin")
        paths[-1].write_bytes(b"x" * 10)
    return paths


def made_up(classes):
    """Return the layout of samples of these classes, of which nothing has to be read."""
    numbers = np.arange(len(classes))
    return StorageLayout(numbers=numbers, classes=classes, ask=len, sample_bytes=1.0)


@pytest.fixture
def lying(monkeypatch):
    """Return what sets how a data set lies, where only the order matters."""
    module = "flatout.techniques.data.block_order.layout"
    return lambda layout: monkeypatch.setattr(f"{module}.layout_of", lambda _: layout)


def test_a_folder_of_sorted_files_is_read_in_blocks_that_mix_like_a_shuffle(sorted_folder):
    found = arrange(Files(sorted_folder), 64)

    numbers = found.layout.numbers
    order = numbers[np.concatenate(found.windows(5))]
    assert (found.block, found.window, len(found.windows(0))) == (16, 4096, 2)
    assert found.once() == COUNT
    assert found.jumps() <= COUNT / 15
    assert found.uneven <= 1.03
    assert unevenness(order * CLASSES // COUNT, 64) < 1.1
    # And the blocks are neighbours on storage: that is what they are for.
    inodes = np.array([Path(path).stat().st_ino for path in sorted_folder])[numbers]
    assert (np.diff(inodes.astype(np.int64)) > 0).all()


def test_every_epoch_is_another_order_of_all_samples(sorted_folder):
    sampler = block_shuffle(Files(sorted_folder), 64)

    first, second = list(sampler), list(sampler)

    assert len(sampler) == COUNT
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second


def test_the_first_window_is_asked_for_before_its_first_sample(sorted_folder):
    asked = []
    sampler = block_shuffle(Files(sorted_folder), 64)
    layout = sampler.arrangement.layout
    object.__setattr__(layout, "ask", lambda numbers: asked.append(list(numbers)) or len(numbers))

    order = iter(sampler)
    first = next(order)

    assert first in asked[0]
    assert 4_400 < len(asked[0]) < 4_600
    places = {number: place for place, number in enumerate(layout.numbers.tolist())}
    assert [places[n] for n in asked[0]] == sorted(places[n] for n in asked[0])
    rest = list(order)
    assert sorted([first, *rest]) == list(range(COUNT))


def test_the_files_of_the_first_window_are_in_memory_when_it_begins(tmp_path):
    paths = sorted(image_folder(tmp_path, count=12).glob("*/*.jpeg"))
    sampler = block_shuffle(Files(paths), 2)
    for path in paths:
        evict(path)
    if any(map(cached_pages, paths)):
        pytest.skip("this file system keeps its pages")

    next(iter(sampler))

    assert wait_for(lambda: all(map(cached_pages, paths)))


@pytest.mark.parametrize(
    ("classes", "block"), [(10, 16), (100, 16), (1000, 8), (50_000, 16)], ids=str
)
def test_the_largest_blocks_are_taken_that_mix_like_a_shuffle(lying, classes, block):
    lying(made_up(np.repeat(np.arange(classes), 100_000 // classes)))

    found = arrange(None, 256)

    assert found.block == block
    assert found.uneven <= 1.03


def test_classes_that_no_window_holds_all_of_are_left_alone(lying):
    lying(made_up(np.repeat(np.arange(4_096), 4)))

    with pytest.raises(NotApplicable, match=r"mix 1\.0\d times as unevenly as a shuffle at best"):
        arrange(None, 1_024)


def test_smaller_blocks_are_taken_where_asked(sorted_folder):
    assert arrange(Files(sorted_folder), 64, block=4).block == 4


def test_a_window_that_does_not_fit_into_memory_is_refused(lying):
    layout = made_up(np.arange(100_000) % 10)
    object.__setattr__(layout, "sample_bytes", free_memory_bytes() / 1_000)
    lying(layout)

    with pytest.raises(NotApplicable, match="two windows of 4096 samples take"):
        arrange(None, 64)


def test_files_in_one_folder_need_targets(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.bin").write_bytes(b"x")
    data = Files(sorted(tmp_path.glob("*.bin")))

    with pytest.raises(NotApplicable, match="no `targets` tell their classes"):
        layout_of(data)

    data.targets = [number % 2 for number in range(12)]
    assert sorted(layout_of(data).classes) == [0] * 6 + [1] * 6


def test_a_subset_is_read_in_the_order_of_its_own_files(sorted_folder):
    indices = list(range(8_999, -1, -3))
    data = Subset(Files(sorted_folder), indices)

    found = layout_of(data)

    assert sorted(found.numbers) == list(range(len(data)))
    inodes = [sorted_folder[indices[number]].stat().st_ino for number in found.numbers]
    assert inodes == sorted(inodes)


def test_files_that_no_list_names_are_left_alone():
    with pytest.raises(NotApplicable, match="no list of the data set names the files"):
        layout_of(Items([1, 2, 3]))


def test_files_that_are_gone_are_left_alone(tmp_path):
    data = Files(sorted(image_folder(tmp_path, count=12).glob("*/*.jpeg")))
    Path(data.paths[1]).unlink()

    with pytest.raises(NotApplicable, match="cannot be looked at"):
        layout_of(data)


@pytest.mark.parametrize("order", ["stored", "source"])
def test_records_lie_as_they_were_stored(tmp_path, order):
    image_folder(tmp_path / "images", count=12)
    packed(tmp_path / "images", tmp_path / "store")
    data = flatout.data.open(tmp_path / "store", order=order)

    found = layout_of(data)

    stored = flatout.data.open(tmp_path / "store")
    assert [data[int(n)][1] for n in found.numbers] == [stored[n][1] for n in range(12)]
    assert found.classes.tolist() == [stored[n][1] for n in range(12)]


def test_a_store_without_labels_needs_no_count_where_it_is_shuffled(tmp_path):
    np.save(tmp_path / "numbers.npy", np.arange(100))
    packed(tmp_path / "numbers.npy", tmp_path / "store")
    packed(tmp_path / "numbers.npy", tmp_path / "kept", is_shuffled=False)

    found = arrange(flatout.data.open(tmp_path / "store"), 8)

    assert (found.block, found.uneven, found.once()) == (16, None, 100)
    with pytest.raises(NotApplicable, match="keeps the order of its source"):
        arrange(flatout.data.open(tmp_path / "kept"), 8)
