"""OpenCV's tables and albumentations' scaling; skipped where they are not installed."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from flatout.data.byte_batches.transport import PackingCollate
from flatout.techniques.data.device_preprocess import send_bytes
from tests.data.byte_batches.test_transport import batches, forms
from tests.data.tails import Pictures

cv2 = pytest.importorskip("cv2")

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
TABLES = ((np.arange(256) / 255 - MEAN[:, None]) / STD[:, None]).astype(np.float32)


@pytest.fixture(scope="module")
def pictures():
    noise = np.random.default_rng(0)
    made = [noise.integers(0, 256, (80, 90, 3), dtype=np.uint8) for _ in range(14)]
    return [Image.fromarray(pixels) for pixels in made]


def one_table(image):
    return torch.from_numpy(cv2.LUT(np.array(image), TABLES[0]).transpose(2, 0, 1))


def a_table_for_each_channel(image):
    pixels = np.array(image)
    planes = [cv2.LUT(pixels[:, :, place], TABLES[place]) for place in range(3)]
    return torch.from_numpy(cv2.merge(planes).transpose(2, 0, 1))


def a_column_for_each_channel(image):
    return torch.from_numpy(cv2.LUT(np.array(image), TABLES.T[:, None]).transpose(2, 0, 1))


def a_row_of_columns_for_each_channel(image):
    return torch.from_numpy(cv2.LUT(np.array(image)[3:70, ::-1], TABLES.T[None]))


def then_arithmetic(image):
    return torch.from_numpy(cv2.LUT(np.array(image), TABLES[1]) * 2 - 1).permute(2, 0, 1)


def in_double(image):
    return torch.from_numpy(cv2.LUT(np.array(image), TABLES[1].astype(np.float64)))


SCALED = [
    one_table,
    a_table_for_each_channel,
    a_column_for_each_channel,
    a_row_of_columns_for_each_channel,
    then_arithmetic,
    in_double,
]


@pytest.mark.parametrize("tail", SCALED)
def test_a_table_of_floats_travels_as_bytes_and_arrives_bit_by_bit(pictures, tail):
    plain, _, _ = batches(Pictures(pictures, tail), packs=False)
    packed, plan, _ = batches(Pictures(pictures, tail), packs=True)

    assert forms(packed) == forms(plain)
    assert plan.trouble == ""
    assert plan.packed == 6


def bytes_to_bytes(image):
    pixels = cv2.LUT(np.array(image), np.arange(256, dtype=np.uint8)[::-1].copy())
    return torch.from_numpy(pixels)


def mixed_planes(image):
    pixels = np.array(image)
    plain = pixels[:, :, 1].astype(np.float32)
    planes = [cv2.LUT(pixels[:, :, 0], TABLES[0]), np.asarray(plain), np.asarray(plain)]
    return torch.from_numpy(cv2.merge(planes))


@pytest.mark.parametrize("tail", [bytes_to_bytes, mixed_planes])
def test_other_uses_of_opencv_are_its_own(pictures, tail):
    plain, _, _ = batches(Pictures(pictures, tail), packs=False)
    packed, plan, _ = batches(Pictures(pictures, tail), packs=True)

    assert forms(packed) == forms(plain)
    assert plan.trouble == ""


def test_afterwards_opencv_is_as_it_was(pictures):
    before = cv2.LUT, cv2.merge
    loader = DataLoader(Pictures(pictures, one_table), 6)
    loader.collate_fn = PackingCollate(loader.collate_fn)

    list(loader)

    assert (cv2.LUT, cv2.merge) == before


class Augmented(Pictures):
    def __getitem__(self, index):
        return self.tail(image=np.array(self.pictures[index]))["image"], index


CHANGES = {
    "nothing": (),
    "crop and flip": (("RandomCrop", (64, 64)), ("HorizontalFlip", ())),
    "resized crop": (("RandomResizedCrop", ((64, 64),)), ("HorizontalFlip", ())),
    "colours": (("ColorJitter", ()),),
}
"""By name, what albumentations does to the picture before it is scaled."""


@pytest.mark.parametrize("name", CHANGES)
def test_albumentations_scaled_images_travel_as_bytes(pictures, name, monkeypatch):
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # importing it asks the network otherwise
    albumentations = pytest.importorskip("albumentations")
    to_tensor = pytest.importorskip("albumentations.pytorch").ToTensorV2
    changes = [getattr(albumentations, kind)(*args) for kind, args in CHANGES[name]]
    tail = albumentations.Compose([*changes, albumentations.Normalize(), to_tensor()], seed=0)
    dataset = Augmented(pictures, tail)
    expected = list(DataLoader(dataset, 6))
    tail.set_random_seed(0)
    built = send_bytes(DataLoader(dataset, 6))

    found = list(built)

    assert forms(found) == forms(expected)
    assert built.collate_fn.packed == 3
