import random

import pytest
from PIL import Image

from flatout.kernels import resample
from flatout.kernels.compiled import find_compiler
from flatout.records.errors import NotApplicable

try:
    find_compiler()
except NotApplicable as reason:
    pytest.skip(str(reason), allow_module_level=True)

CASES = [resample._case(random.Random(number)) for number in range(1000, 1200)]


@pytest.mark.parametrize("kind", sorted(resample.KINDS))
def test_the_bytes_are_pillows(kind):
    order = resample.find_order()

    for image, size, _, box in CASES:
        made = resample.resampled(image, size, kind, box, order)

        assert made.tobytes() == image.resize(size, kind, box).tobytes()
        assert (
            made.convert("RGBX").tobytes()
            == image.resize(size, kind, box).convert("RGBX").tobytes()
        )


@pytest.mark.parametrize("size", [(50, 20), (20, 50), (50, 50), (1, 1), (200, 3)])
@pytest.mark.parametrize("box", [(0, 0, 50, 50), (0.5, 0, 49, 50), (0, 0.5, 50, 49)])
def test_one_side_that_stays_is_left_alone_as_pillow_does(size, box):
    image = CASES[0][0].resize((50, 50), Image.Resampling.NEAREST)

    made = resample.resampled(image, size, 2, box, resample.find_order())

    if made is None:
        assert size == (50, 50)
        assert box == (0, 0, 50, 50)
    else:
        assert made.tobytes() == image.resize(size, 2, box).tobytes()


def test_the_order_of_the_passes_shows_so_it_is_found_by_trying():
    right = resample.find_order()

    assert right in resample.ORDERS
    wrong = next(order for order in resample.ORDERS if order is not right)
    assert not all(resample._is_same(*case, wrong) for case in CASES)


def test_a_pillow_that_resamples_in_another_way_is_refused(monkeypatch):
    resample.find_order.cache_clear()
    monkeypatch.setattr(resample, "ORDERS", (lambda *_: True,))

    with pytest.raises(NotApplicable, match="not known here"):
        resample.find_order()
    resample.find_order.cache_clear()


def test_an_image_in_several_blocks_of_memory_is_left_to_pillow():
    image = Image.new("RGB", (5000, 4000))

    assert resample.resampled(image, (10, 10), 2, (0, 0, 5000, 4000), resample.tall_first) is None
