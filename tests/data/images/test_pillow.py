import io
import sys

import numpy as np
import pytest
from PIL import Image, ImageFile, UnidentifiedImageError

from flatout.data.images.decoders import Decoder, installed, load_decoder
from flatout.data.images.pillow import swap_decoder
from flatout.data.images.substitution import FIRST_COMPARED, InWorker
from flatout.records.errors import NotApplicable
from tests.data.photographs import photograph

pytestmark = pytest.mark.usefixtures("nothing_swapped")


@pytest.fixture
def swap():
    pytest.importorskip("simplejpeg")
    made = swap_decoder(load_decoder("simplejpeg"))
    yield made
    made.undo()


def jpeg(number=0, **options):
    noise = np.random.default_rng(number).integers(0, 90, (47, 61, 3))
    slope = np.linspace(0, 160, 61)[None, :, None]
    file = io.BytesIO()
    picture = Image.fromarray((noise + slope).astype(np.uint8))
    picture.convert(options.pop("mode", "RGB")).save(file, "jpeg", **options)
    return file.getvalue()


def turned(orientation):
    """Return EXIF that says how a picture is to be turned."""
    return b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0%c\0\0\0\0\0\0" % orientation


KINDS = [
    {},
    {"subsampling": "4:4:4"},
    {"subsampling": "4:2:2", "quality": 30},
    {"progressive": True},
    {"restart_marker_rows": 1},
    {"exif": turned(6)},
    {"exif": turned(3)},
    {"keep_rgb": True},
]


@pytest.mark.parametrize("options", KINDS)
def test_every_kind_of_colour_jpeg_has_the_same_pixels(swap, options):
    files = [jpeg(number, **options) for number in range(2 * FIRST_COMPARED)]

    swapped = [Image.open(io.BytesIO(data)) for data in files]
    found = [(x.tobytes(), x.convert("HSV").tobytes(), x.size, x.mode) for x in swapped]

    swap.undo()
    plain = [Image.open(io.BytesIO(data)) for data in files]
    assert found == [(x.tobytes(), x.convert("HSV").tobytes(), x.size, x.mode) for x in plain]
    assert (swap.compared, swap.made) == (FIRST_COMPARED, FIRST_COMPARED)
    assert swap.trouble == ""


def test_images_alive_at_the_same_time_do_not_share_memory(swap):
    files = [jpeg(number) for number in range(20)]

    images = [Image.open(io.BytesIO(data)) for data in files]
    for image in images:
        image.load()
    found = [image.tobytes() for image in images]

    swap.undo()
    assert found == [Image.open(io.BytesIO(data)).tobytes() for data in files]


def test_an_image_can_be_painted_on(swap):
    data = jpeg()
    for _ in range(FIRST_COMPARED + 1):
        image = Image.open(io.BytesIO(data))
        image.paste((255, 0, 0), (0, 0, 10, 10))

    assert swap.made == 1
    assert image.getpixel((5, 5)) == (255, 0, 0)
    assert Image.open(io.BytesIO(data)).getpixel((5, 5)) != (255, 0, 0)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_stay_with_pillow(swap, mode):
    Image.open(io.BytesIO(jpeg(mode=mode))).load()

    assert (swap.compared, swap.made) == (0, 0)


def test_a_draft_stays_with_pillow(swap):
    image = Image.open(io.BytesIO(jpeg()))
    image.draft("RGB", (15, 11))

    image.load()

    assert image.size == (16, 12)
    assert (swap.compared, swap.made) == (0, 0)


def test_a_file_is_closed_as_pillow_closes_it(swap, tmp_path):
    path = photograph(tmp_path, 0)
    for _ in range(FIRST_COMPARED + 1):
        image = Image.open(path)
        file = image.fp
        image.load()

    assert swap.made == 1
    assert file.closed


@pytest.mark.chaos
@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
def test_a_truncated_file_fails_as_it_does_with_pillow_alone(swap, cut):
    whole = jpeg(quality=95)
    data = whole[: int(cut * len(whole))]

    def error():
        with pytest.raises((OSError, SyntaxError)) as caught:
            Image.open(io.BytesIO(data)).convert("RGB")
        return type(caught.value), str(caught.value).partition("<")[0]

    found = error()
    swap.undo()
    assert found == error()


@pytest.mark.chaos
@pytest.mark.parametrize("name", installed())
@pytest.mark.parametrize("cut", [0.3, 0.95])
def test_a_truncated_file_fails_when_no_image_is_compared_any_more(name, cut, request):
    made = swap_decoder(load_decoder(name))
    request.addfinalizer(made.undo)
    files = [jpeg(number, quality=95) for number in range(FIRST_COMPARED + 1)]
    for data in files:
        Image.open(io.BytesIO(data)).load()
    assert made.made == 1

    with pytest.raises(OSError, match="truncated"):
        Image.open(io.BytesIO(files[0][: int(cut * len(files[0]))])).load()
    assert made.made == 1


@pytest.mark.chaos
def test_truncated_files_that_the_script_allows_stay_allowed(swap, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    whole = jpeg(quality=95)
    data = whole[: len(whole) // 2]

    found = Image.open(io.BytesIO(data)).tobytes()

    swap.undo()
    assert found == Image.open(io.BytesIO(data)).tobytes()


def test_what_is_no_image_fails_as_ever(swap):
    del swap
    with pytest.raises(UnidentifiedImageError):
        Image.open(io.BytesIO(b"no image at all"))


def test_a_decoder_that_gives_other_pixels_is_given_up():
    grey = np.full((47, 61, 3), 200, np.uint8)
    swap = swap_decoder(Decoder(name="brighter", decode=lambda _: grey, layout="RGB"))
    try:
        found = Image.open(io.BytesIO(jpeg())).tobytes()
        again = Image.open(io.BytesIO(jpeg())).tobytes()
    finally:
        swap.undo()

    assert "brighter decodes an image to other pixels" in swap.trouble
    assert found == again == Image.open(io.BytesIO(jpeg())).tobytes()
    assert swap.made == 0


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", ["opencv"])
def test_the_other_decoders_give_the_same_pixels_too(name, options):
    if name not in installed():
        pytest.skip(f"needs {name}")
    swap = swap_decoder(load_decoder(name))
    files = [jpeg(number, **options) for number in range(2 * FIRST_COMPARED)]
    try:
        found = [Image.open(io.BytesIO(data)).tobytes() for data in files]
    finally:
        swap.undo()

    assert found == [Image.open(io.BytesIO(data)).tobytes() for data in files]
    assert swap.made == FIRST_COMPARED


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)

    with pytest.raises(NotApplicable, match=r"pip install 'flatout\[jpeg\]'"):
        load_decoder("simplejpeg")


def test_a_worker_swaps_and_then_does_what_the_script_asked():
    pytest.importorskip("simplejpeg")
    asked = []

    InWorker("a way", lambda: swap_decoder(load_decoder("simplejpeg")), asked.append)(7)

    swap_decoder(load_decoder("simplejpeg")).undo()
    assert asked == [7]
