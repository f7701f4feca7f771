"""Lossy techniques on real photographs: labels are the same, and pictures look as they did.

What is compared is what a training sees: each picture made as small as a network takes it. Limits
are in levels of 256, up to twice the most that was measured on these 25 pictures.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import flatout.data
from flatout.data.format import Encoding
from flatout.techniques.data.scaled_decode import decode_scaled
from tests.data.packs import packed
from tests.data.photographs import tensor_of
from tests.data.real_photographs import write_real

SIDE = 224
"""Of what the training sees."""
SMALL_SIDE = 64
"""For `scaled_decode`, so that even photographs of half a megapixel are large enough."""
ENCODINGS = {
    "jpeg": Encoding(kind="jpeg"),
    "jpeg of quality 75": Encoding(kind="jpeg", quality=75),
    "short side 256": Encoding(kind="raw", short_side=256),
    "short side 256 as jpeg": Encoding(kind="jpeg", short_side=256),
}
MAX_MEAN, MAX_SPREAD = 0.5, 2.0
"""How far a channel's mean and its standard deviation may move in one picture."""
MAX_SET_MEAN, MAX_SET_SPREAD = 0.2, 0.5
"""How far their averages over the data set may move."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_real(tmp_path_factory.mktemp("real") / "photographs")


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    store = tmp_path_factory.mktemp("stores") / "a"
    packed(folder, store)
    return opened(store)


def opened(store):
    return flatout.data.open(store, order="source", decode="numpy")


def seen(data):
    """Return the pictures of a store as a training sees them."""
    images = [Image.fromarray(data[number][0]) for number in range(len(data))]
    return [np.asarray(image.resize((SIDE, SIDE))) for image in images]


def look(pictures):
    """Return mean and standard deviation of each channel of each picture, in levels."""
    pixels = [np.asarray(one).reshape(-1, 3).astype(np.float64) for one in pictures]
    return np.array([(one.mean(axis=0), one.std(axis=0)) for one in pixels])


def moved(before, after):
    """Return the largest change in one picture, then of the set: of means and of deviations."""
    change = after - before
    return np.abs(change).max(axis=(0, 2)), np.abs(change.mean(axis=0)).max(axis=1)


def is_within(before, after):
    (mean, spread), (set_mean, set_spread) = moved(before, after)
    in_picture = mean < MAX_MEAN and spread < MAX_SPREAD
    return in_picture and set_mean < MAX_SET_MEAN and set_spread < MAX_SET_SPREAD


@pytest.mark.parametrize("name", ENCODINGS)
def test_packed_photographs_keep_their_labels_and_their_look(folder, plain, tmp_path, name):
    header = packed(folder, tmp_path / "a", encoding=ENCODINGS[name])

    lossy = opened(tmp_path / "a")

    assert not header.is_lossless
    for (small, _), (large, _) in zip(lossy, plain, strict=True):
        sides = np.array(large.shape[:2])
        shrink = min(1.0, 256 / min(sides)) if ENCODINGS[name].short_side else 1.0
        assert np.abs(small.shape[:2] - shrink * sides).max() < 1
    assert np.bincount(lossy.targets).tolist() == np.bincount(plain.targets).tolist()
    assert (lossy.targets, lossy.classes) == (plain.targets, plain.classes)
    before, after = seen(plain), seen(lossy)
    same = [np.array_equal(one, two) for one, two in zip(before, after, strict=True)]
    assert sum(same) < len(same) / 4  # some are 256 pixels high as they are
    assert is_within(look(before), look(after)), moved(look(before), look(after))


@pytest.mark.parametrize(
    "harm",
    [
        lambda pictures: [picture[..., ::-1] for picture in pictures],
        lambda pictures: [picture.clip(2, 253) + 1 for picture in pictures],
        lambda pictures: [(picture * 0.98).astype(np.uint8) for picture in pictures],
        lambda pictures: pictures[::-1],
    ],
    ids=["channels swapped", "brighter by a level", "two hundredths darker", "in another order"],
)
def test_what_a_training_would_notice_is_outside_the_limits(plain, harm):
    before = seen(plain)

    assert not is_within(look(before), look(harm(before)))


class Small(Dataset):
    """Photographs of a folder made small, with their class."""

    def __init__(self, folder):
        self.paths = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = Image.open(path).convert("RGB").resize((SMALL_SIDE, SMALL_SIDE))
        return tensor_of(image), self.classes.index(path.parent.name)


def batches(built):
    torch.manual_seed(0)
    pictures, labels = zip(*built, strict=True)
    return torch.cat(pictures).permute(0, 2, 3, 1).numpy(), torch.cat(labels)


@pytest.mark.usefixtures("nothing_swapped")
@pytest.mark.parametrize("workers", [0, 2])
def test_photographs_decoded_smaller_keep_their_labels_and_their_look(folder, workers):
    built = DataLoader(Small(folder), 8, shuffle=True, num_workers=workers)
    before, labels = batches(built)

    decode_scaled(built)

    after, others = batches(built)
    assert torch.bincount(others).tolist() == torch.bincount(labels).tolist()
    assert torch.equal(others, labels)
    is_other = (before != after).any(axis=(1, 2, 3))
    assert is_other.sum() > len(before) / 2
    assert is_within(look(before), look(after)), moved(look(before), look(after))
