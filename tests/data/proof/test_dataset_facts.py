from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from flatout.data.proof.dataset_facts import find_catcher


class Plain:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        with Path(__file__).open() as file:
            return self.read(file, index)

    def read(self, file, index):
        try:
            return file.readline(), index
        finally:
            file.close()


class Narrow(Plain):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except FileNotFoundError:
            return self[0]


class Broad(Plain):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except Exception:  # noqa: BLE001
            return self[0]


class Bare(Plain):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except:  # noqa: E722
            return self[0]


class Several(Plain):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except (OSError, ValueError):
            return None


class Suppressing(Plain):
    def __getitem__(self, index):
        with suppress(Exception):
            return super().__getitem__(index)


class Below(Plain):
    def read(self, file, index):
        try:
            return super().read(file, index)
        except ValueError:
            return None


class Transformed(Plain):
    def __init__(self, transform):
        self.transform = transform


class Forgiving:
    def __call__(self, value):
        try:
            return value + 1
        except TypeError:
            return value


class Module(torch.nn.Module):
    """Torch's own `__call__` catches errors, and raises them again."""

    def forward(self, value):
        return value


@pytest.mark.parametrize(
    "dataset", [Plain(), Narrow(), [1, 2], Subset(Plain(), [0]), Transformed(Module())]
)
def test_ordinary_data_sets_catch_nothing(dataset):
    assert find_catcher(dataset) == ""


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Broad(), "Broad.__getitem__"),
        (Bare(), "Bare.__getitem__"),
        (Several(), "Several.__getitem__"),
        (Suppressing(), "Suppressing.__getitem__"),
        (Below(), "Below.read"),
        (Subset(Broad(), [0]), "Broad.__getitem__"),
        (ConcatDataset([Plain(), Bare()]), "Bare.__getitem__"),
        (Transformed(Forgiving()), "Forgiving.__call__"),
    ],
)
def test_those_that_go_on_after_any_error_are_named(dataset, name):
    assert find_catcher(dataset) == name
