import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
from PIL import Image, ImageOps, JpegImagePlugin

from flatout.data.images import lazy_jpegs, pillow
from flatout.data.images.lazy_jpegs import LazyImage, RegionSwap, swap_regions
from flatout.data.images.substitution import COMPARED_EVERY, FIRST_COMPARED, find_swap
from flatout.kernels.region import decode_region
from tests.data.photographs import photograph

pytestmark = pytest.mark.usefixtures("nothing_swapped")

SIZE = (130, 90)


@pytest.fixture
def swap():
    made = swap_regions(decode_region)
    yield made
    made.undo()


@pytest.fixture
def path(tmp_path):
    return photograph(tmp_path, 1, size=SIZE)


def in_both_ways(path, make):
    """Return what is made of a picture by Pillow, and with parts; the swap is on."""
    swap = find_swap(RegionSwap)
    found = make(Image.open(path).convert("RGB"))
    swap.undo()
    expected = make(Image.open(path).convert("RGB"))
    swap_regions(swap.decode)
    return expected, found


MAKES = {
    "crop": lambda image: image.crop((20, 10, 90, 60)),
    "crop with broken edges": lambda image: image.crop((20.4, 10.5, 90.5, 60.2)),
    "crop beyond the edges": lambda image: image.crop((-5, -7, 40, 30)),
    "crop of nothing": lambda image: image.crop((5, 5, 5, 30)),
    "crop outside": lambda image: image.crop((500, 5, 600, 30)),
    "crop of all": lambda image: image.crop(),
    "crop and resize": lambda image: image.crop((20, 10, 90, 60)).resize((32, 24)),
    "resize a box": lambda image: image.resize((32, 24), 2, (20.5, 10.25, 90.125, 60)),
    "resize a box, keywords": lambda image: image.resize(size=(9, 9), box=(60, 40, 69, 50)),
    "enlarge a corner": lambda image: image.resize((64, 64), 1, (0, 0, 7, 5)),
    "resize by nearest": lambda image: image.resize((32, 24), 0, (20, 10, 90, 60)),
    "resize in two steps": lambda image: image.resize((5, 4), 2, (20, 10, 90, 60), reducing_gap=2),
    "resize all": lambda image: image.resize((32, 24)),
    "fit": lambda image: ImageOps.fit(image, (20, 40)),
    "two parts": lambda image: ImageOps.expand(image.crop((3, 3, 9, 9)), 1).resize(
        image.crop((20, 20, 60, 50)).size
    ),
    "part and whole": lambda image: Image.blend(
        image.crop((3, 3, 90, 60)).resize(SIZE), image, 0.5
    ),
    "turned": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "copy": lambda image: image.copy(),
    "deep copy": copy.deepcopy,
    "pickled": lambda image: pickle.loads(pickle.dumps(image)),
    "written to": lambda image: (image.putpixel((3, 3), (1, 2, 3)), image)[1],
    "pasted": lambda image: (image.paste((9, 9, 9), (0, 0, 20, 20)), image)[1],
    "grey": lambda image: image.convert("L"),
    "colour again": lambda image: image.convert("RGB").crop((20, 10, 90, 60)),
    "a channel": lambda image: image.getchannel("G"),
    "thumbnail": lambda image: (image.thumbnail((20, 20)), image)[1],
}


@pytest.mark.parametrize("name", MAKES)
def test_whatever_is_asked_the_pixels_are_pillows(swap, path, name):
    for _ in range(FIRST_COMPARED + 2):  # compared as well as trusted
        expected, found = in_both_ways(path, MAKES[name])

        assert type(found) is type(expected) is Image.Image
        assert (found.mode, found.size, found.info) == (expected.mode, expected.size, expected.info)
        assert found.tobytes() == expected.tobytes()
    assert swap.trouble == ""


def test_parts_are_decoded_and_now_and_then_compared(swap, path):
    for _ in range(COMPARED_EVERY + 10):
        Image.open(path).convert("RGB").crop((20, 10, 90, 60))

    assert swap.compared == FIRST_COMPARED + 1
    assert swap.made == COMPARED_EVERY + 10 - swap.compared


def test_a_part_without_conversion_is_decoded_too(swap, path):
    image = Image.open(path)
    expected = Image.open(path).copy().crop((20, 10, 90, 60))

    found = image.crop((20, 10, 90, 60))

    assert found.tobytes() == expected.tobytes()
    assert (swap.made + swap.compared, type(image)) == (1, JpegImagePlugin.JpegImageFile)
    assert image.tobytes() == Image.open(path).tobytes()


def test_files_are_closed_where_pillow_closes_them(swap, path):
    with path.open("rb") as file:
        later = Image.open(file).convert("RGB")
    with Image.open(path) as image:
        held = image.fp
        other = image.convert("RGB")
        assert held.closed

    assert later.crop((1, 1, 9, 9)).tobytes() == other.crop((1, 1, 9, 9)).tobytes()
    assert later == other


def test_an_image_of_which_nothing_was_asked_knows_its_facts(swap, path):
    later = Image.open(path).convert("RGB")

    assert type(later) is LazyImage
    assert (later.size, later.width, later.mode, later.format) == (SIZE, SIZE[0], "RGB", None)
    assert later.getbands() == ("R", "G", "B")
    assert type(later) is LazyImage
    assert np.asarray(later).shape == (SIZE[1], SIZE[0], 3)
    assert type(later) is Image.Image


def test_images_are_equal_to_plain_ones(swap, path):
    plain = Image.open(path).copy()

    assert plain == Image.open(path).convert("RGB")
    assert Image.open(path).convert("RGB") == plain
    assert Image.open(path).convert("RGB") != Image.new("RGB", SIZE)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_kinds_of_jpeg_are_left_to_pillow(swap, tmp_path, mode):
    Image.new(mode, SIZE, 40).save(tmp_path / "other.jpg")

    found = Image.open(tmp_path / "other.jpg").convert("RGB")

    assert type(found) is Image.Image
    assert swap.made + swap.compared == 0


def test_a_broken_file_fails_as_it_does_in_pillow(swap, path):
    path.write_bytes(path.read_bytes()[:-300])

    with pytest.raises(OSError, match="truncated"):
        Image.open(path).convert("RGB").crop((1, 1, 9, 9))


def test_while_decoded_pictures_are_kept_nothing_is_left_for_later(swap, path, monkeypatch):
    monkeypatch.setattr(pillow, "_ACTIVE", [object()])

    with Image.open(path) as image:
        assert lazy_jpegs.file_of(image) is None


def test_other_pixels_are_noticed_and_the_whole_is_decoded_from_then_on(path):
    def wrong(data, size, box, pixels, *_):
        # Left alone, the memory may hold the right pixels of an earlier image.
        ctypes.memset(pixels, 7, lazy_jpegs.PIXEL_BYTES * size[0] * size[1])
        return True

    swap = swap_regions(wrong)
    try:
        found = Image.open(path).convert("RGB").crop((20, 10, 90, 60))
        assert "130 x 90 comes out different" in swap.trouble
        assert type(Image.open(path).convert("RGB")) is Image.Image
    finally:
        swap.undo()
    assert found.tobytes() == Image.open(path).convert("RGB").crop((20, 10, 90, 60)).tobytes()


def test_undone_pillow_is_as_it_was(path):
    before = dict(vars(JpegImagePlugin.JpegImageFile))

    swap = swap_regions(decode_region)
    assert swap_regions(decode_region) is swap
    swap.undo()
    swap.undo()

    assert dict(vars(JpegImagePlugin.JpegImageFile)) == before


def test_pictures_from_memory_are_decoded_in_parts_too(swap, path):
    data = path.read_bytes()

    found = Image.open(io.BytesIO(data)).convert("RGB").resize((8, 8), 2, (20, 10, 90, 60))

    assert swap.made + swap.compared == 1
    swap.undo()
    expected = Image.open(io.BytesIO(data)).convert("RGB").resize((8, 8), 2, (20, 10, 90, 60))
    assert found.tobytes() == expected.tobytes()
