"""What lossy packing may change, and what it may not: labels, their number, how pictures look."""

import numpy as np
import pytest

import flatout.data
from flatout.data.format import Encoding
from tests.data.packs import image_folder, packed

COUNT = 40
CLASSES = ("cat", "cat2", "dog")
ENCODINGS = {
    "jpeg": Encoding(kind="jpeg"),
    "jpeg of quality 75": Encoding(kind="jpeg", quality=75),
    "smaller": Encoding(kind="raw", short_side=48),
    "smaller jpeg": Encoding(kind="jpeg", short_side=48),
}
MAX_LEVELS = 1.5
"""A channel's mean and spread over one picture, in levels of 256. Pictures here have a spread of
about 50, and their channels' means lie tens of levels apart: swapped ones would be seen."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Pack photographs as they are; return their folder and the store."""
    root = tmp_path_factory.mktemp("photos")
    source = image_folder(root / "photos", COUNT, CLASSES, suffix="png", size=(96, 72))
    (source / "dog/0039.png").rename(source / "cat/0039.png")  # the classes are not equally large
    packed(source, root / "a")
    return source, opened(root / "a")


def opened(folder):
    return flatout.data.open(folder, order="source", decode="numpy")


def look(data):
    """Return mean and spread of each channel of each picture, in levels."""
    pixels = [data[number][0].reshape(-1, 3).astype(np.float64) for number in range(len(data))]
    return np.array([(one.mean(axis=0), one.std(axis=0)) for one in pixels])


@pytest.mark.parametrize("name", ENCODINGS)
def test_lossy_packing_keeps_labels_and_the_look_of_each_picture(photos, tmp_path, name):
    source, plain = photos

    header = packed(source, tmp_path / "a", encoding=ENCODINGS[name])

    lossy = opened(tmp_path / "a")
    assert not header.is_lossless
    assert lossy.targets == plain.targets
    assert np.bincount(lossy.targets).tolist() == np.bincount(plain.targets).tolist()
    assert lossy.classes == plain.classes
    assert np.abs(look(lossy) - look(plain)).max() < MAX_LEVELS


@pytest.mark.parametrize("name", ENCODINGS)
def test_lossy_packing_changes_pixels(photos, tmp_path, name):
    """Or the test above compares a thing with itself."""
    source, plain = photos
    packed(source, tmp_path / "a", encoding=ENCODINGS[name])

    lossy = opened(tmp_path / "a")
    assert not np.array_equal(lossy[0][0], plain[0][0])


def test_channels_that_were_swapped_would_be_seen(photos):
    _source, plain = photos

    found = look(plain)

    assert np.abs(found[:, :, ::-1] - found).max() > 4 * MAX_LEVELS


@pytest.mark.parametrize("name", ["smaller", "smaller jpeg"])
def test_a_short_side_makes_pictures_smaller_and_keeps_their_shape(photos, tmp_path, name):
    source, _plain = photos
    packed(source, tmp_path / "a", encoding=ENCODINGS[name])

    lossy = opened(tmp_path / "a")

    assert {lossy[number][0].shape for number in range(COUNT)} == {(48, 64, 3)}
