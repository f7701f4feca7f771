import numpy as np
import pytest
import torch

from flatout.data.random_crops import scale_and_shift
from flatout.kernels import compiled, windows
from flatout.kernels.windows import RowWriter, can_cut, cut_windows
from flatout.records.errors import NotApplicable

NORMAL = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(1, (1, 1)), (5, (5, 9)), (6, (6, 6)), (17, (40, 23)), (64, (64, 64)), (224, (256, 230))]


def cases(side, size, count=40):
    """Return pictures, places, and boxes, those at the edges among them."""
    draw = np.random.default_rng(side)
    height, width = size
    images = torch.from_numpy(draw.integers(0, 256, (7, height, width, 3), dtype=np.uint8))
    places = draw.integers(0, 7, count)
    tops, lefts = (draw.integers(0, most - side + 1, count) for most in size)
    tops[:2], lefts[:2], places[:2] = height - side, width - side, 6
    flips = np.arange(count) % 2
    sides = np.full(count, side)
    return images, places, np.stack([tops, lefts, sides, sides, flips], axis=1)


def by_torch(images, places, boxes, side):
    found = []
    for place, (top, left, _, _, flip) in zip(places, boxes.tolist(), strict=True):
        cut = images[place, top : top + side, left : left + side]
        found.append(cut.flip(1) if flip else cut)
    return torch.stack(found)


@pytest.mark.parametrize(("side", "size"), SIZES)
def test_windows_are_those_of_torch(side, size):
    images, places, boxes = cases(side, size)
    target = torch.full((len(places), side, side, 3), 7, dtype=torch.uint8)

    assert cut_windows(images, places, boxes, target)

    assert torch.equal(target, by_torch(images, places, boxes, side))


@pytest.mark.parametrize(("side", "size"), SIZES)
@pytest.mark.parametrize("offset", [0, 1])
def test_normalised_they_are_the_bytes_times_and_plus(side, size, offset):
    images, places, boxes = cases(side, size)
    scale, shift = (value.repeat(side) for value in scale_and_shift(*NORMAL))
    memory = torch.zeros(len(places) * side * side * 3 + 1)  # once not aligned
    target = memory[offset : len(memory) - 1 + offset].view(len(places), side, side, 3)

    assert cut_windows(images, places, boxes, target, (scale, shift))

    rows = by_torch(images, places, boxes, side).view(len(places), side, -1)
    assert torch.equal(target.view_as(rows), shift + rows.float() * scale)


@pytest.mark.parametrize("wrong", [(0, -1), (1, -1), (0, 3), (1, 3)])
def test_a_window_outside_is_refused(wrong):
    images, places, boxes = cases(4, (6, 6))
    boxes[3, wrong[0]] = wrong[1]
    target = torch.zeros(len(places), 4, 4, 3, dtype=torch.uint8)

    assert not cut_windows(images, places, boxes, target)


@pytest.mark.parametrize("place", [-1, 7])
def test_a_picture_that_is_not_there_is_refused(place):
    images, places, boxes = cases(4, (6, 6))
    places[5] = place

    assert not cut_windows(images, places, boxes, torch.zeros(40, 4, 4, 3, dtype=torch.uint8))


def test_what_lies_otherwise_is_refused():
    images, places, boxes = cases(4, (6, 6))
    target = torch.zeros(40, 4, 4, 3, dtype=torch.uint8)
    floats = (torch.zeros(12), torch.zeros(12))

    for changed in (
        (images.transpose(1, 2), places, boxes, target),
        (images.float(), places, boxes, target),
        (images, places, boxes, target.float()),
        (images, places, boxes, target, floats),
        (images, places, boxes, target.float(), (torch.zeros(3), torch.zeros(12))),
        (images, places, boxes[:-1], target),
        (images, places, boxes.astype(np.int32), target),
    ):
        with pytest.raises(ValueError, match="not laid out"):
            cut_windows(*changed)


def test_an_empty_batch_is_none(monkeypatch):
    images, places, boxes = cases(4, (6, 6))

    assert cut_windows(images, places[:0], boxes[:0], torch.zeros(0, 4, 4, 3, dtype=torch.uint8))


def test_without_a_compiler_it_says_so(monkeypatch):
    for cached in (compiled.load_library, windows._function, can_cut):
        cached.cache_clear()
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    assert not can_cut()
    can_cut.cache_clear()
    with pytest.raises(NotApplicable, match="C compiler"):
        windows._function()


def test_row_by_row_they_are_the_same():
    images, places, boxes = cases(17, (40, 23))
    scale, shift = (value.repeat(17) for value in scale_and_shift(*NORMAL))
    target, rows = torch.zeros(2, 40, 17, 17, 3)
    cut_windows(images, places, boxes, target, (scale, shift))
    writer = RowWriter(17, (scale, shift))

    for place, box, row in zip(places, boxes.tolist(), rows, strict=True):
        writer.write(images[place], box, row)

    assert torch.equal(rows, target)
    with pytest.raises(ValueError, match="does not lie in"):
        writer.write(images[0], (24, 0, 17, 17, 0), rows[0])
