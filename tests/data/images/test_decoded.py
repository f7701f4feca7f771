import io
import os

import pytest
from PIL import ExifTags, Image, ImageOps

from flatout.data.caching import ByteStore, fill
from flatout.data.images.decoders import load_decoder
from flatout.data.images.pillow import keep_decoded, swap_decoder
from tests.data.photographs import photograph

pytestmark = pytest.mark.usefixtures("nothing_swapped")


@pytest.fixture
def store():
    kept = ByteStore(slots=100, budget_bytes=10_000_000)
    undo = keep_decoded(kept)
    yield kept
    undo()


@pytest.mark.parametrize("kind", ["jpg", "png", "bmp"])
def test_pixels_and_facts_are_those_of_the_file(tmp_path, store, kind):
    path = photograph(tmp_path, 1, kind=kind)
    first = Image.open(path)
    expected = first.tobytes()

    second = Image.open(path)
    found = second.tobytes()

    assert store.count == 1
    assert found == expected
    assert (second.size, second.mode, second.format, second.info) == (
        first.size,
        first.mode,
        first.format,
        first.info,
    )


def test_the_second_loading_decodes_nothing(tmp_path, store, monkeypatch):
    path = photograph(tmp_path, 1)
    expected = Image.open(path).convert("RGB").tobytes()
    named = Image._getdecoder
    asked = []
    monkeypatch.setattr(
        Image, "_getdecoder", lambda name, *rest: asked.append(name) or named(name, *rest)
    )

    assert Image.open(path).convert("RGB").tobytes() == expected
    assert "jpeg" not in asked


def test_a_file_that_was_written_anew_is_decoded_anew(tmp_path, store):
    path = photograph(tmp_path, 1)
    before = Image.open(path).convert("RGB").tobytes()
    Image.new("RGB", (60, 40), (9, 9, 9)).save(path)
    os.utime(path, ns=(1, 1))

    after = Image.open(path).convert("RGB").tobytes()

    assert after != before
    assert store.count == 2


def test_a_smaller_decoding_is_kept_apart(tmp_path, store):
    path = photograph(tmp_path, 1, size=(640, 480))
    whole = Image.open(path)
    whole.load()

    small = Image.open(path)
    small.draft("RGB", (160, 120))
    small.load()

    assert store.count == 2
    assert (whole.size, small.size) == ((640, 480), (160, 120))


def test_bytes_in_memory_are_decoded_each_time(tmp_path, store):
    raw = photograph(tmp_path, 1).read_bytes()

    Image.open(io.BytesIO(raw)).load()

    assert store.count == 0


def test_a_taken_image_can_be_changed_without_changing_the_next(tmp_path, store):
    path = photograph(tmp_path, 1)
    expected = Image.open(path).convert("RGB").tobytes()
    image = Image.open(path)
    image.load()
    image.paste((0, 0, 0), (0, 0, 60, 40))

    assert Image.open(path).convert("RGB").tobytes() == expected


def test_a_truncated_file_fails_as_it_always_does(tmp_path, store):
    path = photograph(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-200])

    with Image.open(path) as image, pytest.raises(OSError, match="truncated"):
        image.load()
    assert store.count == 0


def test_a_swapped_decoder_is_asked_once_too(tmp_path, store):
    decoder = pytest.importorskip("simplejpeg") and load_decoder("simplejpeg")
    swap = swap_decoder(decoder)
    path = photograph(tmp_path, 1)
    try:
        found = [Image.open(path).tobytes() for _ in range(8)]
    finally:
        swap.undo()

    assert len(set(found)) == 1
    assert store.count == 1
    assert swap.made + swap.compared == 1


def turned_tiff(folder, orientation):
    """Write a TIFF that is to be turned when it is shown."""
    path = folder / "turned.tiff"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.frombytes("RGB", (6, 4), bytes(range(72))).save(path, exif=exif)
    return path


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_tiff_with_an_orientation_is_turned_once_whenever_it_is_read(
    tmp_path, orientation, request
):
    path = turned_tiff(tmp_path, orientation)

    def shown(_=0):
        with Image.open(path) as image:
            turned = ImageOps.exif_transpose(image)
            return image.size, dict(image.getexif()), turned.size, turned.tobytes()

    expected = shown()
    request.getfixturevalue("store")

    assert [shown(), shown()] == [expected, expected]
    fill(shown, 2, processes=2, limit_s=10)
    assert shown() == expected
