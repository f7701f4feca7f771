import io
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from flatout.data import random_crops as module
from flatout.data.random_crops import jpeg_size, undecoded
from tests.kernels.test_region import jpeg


def never():
    raise AssertionError("the whole is not needed")


@pytest.mark.parametrize("size", [(1, 1), (90, 70), (70, 301)])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": b"Exif\0\0" + b"x" * 900}])
def test_the_size_is_read_from_the_header(size, options):
    assert jpeg_size(jpeg(size, **options)) == (size[1], size[0])


def test_fill_bytes_and_markers_without_length_are_passed():
    data = jpeg((90, 70))

    assert jpeg_size(data[:2] + b"\xff\x01\xff\xff" + data[2:]) == (70, 90)


def other(mode):
    stream = io.BytesIO()
    Image.new(mode, (9, 9)).save(stream, "JPEG")
    return stream.getvalue()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xd8", jpeg((9, 9))[:30], b"\x89PNG" + b"\0" * 60, other("L"), other("CMYK")],
)
def test_what_is_no_plain_colour_jpeg_has_none(data):
    assert jpeg_size(data) is None
    assert undecoded(data, never) is None


def test_a_header_that_lies_does_no_harm():
    data = jpeg((9, 9))
    frame = data.index(b"\xff\xc0")
    lying = data[: frame + 5] + struct.pack(">HH", 90, 90) + data[frame + 9 :]
    found = undecoded(lying, lambda: torch.zeros(90, 90, 3, dtype=torch.uint8))

    assert found.part((0, 0, 90, 90)).sum() == 0


def test_a_part_is_valid_inside_its_box():
    data = jpeg((90, 70))
    expected = np.asarray(Image.open(io.BytesIO(data)))

    found = undecoded(data, never)

    assert found.shape == (70, 90, 3)
    part = found.part((20, 31, 30, 40))
    assert np.array_equal(part[20:50, 31:71].numpy(), expected[20:50, 31:71])


def test_memory_is_used_again_once_nobody_has_it():
    found = undecoded(jpeg((90, 70)), never)
    one, two = found.part((0, 0, 9, 9)), found.part((0, 0, 9, 9))
    assert one.data_ptr() != two.data_ptr()
    address = two.data_ptr()
    del two

    assert found.part((0, 0, 9, 9)).data_ptr() == address


def test_a_file_with_a_fault_is_decoded_whole():
    data = jpeg((90, 70))
    asked = []
    broken = undecoded(data[: len(data) // 2] + b"\xff\xd9", lambda: asked.append(1))

    broken.part((0, 60, 5, 5))
    broken.part((60, 0, 9, 9))

    assert asked == [1]


def test_where_parts_cannot_be_decoded_nothing_waits(monkeypatch):
    monkeypatch.setattr(module, "can_decode", lambda: False)

    assert undecoded(jpeg((9, 9)), never) is None
    assert undecoded(None, never) is None
