import copy
import pickle

import numpy as np
import pytest
from PIL import Image, ImageFilter, JpegImagePlugin

from flatout.data.images.lazy_jpegs import (
    LazyImage,
    RegionSwap,
    ShrinkSwap,
    fraction_of,
    swap_shrinking,
)
from flatout.data.images.substitution import find_swap
from flatout.kernels.region import decode_region
from tests.data.photographs import photograph

pytestmark = pytest.mark.usefixtures("nothing_swapped")

SIZE = (611, 403)


@pytest.fixture
def swap():
    made = swap_shrinking(decode_region, gap=2.0)
    yield made
    made.undo()


@pytest.fixture
def path(tmp_path):
    """Return a photograph without fine noise, of sides that no fraction divides."""
    path = photograph(tmp_path, 1, size=SIZE)
    Image.open(path).filter(ImageFilter.GaussianBlur(3)).save(path, quality=95)
    return path


def in_both_ways(path, make):
    swap = find_swap(ShrinkSwap)
    found = make(Image.open(path).convert("RGB"))
    swap.undo()
    expected = make(Image.open(path).convert("RGB"))
    swap_shrinking(swap.regions.decode, swap.gap)
    return expected, found


def pixels(image):
    return np.asarray(image).astype(int)


SHRUNK = {
    "whole": lambda image: image.resize((32, 24)),
    "whole, square": lambda image: image.resize((40, 40), Image.Resampling.BICUBIC),
    "box": lambda image: image.resize((32, 24), 2, (31.5, 40.25, 590, 399)),
    "crop": lambda image: image.crop((13, 7, 499, 391)).resize((32, 24)),
    "crop of a crop": lambda image: (
        image.crop((13, 7, 499, 391)).crop((3, 9, 401, 381)).resize((24, 24))
    ),
    "box of a crop": lambda image: image.crop((13, 7, 499, 391)).resize(
        (24, 24), 2, (0, 5, 480, 380)
    ),
    "edge": lambda image: image.crop((301, 201, 611, 403)).resize((16, 16), 1),
}


@pytest.mark.parametrize("name", SHRUNK)
def test_shrunk_pictures_are_those_of_pillow_but_for_a_little(swap, path, name):
    expected, found = in_both_ways(path, SHRUNK[name])

    assert type(found) is Image.Image
    assert (found.mode, found.size, found.info) == (expected.mode, expected.size, expected.info)
    assert swap.made == 1
    off = np.abs(pixels(found) - pixels(expected))
    assert off.mean() < 1.0
    assert off.max() <= 12


EXACT = {
    "resize by little": lambda image: image.resize((300, 200)),
    "crop": lambda image: image.crop((20, 10, 90, 60)),
    "crop beyond the edges": lambda image: image.crop((-5, -7, 40, 30)),
    "crop of all": lambda image: image.crop(),
    "crop of nothing": lambda image: image.crop((5, 5, 5, 30)),
    "crop and resize by little": lambda image: image.crop((20, 10, 90, 60)).resize((60, 40)),
    "box by little": lambda image: image.resize((60, 40), 2, (20, 10, 90, 60)),
    "in two steps": lambda image: image.resize((32, 24), 2, reducing_gap=2),
    "by nearest": lambda image: image.resize((32, 24), 0),
    "turned": lambda image: image.crop((20, 10, 90, 60)).transpose(Image.Transpose.ROTATE_90),
    "copy": lambda image: image.copy(),
    "deep copy of a part": lambda image: copy.deepcopy(image.crop((20, 10, 90, 60))),
    "pickled part": lambda image: pickle.loads(pickle.dumps(image.crop((20, 10, 90, 60)))),
    "grey": lambda image: image.convert("L"),
    "part, grey": lambda image: image.crop((20, 10, 90, 60)).convert("L"),
    "thumbnail": lambda image: (image.copy().resize((300, 200)), image)[1],
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_not_made_small_is_exact(swap, path, name):
    expected, found = in_both_ways(path, EXACT[name])

    assert (found.mode, found.size) == (expected.mode, expected.size)
    assert found.tobytes() == expected.tobytes()
    assert swap.made == 0


def test_a_jpeg_that_was_not_converted_is_shrunk_too(swap, path):
    found = Image.open(path).resize((32, 24))
    cut = Image.open(path).crop((0, 0, 400, 400)).resize((32, 24))

    assert (swap.made, found.size, cut.size) == (2, (32, 24), (32, 24))


def test_a_part_waits_and_knows_its_size(swap, path):
    part = Image.open(path).convert("RGB").crop((20, 10, 90, 60))

    assert type(part) is LazyImage
    assert (part.size, part.mode) == ((70, 50), "RGB")
    assert np.asarray(part).shape == (50, 70, 3)
    assert type(part) is Image.Image


@pytest.mark.parametrize(
    ("part", "to", "gap", "expected"),
    [
        ((400, 400), (50, 50), 1.0, 8),
        ((399, 400), (50, 50), 1.0, 4),
        ((400, 400), (50, 100), 1.0, 4),
        ((400, 400), (50, 50), 4.0, 2),
        ((400, 400), (300, 300), 1.0, 1),
    ],
)
def test_the_fraction_leaves_the_gap_on_both_sides(part, to, gap, expected):
    assert fraction_of(part, to, gap) == expected


def test_other_pictures_are_left_to_pillow(swap, tmp_path):
    Image.new("L", SIZE, 40).save(tmp_path / "grey.jpg")

    found = Image.open(tmp_path / "grey.jpg").convert("RGB").resize((8, 8))

    assert swap.made == 0
    assert np.asarray(found).max() == 40


def test_undone_pillow_is_as_it_was(path):
    before = dict(vars(JpegImagePlugin.JpegImageFile))

    swap = swap_shrinking(decode_region, 2.0)
    assert swap_shrinking(decode_region, 2.0) is swap
    swap.undo()
    swap.undo()

    assert dict(vars(JpegImagePlugin.JpegImageFile)) == before
    assert find_swap(RegionSwap) is find_swap(ShrinkSwap) is None
