from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import Dataset, Subset

from flatout.techniques.data.read_ahead.dataset_files import find_files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(20):
        (tmp_path / "images" / f"n{number:02}.jpg").write_bytes(b"x" * number)
    return tmp_path / "images"


class Named(Dataset):
    """Opens what `locate` makes of its own list's items."""

    def __init__(self, names, locate):
        self.transform = None
        self.labels = list(range(len(names)))
        self.names = names
        self.locate = locate

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return len(Path(self.locate(self.names[index])).read_bytes())


def paths_of(folder):
    return [folder / f"n{number:02}.jpg" for number in range(20)]


@pytest.mark.parametrize(
    ("names", "locate"),
    [
        (lambda f: paths_of(f), lambda _f: str),
        (lambda f: [(str(p), 1) for p in paths_of(f)], lambda _f: lambda item: item[0]),
        (lambda f: [(1, str(p)) for p in paths_of(f)], lambda _f: lambda item: item[1]),
        (lambda f: [p.name for p in paths_of(f)], lambda f: lambda name: f / name),
        (lambda f: [p.stem for p in paths_of(f)], lambda f: lambda stem: f / f"{stem}.jpg"),
        (lambda f: np.array([p.stem for p in paths_of(f)]), lambda f: lambda s: f / f"{s}.jpg"),
    ],
    ids=["paths", "pairs", "turned pairs", "names", "stems", "array"],
)
def test_the_list_that_names_the_files_is_found(folder, names, locate):
    find = find_files(Named(names(folder), locate(folder)))

    assert [find(number) for number in (0, 7, 19)] == [
        str(folder / f"n{number:02}.jpg") for number in (0, 7, 19)
    ]


def test_a_subset_of_a_subset_is_looked_through(folder):
    whole = Named(paths_of(folder), str)
    part = Subset(Subset(whole, list(range(10, 20))), [3, 1, 5, 7, 2, 9])

    assert find_files(part)(0) == str(folder / "n13.jpg")


def test_relative_names_are_found(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)

    find = find_files(Named([f"./images/{p.name}" for p in paths_of(folder)], str))

    assert find(3) == str(folder / "n03.jpg")


def test_sets_whose_files_no_list_names(folder):
    class Computed(Named):
        def __getitem__(self, index):
            return (folder / f"n{index:02}.jpg").read_bytes()

    class Opens(Named):
        def __getitem__(self, index):
            return index

    assert find_files(Computed(list(range(20)), None)) is None
    assert find_files(Opens(paths_of(folder), None)) is None
    assert find_files(Named([], None)) is None


def test_watching_leaves_no_trace(folder):
    whole = Named(paths_of(folder), str)

    find_files(whole)

    assert vars(whole).keys() == {"transform", "labels", "names", "locate"}
