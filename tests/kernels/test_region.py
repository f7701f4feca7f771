import io
import random

import numpy as np
import pytest
from PIL import Image

from flatout.kernels import compiled, region
from flatout.kernels.region import decode_region, find_jpeg_library, open_library
from flatout.records.errors import NotApplicable

SIZES = [(1, 1), (7, 9), (16, 16), (33, 47), (90, 70), (131, 129)]
KINDS = [
    {"quality": 90, "subsampling": subsampling, "progressive": progressive}
    for subsampling in (0, 1, 2)
    for progressive in (False, True)
]


def jpeg(size, seed=0, **options):
    """Return the file of a picture of noise on slopes."""
    width, height = size
    noise = np.random.default_rng(seed).integers(0, 90, (height, width, 3))
    slopes = np.add.outer(np.arange(height), 2 * np.arange(width))[..., None] % 160
    stream = io.BytesIO()
    Image.fromarray((noise + slopes).astype(np.uint8)).save(stream, "JPEG", **options)
    return stream.getvalue()


def whole(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def part(data, size, box):
    """Return the part, decoded among pixels that are marked."""
    width, height = size
    pixels = np.full((height, width, 4), 77, np.uint8)
    assert decode_region(data, size, box, pixels.ctypes.data)
    left, top, right, bottom = box
    assert (pixels[:top] == 77).all()
    assert (pixels[bottom:] == 77).all()
    return pixels[top:bottom, left:right, :3]


def boxes(size, count=25):
    """Return the whole, its corners, and parts drawn at random."""
    width, height = size
    draw = random.Random(width)
    yield 0, 0, width, height
    yield 0, 0, 1, 1
    yield width - 1, height - 1, width, height
    for _ in range(count):
        left, top = draw.randrange(width), draw.randrange(height)
        yield left, top, draw.randint(left + 1, width), draw.randint(top + 1, height)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_pixels_that_it_has_in_the_whole(size, kind):
    data = jpeg(size, **kind)
    expected = whole(data)

    for box in boxes(size):
        left, top, right, bottom = box
        found = part(data, size, box)
        assert np.array_equal(found, expected[top:bottom, left:right]), box


def test_restart_markers_and_optimised_tables_change_nothing():
    data = jpeg((90, 70), quality=60, optimize=True, restart_marker_blocks=3)

    found = part(data, (90, 70), (31, 29, 62, 55))

    assert np.array_equal(found, whole(data)[29:55, 31:62])


@pytest.mark.parametrize("cut", [1, 2, 50, 600])
def test_a_file_that_was_cut_off_is_refused(cut):
    data = jpeg((90, 70))[:-cut]
    pixels = np.zeros(90 * 70 * 4, np.uint8)

    assert not decode_region(data, (90, 70), (0, 0, 9, 7), pixels.ctypes.data)


def test_one_whose_end_was_mended_is_refused_where_rows_are_missing():
    data = jpeg((90, 70))
    pixels = np.zeros(90 * 70 * 4, np.uint8)
    broken = data[: len(data) // 2] + b"\xff\xd9"

    assert not decode_region(broken, (90, 70), (0, 60, 9, 70), pixels.ctypes.data)


@pytest.mark.parametrize("data", [b"", b"\xff\xd9", b"not a picture" * 9 + b"\xff\xd9"])
def test_what_is_no_jpeg_is_refused(data):
    assert not decode_region(data, (8, 8), (0, 0, 8, 8), 0)


def test_one_of_another_size_is_refused_before_anything_is_written():
    pixels = np.full(4, 7, np.uint8)

    assert not decode_region(jpeg((90, 70)), (1, 1), (0, 0, 1, 1), pixels.ctypes.data)

    assert pixels.tolist() == [7] * 4


def test_random_bytes_inside_never_do_harm():
    draw = random.Random(0)
    pixels = np.zeros(90 * 70 * 4, np.uint8)
    for _ in range(300):
        data = bytearray(jpeg((90, 70), quality=50))
        for _ in range(draw.randint(1, 20)):
            data[draw.randrange(2, len(data) - 2)] = draw.randrange(256)
        decode_region(bytes(data), (90, 70), (10, 10, 80, 60), pixels.ctypes.data)


def test_the_library_is_the_one_that_pillow_loaded():
    assert "libjpeg" in find_jpeg_library()
    assert open_library() is open_library()


def test_without_a_shared_library_it_says_so(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text("7f0-7f1 r-xp 0 0:0 0 /usr/lib/libc.so.6\n")
    monkeypatch.setattr(region, "MAPS", maps)
    with pytest.raises(NotApplicable, match="not a shared one"):
        find_jpeg_library()

    monkeypatch.setattr(region, "MAPS", tmp_path / "none")
    with pytest.raises(NotApplicable, match="Linux only"):
        find_jpeg_library()


def test_pillows_own_library_is_taken_where_there_are_several(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    own = "/site-packages/pillow.libs/libjpeg-1.so"
    maps.write_text(f"7f r-xp 0 0:0 0 /usr/lib/libjpeg.so.8\n7f r-xp 0 0:0 0 {own}\n")
    monkeypatch.setattr(region, "MAPS", maps)

    assert find_jpeg_library() == own


def test_a_library_without_the_functions_is_refused(monkeypatch):
    lines = region.MAPS.read_text().splitlines()
    libc = next(line.split(maxsplit=5)[-1] for line in lines if "/libc.so" in line)
    monkeypatch.setattr(region, "find_jpeg_library", lambda: libc)
    open_library.cache_clear()
    with pytest.raises(NotApplicable, match=r"libc.* cannot decode parts"):
        open_library()
    open_library.cache_clear()


def test_without_a_compiler_it_says_so(monkeypatch):
    compiled.load_library.cache_clear()
    open_library.cache_clear()
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    with pytest.raises(NotApplicable, match="C compiler"):
        open_library()
