from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image

from flatout.data.values import decode, encode

Pair = namedtuple("Pair", "image label")


def round_trip(sample):
    return decode(b"".join(encode(sample)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, on loading one
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6, dtype=torch.uint8).reshape(2, 3).t(),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(3, 4).bfloat16(),
        torch.randn(3).to(torch.complex64),
        torch.empty(0, 3),
        torch.randn(2, 2).to_sparse(),
    ],
)
def test_tensors_come_back_bit_by_bit(tensor):
    back = round_trip(tensor)

    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.to_dense(), tensor.to_dense())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 8, 8, 3).permute(0, 3, 1, 2),
        torch.rand(2, 8, 8, 1).permute(0, 3, 1, 2),
        torch.rand(8, 8, 3).permute(2, 0, 1)[None],
        torch.rand(9)[3:5],
        torch.tensor(3.0),
    ],
)
def test_tensors_come_back_in_the_same_order_in_memory(tensor):
    assert round_trip(tensor).stride() == tensor.stride()
    assert torch.equal(round_trip(tensor), tensor)


@pytest.mark.parametrize("tensor", [torch.rand(8, 10)[:, ::2].t(), torch.rand(8, 1).expand(8, 3)])
def test_gaps_and_repeats_in_memory_are_left_out(tensor):
    assert len(b"".join(encode(tensor))) < 400
    assert torch.equal(round_trip(tensor), tensor)


def test_a_sample_keeps_its_structure_and_everything_in_it():
    sample = {"pair": Pair(np.arange(4, dtype=np.int16), "cat"), "list": [1, 2.5, None, b"x"]}

    back = round_trip(sample)

    assert type(back["pair"]) is Pair
    assert back["pair"].image.tolist() == [0, 1, 2, 3]
    assert back["pair"].image.dtype == np.int16
    assert back["pair"].label == "cat"
    assert back["list"] == [1, 2.5, None, b"x"]


def test_an_image_comes_back():
    image = Image.new("RGB", (5, 4), (1, 2, 3))

    assert round_trip(image).tobytes() == image.tobytes()


def test_what_comes_back_may_be_written_to_without_changing_what_is_stored():
    stored = b"".join(encode((torch.zeros(3), np.zeros(3))))

    for value in decode(stored):
        value += 1

    assert decode(stored)[0].tolist() == [0, 0, 0]


def test_a_gradient_is_still_wanted_afterwards():
    assert round_trip(torch.zeros(2, requires_grad=True)).requires_grad
