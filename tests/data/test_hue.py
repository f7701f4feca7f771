"""Pillow's way through HSV, made later for a whole batch: the same to the bit."""

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from flatout.data.coloured_pictures import putting_off, waiting_in
from flatout.data.colours import coloured
from flatout.data.following import following
from flatout.data.hue import apart, together, turned
from flatout.data.hue_pictures import Apart, Band, HueArray
from flatout.data.levels import UnfollowableError
from tests.data.tails import TAILS, Pictures, numpy_arithmetic
from tests.data.test_colours import coloured_batches, jittered, noise
from tests.data.test_transport import forms

LEVELS = np.arange(256, dtype=np.uint8)


def every_colour(first):
    """Return 256 x 256 pixels: one value of the first channel, every value of the others."""
    return np.stack([np.full((256, 256), first), *np.meshgrid(LEVELS, LEVELS)], -1).astype(np.uint8)


FEW = (0, 1, 64, 127, 128, 254, 255)
ALL = [
    pytest.param(FEW, id="some"),
    pytest.param(range(256), id="all", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("firsts", ALL)
def test_hue_saturation_and_value_are_pillows_to_the_bit(firsts):
    for first in firsts:
        pixels = every_colour(first)
        found = torch.stack(apart(torch.from_numpy(pixels)), -1)
        assert np.array_equal(found.numpy(), np.asarray(Image.fromarray(pixels).convert("HSV")))


@pytest.mark.parametrize("firsts", ALL)
def test_the_way_back_is_pillows_to_the_bit(firsts):
    for first in firsts:
        pixels = every_colour(first)
        found = together(*torch.from_numpy(pixels).unbind(-1))
        there = Image.merge("HSV", [Image.fromarray(np.ascontiguousarray(x)) for x in pixels.T])
        expected = np.asarray(there.convert("RGB")).transpose(1, 0, 2)
        assert np.array_equal(found.numpy(), expected)


def by_hand(image, shift, add=lambda hue, shift: np.asarray(hue) + np.uint8(shift)):
    """Turn the hue as scripts do."""
    hue, saturation, value = image.convert("HSV").split()
    moved = Image.fromarray(add(hue, shift))
    return Image.merge("HSV", (moved, saturation, value)).convert("RGB")


def in_place(hue, shift):
    """Add as torchvision does."""
    values = np.array(hue, dtype=np.uint8)
    with np.errstate(over="ignore"):
        values += np.int32(shift).astype(np.uint8)
    return values


def taken_away(hue, shift):
    return np.asarray(hue) - np.uint8(-shift % 256)


def twice(hue, shift):
    return 3 + (np.array(hue) + np.uint8(shift)) - 3


def zero_dimensional(hue, shift):
    return np.asarray(hue) + np.array(shift, np.uint8)


ADDITIONS = [
    lambda h, s: np.asarray(h) + np.uint8(s),
    in_place,
    taken_away,
    twice,
    zero_dimensional,
]


@pytest.mark.parametrize("add", ADDITIONS)
@pytest.mark.parametrize("shift", [0, 1, 25, 200, 255])
def test_a_turned_hue_waits_and_is_pillows_to_the_bit(add, shift):
    image = Image.fromarray(noise(1)[0])
    expected = by_hand(image, shift, add)

    with following(with_colours=True):
        found = by_hand(image, shift, add)
        waits = waiting_in(found)

    assert waits == (("Hue", float(shift)),)
    assert found.tobytes() == expected.tobytes()
    pixels = torch.from_numpy(np.array(image))
    assert np.array_equal(coloured(pixels, 2, [waits], has_batch=False), np.asarray(expected))


def test_each_picture_of_a_batch_is_turned_by_its_own():
    pixels, shifts = torch.from_numpy(noise(5, seed=2)), [0, 3, 90, 255, 128]

    found = turned(pixels, torch.tensor(shifts, dtype=torch.uint8))

    for own, picture, shift in zip(found, pixels, shifts, strict=True):
        assert np.array_equal(own, np.asarray(by_hand(Image.fromarray(picture.numpy()), shift)))


def masked(hue, _):
    values = np.array(hue)
    values[values > 100] = 7
    return values


OTHERS = [
    masked,
    lambda hue, _: np.asarray(hue) * np.uint8(3),
    lambda hue, s: (np.asarray(hue).astype(np.int16) + s).clip(0, 255).astype(np.uint8),
    lambda hue, _: np.asarray(hue) + np.asarray(hue),
    lambda hue, _: np.asarray(hue)[::-1].copy(),
    lambda hue, _: np.where(np.asarray(hue) > 10, np.uint8(1), np.asarray(hue)),
    lambda hue, _: np.minimum(np.asarray(hue), 200),
    lambda hue, s: np.uint8(s) - np.asarray(hue),
    lambda hue, _: np.asarray(hue).T.copy().T,
    lambda hue, s: np.add(np.asarray(hue), np.uint8(s), out=np.empty(hue.size[::-1], np.uint8)),
    lambda hue, s: ~(np.asarray(hue) + np.full(hue.size[::-1], s, np.uint8)),
    lambda hue, _: np.asarray(hue.point(lambda level: 255 - level)),
    lambda hue, _: torch.from_numpy(np.array(hue)).add(5).numpy(),
    lambda hue, _: np.sort(np.array(hue), axis=0),
    lambda hue, _: np.asarray(hue.rotate(90, expand=False)),
]
"""What else a script may do to a hue: all of it is computed."""


@pytest.mark.parametrize("other", OTHERS)
def test_whoever_does_something_else_gets_what_pillow_gives(other):
    image = Image.fromarray(noise(1)[0])
    expected = by_hand(image, 9, other)

    with following(with_colours=True):
        found = by_hand(image, 9, other)

    assert found.tobytes() == expected.tobytes()
    assert waiting_in(found) == ()


USES = [
    lambda hsv: hsv.tobytes(),
    lambda hsv: np.asarray(hsv).tobytes(),
    lambda hsv: hsv.copy().split()[1].tobytes(),
    lambda hsv: hsv.split()[2].tobytes(),
    lambda hsv: hsv.getchannel("S").tobytes(),
    lambda hsv: hsv.convert("HSV").convert("RGB").tobytes(),
    lambda hsv: hsv.resize((20, 20)).tobytes(),
    lambda hsv: Image.merge("HSV", hsv.split()[::-1]).tobytes(),
    lambda hsv: Image.merge("RGB", hsv.split()).tobytes(),
    lambda hsv: np.asarray(hsv.split()[0]).mean(),
    lambda hsv: (np.asarray(hsv.split()[0]).shape, np.asarray(hsv.split()[0]).ndim),
    lambda hsv: (hsv.mode, hsv.size, hsv.split()[0].mode, len(np.asarray(hsv.split()[0]))),
]


@pytest.mark.parametrize("use", USES)
def test_a_picture_in_hsv_is_made_when_it_is_needed(use):
    image = Image.fromarray(noise(1)[0])
    expected = use(image.convert("HSV"))

    with following(with_colours=True):
        hsv = image.convert("HSV")
        found = use(hsv)

    assert type(hsv) is Apart
    assert found == expected


def test_bands_of_two_pictures_are_merged_by_pillow():
    images = [Image.fromarray(pixels) for pixels in noise(2)]
    bands = [image.convert("HSV").split() for image in images]
    expected = Image.merge("HSV", (bands[0][0], bands[1][1], bands[0][2])).tobytes()

    with putting_off(lambda: True):
        bands = [image.convert("HSV").split() for image in images]
        found = Image.merge("HSV", (bands[0][0], bands[1][1], bands[0][2]))

    assert type(found) is Image.Image
    assert found.tobytes() == expected


def test_hue_among_other_changes_keeps_its_place():
    image = Image.fromarray(noise(1)[0])

    def change(picture):
        picture = ImageEnhance.Contrast(picture).enhance(1.3)
        picture = ImageOps.mirror(by_hand(picture, 40))
        return ImageEnhance.Color(picture).enhance(0.4)

    expected = change(image)
    with following(with_colours=True):
        found = change(image)
        kinds = [kind for kind, _ in waiting_in(found)]

    assert kinds == ["Contrast", "Hue", "Color"]
    pixels = torch.from_numpy(np.asarray(ImageOps.mirror(image)).copy())
    done = coloured(pixels, 2, [waiting_in(found)], has_batch=False)
    assert np.array_equal(done, np.asarray(expected))
    assert found.tobytes() == expected.tobytes()


class Turned(Pictures):
    """Pictures whose colours and hue are changed before the tail."""

    def __getitem__(self, index):
        image = jittered(self.pictures[index])
        if random.random() < 0.7:
            image = by_hand(image, random.randint(0, 255), in_place)
        return self.tail(jittered(image)), index


@pytest.fixture(scope="module")
def pictures():
    return [Image.fromarray(pixels) for pixels in noise(14)]


@pytest.mark.parametrize("tail", TAILS)
def test_batches_arrive_as_ever_whatever_the_tail(pictures, tail):
    plain, found, plan = coloured_batches(Turned(pictures, tail))

    assert forms(found) == forms(plain)
    assert plan.trouble == ""


def test_workers_send_what_is_to_be_done(pictures):
    plain, found, _ = coloured_batches(Turned(pictures, numpy_arithmetic), workers=2)

    assert forms(found) == forms(plain)


class Resized(Turned):
    """Pictures that are resized before their hue is turned."""

    def __getitem__(self, index):
        image = self.pictures[index].resize((48, 40), Image.Resampling.BILINEAR)
        return self.tail(by_hand(image, random.randint(0, 255))), index


def test_a_hue_waits_behind_a_resize_that_waits(pictures):
    later = {"with_colours": True, "with_scaling": True}

    plain, found, plan = coloured_batches(Resized(pictures, numpy_arithmetic), later=later)

    assert forms(found) == forms(plain)
    assert plan.trouble == ""


def test_afterwards_and_elsewhere_pillow_is_as_it_was():
    image = Image.fromarray(noise(1)[0])
    before = (Image.Image.convert, Image.merge, Image.fromarray)

    with putting_off(lambda: False):
        assert type(image.convert("HSV")) is Image.Image
    with putting_off(lambda: True):
        assert type(image.convert("HSV").split()[0]) is Band
        assert type(image.convert("L").convert("HSV")) is Image.Image

    assert (Image.Image.convert, Image.merge, Image.fromarray) == before
    assert not isinstance(np.asarray(image.convert("HSV").split()[0]), HueArray)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits():
    pixels = torch.from_numpy(np.stack([every_colour(first) for first in FEW]))
    shifts = torch.arange(len(FEW), dtype=torch.uint8) * 37

    assert torch.equal(turned(pixels.cuda(), shifts.cuda()).cpu(), turned(pixels, shifts))


def test_a_picture_that_is_drawn_on_later_does_not_change_what_was_made_of_it():
    image = Image.fromarray(noise(1)[0])

    def views(picture):
        scaled = picture.resize((48, 40), Image.Resampling.BILINEAR)
        teacher = ImageEnhance.Color(scaled).enhance(1.3)
        hsv = scaled.convert("HSV")
        scaled.paste((0, 0, 0), (5, 5, 30, 30))
        return [teacher.tobytes(), hsv.convert("RGB").tobytes(), scaled.tobytes()]

    with following(with_colours=True, with_scaling=True):
        found = views(image)

    assert found == views(image)


def test_a_hue_that_shares_its_memory_with_a_picture_is_not_followed_further():
    image = Image.fromarray(noise(1)[0])
    with following(with_colours=True):
        hue = np.array(image.convert("HSV").split()[0])
        Image.fromarray(hue)
        with pytest.raises(UnfollowableError, match="after a picture was made of it"):
            hue += np.uint8(3)
        assert np.array(image.convert("HSV").split()[0], ndmin=3).shape == (1, 50, 60)


@pytest.mark.parametrize("join", [np.stack, np.concatenate, np.hstack, np.dstack])
def test_arrays_that_are_followed_can_be_joined_in_lists(join):
    image = Image.fromarray(noise(1)[0])

    def joined():
        hue = np.array(image.convert("HSV").split()[0])
        floats = np.asarray(image, dtype=np.float32) / 255
        return join([hue, hue + np.uint8(3)]), join([floats[:20], floats[20:40]])

    with following(with_colours=True):
        found = joined()

    assert all(np.array_equal(one, two) for one, two in zip(found, joined(), strict=True))
