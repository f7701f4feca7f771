"""Pillow's changes of colour, made later for a whole batch: the same to the bit."""

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.utils.data import DataLoader

from flatout.data import postponed
from flatout.data.coloured_pictures import putting_off, waiting_in
from flatout.data.colours import coloured
from flatout.data.postponed import changed_on
from flatout.data.transport import PackingCollate
from tests.data.tails import TAILS, Pictures, a_product, numpy_arithmetic, torch_arithmetic
from tests.data.test_transport import batches, forms

KINDS = ("Brightness", "Contrast", "Color")
FACTORS = (0.0, 0.3, 0.5, 0.77, 1.0, 1.01, 1.4, 2.5, -0.5)


USES = [
    np.asarray,
    lambda image: image.tobytes(),
    lambda image: image.getpixel((3, 4)),
    lambda image: np.asarray(image.resize((20, 20))),
    lambda image: np.asarray(image.crop((1, 2, 30, 40))),
    lambda image: np.asarray(image.rotate(10)),
    lambda image: np.asarray(image.convert("L")),
    lambda image: image.split()[1].tobytes(),
    lambda image: image.copy().tobytes(),
    lambda image: ImageEnhance.Sharpness(image).enhance(2.0).tobytes(),
    lambda image: ImageOps.autocontrast(image).tobytes(),
    lambda image: ImageEnhance.Color(image.copy()).enhance(0.2).tobytes(),
    lambda image: image.transpose(Image.Transpose.ROTATE_90).tobytes(),
    lambda image: [*image.size, image.mode == "RGB", isinstance(image, Image.Image)],
]
"""Ways to ask a picture for its pixels."""


def noise(count=4, height=50, width=60, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def every_value():
    """Return a picture that holds every pair of a byte and a factor's rounding."""
    ramp = np.arange(256, dtype=np.uint8)
    there, back = np.tile(ramp, (64, 1)), np.tile(ramp[::-1], (64, 1))
    return np.stack([there, back, noise(1, 64, 256)[0, ..., 0]], -1)


def jittered(image):
    """Change colours in a random order by random factors, as torchvision's jitter does."""
    kinds = random.sample(KINDS, 3)
    for kind in kinds[: random.randint(0, 3)]:
        image = getattr(ImageEnhance, kind)(image).enhance(random.uniform(0.6, 1.4))
    return image


class Jittered(Pictures):
    """Pictures whose colours are changed before the tail."""

    def __getitem__(self, index):
        image = jittered(self.pictures[index])
        if random.random() < 0.5:
            image = ImageOps.mirror(image)
        return self.tail(image), index


@pytest.fixture(scope="module")
def pictures():
    return [Image.fromarray(pixels) for pixels in noise(14)]


def coloured_batches(dataset, workers=0, *, later=None, **options):
    """Return the batches as they are made ordinarily, and with the colours changed later.

    With `later`, what else waits for the batch, as `PackingCollate` has it.
    """
    plain, _, after_plain = batches(dataset, packs=False, workers=workers, **options)
    torch.manual_seed(1)
    random.seed(1)
    loader = DataLoader(dataset, 6, shuffle=True, num_workers=workers, **options)
    loader.collate_fn = PackingCollate(loader.collate_fn, **(later or {"with_colours": True}))
    found = [batch for _ in range(2) for batch in loader]
    assert torch.rand(1).item() == after_plain
    return plain, found, loader.collate_fn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", FACTORS)
def test_one_change_is_pillows_to_the_bit(kind, factor):
    pixels = every_value()

    found = coloured(torch.from_numpy(pixels), 2, [((kind, factor),)], has_batch=False)

    expected = getattr(ImageEnhance, kind)(Image.fromarray(pixels)).enhance(factor)
    assert np.array_equal(found.numpy(), np.asarray(expected))


def test_random_changes_in_random_orders_are_pillows_to_the_bit():
    rng = random.Random(0)
    pixels = noise(40, seed=1)

    def change():
        return rng.choice(KINDS), float(np.float32(rng.uniform(0, 2)))

    colours = [tuple(change() for _ in range(rng.randint(0, 4))) for _ in pixels]

    found = coloured(torch.from_numpy(pixels).movedim(-1, 1), 1, colours).movedim(1, -1)

    for own, picture, changes in zip(found.numpy(), pixels, colours, strict=True):
        image = Image.fromarray(picture)
        for kind, factor in changes:
            image = getattr(ImageEnhance, kind)(image).enhance(factor)
        assert np.array_equal(own, np.asarray(image))


@pytest.mark.parametrize("tail", TAILS)
def test_batches_arrive_as_ever_whatever_the_tail(pictures, tail):
    plain, found, plan = coloured_batches(Jittered(pictures, tail))

    assert forms(found) == forms(plain)
    assert plan.trouble == ""


@pytest.mark.parametrize("tail", [numpy_arithmetic, torch_arithmetic, a_product])
def test_the_bytes_leave_before_their_colours_are_changed(pictures, tail, monkeypatch):
    changed = []

    def note(device, values, axis, colours):
        changed.append(len(colours))
        return changed_on(device, values, axis, colours)

    monkeypatch.setattr(postponed, "changed_on", note)

    coloured_batches(Jittered(pictures, tail))

    assert changed == [6, 6, 2] * 2


def test_workers_send_what_is_to_be_done(pictures):
    plain, found, _ = coloured_batches(Jittered(pictures, numpy_arithmetic), workers=2)

    assert forms(found) == forms(plain)


@pytest.mark.slow
def test_spawned_workers_do_the_same(pictures):
    dataset = Jittered(pictures[:7], numpy_arithmetic)

    plain, found, _ = coloured_batches(dataset, workers=1, multiprocessing_context="spawn")

    assert forms(found) == forms(plain)


@pytest.fixture
def waiting():
    """A picture whose colours are still to be changed, and the same as Pillow makes it."""
    image = Image.fromarray(noise(1)[0])
    expected = ImageEnhance.Contrast(image).enhance(1.3)
    with putting_off(lambda: True):
        yield ImageEnhance.Contrast(image).enhance(1.3), expected


@pytest.mark.parametrize("use", USES)
def test_whoever_asks_for_pixels_gets_those_of_pillow(waiting, use):
    found, expected = waiting

    assert waiting_in(found) == (("Contrast", pytest.approx(1.3)),)
    assert np.array_equal(use(found), use(expected))


def test_mirroring_and_further_changes_leave_the_pixels_alone(waiting):
    found, expected = waiting

    more = ImageEnhance.Color(ImageOps.mirror(found).convert("RGB")).enhance(0.4)

    assert [kind for kind, _ in waiting_in(more)] == ["Contrast", "Color"]
    same = ImageEnhance.Color(ImageOps.mirror(expected)).enhance(0.4)
    assert more.tobytes() == same.tobytes()
    assert waiting_in(more) == ()


def test_what_the_script_does_to_its_picture_later_is_not_seen():
    image = Image.fromarray(noise(1)[0])
    expected = ImageEnhance.Brightness(image).enhance(0.5).tobytes()
    with putting_off(lambda: True):
        found = ImageEnhance.Brightness(image).enhance(0.5)
    image.paste((0, 0, 0), (0, 0, 60, 50))

    assert found.tobytes() == expected


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK"])
def test_other_modes_are_changed_at_once(mode):
    image = Image.fromarray(noise(1)[0]).convert(mode)
    with putting_off(lambda: True):
        found = ImageEnhance.Brightness(image).enhance(0.5)

    assert type(found) is Image.Image


def test_afterwards_and_elsewhere_pillow_is_as_it_was():
    before = [vars(getattr(ImageEnhance, kind))["__init__"] for kind in KINDS]
    image = Image.fromarray(noise(1)[0])
    with putting_off(lambda: False):
        assert type(ImageEnhance.Color(image).enhance(0.5)) is Image.Image

    assert [vars(getattr(ImageEnhance, kind))["__init__"] for kind in KINDS] == before
    assert type(ImageEnhance.Color(image).enhance(0.5)) is Image.Image


def test_a_part_of_a_changed_picture_is_computed(pictures):
    def cropped(image):
        return torch.from_numpy(np.array(image)[3:40].astype(np.float32))

    plain, found, plan = coloured_batches(Jittered(pictures, cropped))

    assert forms(found) == forms(plain)
    assert plan.trouble == ""


def test_a_device_that_rounds_otherwise_is_not_trusted(monkeypatch):
    values, colours = torch.from_numpy(noise(2)), [(("Contrast", 1.2),)] * 2
    expected = coloured(values, 3, colours)
    monkeypatch.setattr(postponed, "_ALIKE", {("meta", "colours ['Contrast']"): False})

    assert torch.equal(changed_on(torch.device("meta"), values, 3, colours), expected)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits():
    values = torch.from_numpy(noise(8, seed=3))
    colours = [tuple((kind, factor) for kind in KINDS) for factor in FACTORS[:8]]

    found = coloured(values.cuda(), 3, colours)

    assert torch.equal(found.cpu(), coloured(values, 3, colours))
