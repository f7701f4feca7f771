"""Pillow's resizing, made later for a whole batch: the same to the bit."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from flatout.data import postponed
from flatout.data.packed import Packed, restored
from flatout.data.postponed import Postponed, scaled_on
from flatout.data.scaled_pictures import Scaled, putting_off
from flatout.data.scaling import AREA, BICUBIC, BILINEAR, Cut, find_order, scaled, window_of
from flatout.data.unmade import Unmade
from tests.data.tails import TAILS, Pictures, a_product, numpy_arithmetic, torch_arithmetic
from tests.data.test_colours import USES, coloured_batches, jittered, noise
from tests.data.test_transport import forms

KINDS = (BILINEAR, BICUBIC, AREA)
SIDE = 48


def dots(rng, width, height):
    """Return a picture of black and white dots: what rounds the most."""
    return (rng.integers(0, 2, (height, width, 3)) * 255).astype(np.uint8)


def random_box(rng, width, height):
    left, top = rng.uniform(0, 0.7 * width), rng.uniform(0, 0.7 * height)
    right = rng.uniform(left + 0.05 * width, width)
    return left, top, right, rng.uniform(top + 0.05 * height, height)


def cut_of(pixels, box, size, kind, **turns):
    source = (pixels.shape[1], pixels.shape[0])
    window = window_of(source, box, size, kind)
    first = find_order()(source, size)
    whole = Cut(source=source, box=box, window=window, size=size, kind=kind, is_down_first=first)
    left, top, right, bottom = window
    return replace(whole, **turns), pixels[top:bottom, left:right].reshape(-1, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(32, 32), (40, 24), (7, 90)])
def test_a_batch_of_windows_is_pillows_to_the_bit(kind, size):
    rng = np.random.default_rng(kind)
    cuts, windows, expected = [], [], []
    for number in range(12):
        width, height = rng.integers(20, 160, 2)
        pixels = dots(rng, width, height)
        box = random_box(rng, width, height)
        turns = {"is_mirrored": number % 2 == 0, "is_upside_down": number % 3 == 0}
        cut, window = cut_of(pixels, box, size, kind, **turns)
        image = Image.fromarray(pixels).resize(size, kind, box)
        image = ImageOps.mirror(image) if cut.is_mirrored else image
        image = ImageOps.flip(image) if cut.is_upside_down else image
        cuts.append(cut)
        windows.append(window)
        expected.append(np.asarray(image))

    found = scaled(torch.from_numpy(np.concatenate(windows)), cuts)

    assert {cut.is_down_first for cut in cuts} <= {True, False}
    assert np.array_equal(found.numpy(), np.stack(expected))


@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((0, 0, 50, 60), (50, 60)),
        ((10, 5, 42, 37), (32, 32)),
        ((0, 0, 50, 60), (50, 30)),
        ((3, 0, 50, 60), (47, 90)),
        ((49.2, 59.1, 50, 60), (33, 32)),
    ],
)
def test_boxes_that_leave_a_side_as_it_is_and_slivers_at_the_edge(box, size):
    pixels = dots(np.random.default_rng(0), 50, 60)
    cut, window = cut_of(pixels, box, size, BICUBIC)

    found = scaled(torch.from_numpy(window.copy()), [cut])

    assert found[0].numpy().tobytes() == Image.fromarray(pixels).resize(size, 3, box).tobytes()


def resized(image):
    """Cut a random part out and scale it, in one of the ways that scripts have."""
    width, height = image.size
    box = random_box(random, width, height)
    kind = random.choice((Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
    if random.random() < 0.5:
        return image.crop(tuple(map(int, box))).resize((SIDE, SIDE), kind)
    return image.resize((SIDE, SIDE), kind, box=box)


class Resized(Pictures):
    """Pictures of which a random part is scaled, perhaps mirrored and coloured, then the tail."""

    def __getitem__(self, index):
        image = resized(self.pictures[index])
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self.tail(jittered(image)), index


@pytest.fixture(scope="module")
def pictures():
    return [Image.fromarray(pixels) for pixels in noise(14, 90, 110)]


def scaled_batches(dataset, workers=0, *, with_colours=True, **options):
    """Return the batches as they are made ordinarily, and with pictures scaled later."""
    later = {"with_colours": with_colours, "with_scaling": True}
    return coloured_batches(dataset, workers, later=later, **options)


@pytest.mark.parametrize("with_colours", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_batches_arrive_as_ever_whatever_the_tail(pictures, tail, with_colours):
    plain, found, plan = scaled_batches(Resized(pictures, tail), with_colours=with_colours)

    assert forms(found) == forms(plain)
    assert plan.trouble == ""


@pytest.mark.parametrize("tail", [numpy_arithmetic, torch_arithmetic, a_product])
def test_the_windows_leave_before_anything_is_scaled(pictures, tail, monkeypatch):
    made = []

    def note(device, windows, cuts):
        made.append((len(cuts), windows.shape[0] == sum(cut.pixels for cut in cuts)))
        return scaled_on(device, windows, cuts)

    monkeypatch.setattr(postponed, "scaled_on", note)

    scaled_batches(Resized(pictures, tail))

    assert made == [(6, True), (6, True), (2, True)] * 2


def test_workers_send_windows(pictures):
    plain, found, _ = scaled_batches(Resized(pictures, numpy_arithmetic), workers=2)

    assert forms(found) == forms(plain)


@pytest.mark.slow
def test_spawned_workers_do_the_same(pictures):
    dataset = Resized(pictures[:7], numpy_arithmetic)

    plain, found, _ = scaled_batches(dataset, workers=1, multiprocessing_context="spawn")

    assert forms(found) == forms(plain)


BOX_OF_IT = (3.3, 4.4, 80.1, 70.7)


@pytest.fixture
def waiting():
    """A picture still to be resized, and the same as Pillow makes it."""
    image = Image.fromarray(noise(1, 90, 110)[0])
    expected = image.resize((SIDE, SIDE), 2, BOX_OF_IT)
    with putting_off(lambda: True):
        yield image.resize((SIDE, SIDE), 2, BOX_OF_IT), expected


MORE_USES = [
    lambda image: np.asarray(image.convert("RGB")),
    lambda image: ImageOps.mirror(ImageOps.flip(image)).tobytes(),
    lambda image: ImageOps.mirror(ImageOps.mirror(image)).tobytes(),
]


@pytest.mark.parametrize("use", [*USES, *MORE_USES])
def test_whoever_asks_for_pixels_gets_those_of_pillow(waiting, use):
    found, expected = waiting

    assert found.is_put_off
    assert np.array_equal(use(found), use(expected))


def test_what_the_script_does_to_its_picture_later_is_not_seen():
    image = Image.fromarray(noise(1, 90, 110)[0])
    expected = image.resize((SIDE, SIDE), box=BOX_OF_IT).tobytes()
    with putting_off(lambda: True):
        found = image.resize((SIDE, SIDE), box=BOX_OF_IT)
    image.paste((0, 0, 0), (0, 0, 110, 90))

    assert type(found) is Scaled
    assert found.tobytes() == expected


@pytest.mark.parametrize(
    ("mode", "size", "options"),
    [
        ("L", (48, 48), {}),
        ("RGBA", (48, 48), {}),
        ("RGB", (20, 20), {}),
        ("RGB", (48, 40), {"resample": Image.Resampling.LANCZOS}),
        ("RGB", (48, 48), {"resample": Image.Resampling.NEAREST}),
        ("RGB", (48, 48), {"reducing_gap": 2.0}),
        ("RGB", (110, 90), {}),
    ],
)
def test_what_is_unusual_is_resized_at_once(mode, size, options):
    image = Image.fromarray(noise(1, 90, 110)[0]).convert(mode)
    expected = image.resize(size, **options)
    with putting_off(lambda: True):
        found = image.resize(size, **options)

    assert type(found) is Image.Image
    assert found.tobytes() == expected.tobytes()


def test_a_photograph_much_larger_than_its_result_is_resized_at_once():
    image = Image.fromarray(noise(1, 300, 300)[0])
    with putting_off(lambda: True):
        assert type(image.resize((SIDE, SIDE))) is Image.Image
        assert type(image.resize((SIDE, SIDE), box=(10, 10, 90, 90))) is Scaled


def test_errors_are_pillows_own():
    image = Image.fromarray(noise(1, 90, 110)[0])
    with putting_off(lambda: True):
        with pytest.raises(ValueError, match="box can"):
            image.resize((48, 48), box=(0, 0, 111, 90))
        with pytest.raises(ValueError, match="height and width"):
            image.resize((0, 48))


def test_afterwards_and_elsewhere_pillow_is_as_it_was():
    before, image = Image.Image.resize, Image.fromarray(noise(1, 90, 110)[0])
    with putting_off(lambda: False):
        assert type(image.resize((48, 48))) is Image.Image

    assert Image.Image.resize is before


def test_a_part_of_a_batch_that_is_looked_at_is_made(pictures):
    class Looked(Resized):
        """Looks at one pixel of some pictures."""

        def __getitem__(self, index):
            image, index = super().__getitem__(index)
            return image, index if index % 3 else float(image[0, 0, 0])

    plain, found, plan = scaled_batches(Looked(pictures, numpy_arithmetic))

    assert forms(found) == forms(plain)
    assert plan.trouble == ""


def mirrored_array(image):
    values = np.asarray(image)
    values = values[:, ::-1] if random.random() < 0.5 else values
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)).astype(np.float32))


def mirrored_scaled_array(image):
    values = np.asarray(image, dtype=np.float32)[::-1] / 255
    return torch.from_numpy(np.ascontiguousarray(values[:, ::-1].transpose(2, 0, 1)))


def mirrored_tensor(image):
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    return values.flip(-1) if random.random() < 0.5 else values.flip(1)


def mirrored_twice(image):
    return mirrored_tensor(image).flip(2)


TURNING = (mirrored_array, mirrored_scaled_array, mirrored_tensor, mirrored_twice)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("tail", TURNING)
def test_arrays_and_tensors_that_are_turned_round_wait_too(pictures, tail, workers, monkeypatch):
    early = Unmade.early
    plain, found, plan = scaled_batches(Resized(pictures, tail), workers)

    assert forms(found) == forms(plain)
    assert (plan.trouble, Unmade.early) == ("", early)


def cropped(image):
    return torch.from_numpy(np.array(image)[3:40].astype(np.float32)).flip(1)


def flipped_channels(image):
    return torch.from_numpy(np.array(image)[..., ::-1].astype(np.float32) / 255)


def negative_of_turned(image):
    return (255 - torch.from_numpy(np.array(image)).flip(0).float()).sqrt()


@pytest.mark.parametrize("tail", [cropped, flipped_channels, negative_of_turned])
def test_what_is_asked_for_before_is_made(pictures, tail):
    plain, found, plan = scaled_batches(Resized(pictures, tail))

    assert forms(found) == forms(plain)
    assert plan.trouble == ""


def test_a_device_that_rounds_otherwise_is_not_trusted(monkeypatch):
    pixels = noise(1, 90, 110)[0]
    cut, window = cut_of(pixels, BOX_OF_IT, (SIDE, SIDE), BILINEAR)
    windows = torch.from_numpy(window.copy())
    monkeypatch.setattr(postponed, "_ALIKE", {("meta", "scaling"): False})

    found = scaled_on(torch.device("meta"), windows, [cut])

    assert torch.equal(found, scaled(windows, [cut]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_same_bits(kind):
    rng = np.random.default_rng(kind)
    pairs = []
    for _ in range(16):
        pixels = dots(rng, *rng.integers(40, 200, 2))
        box = random_box(rng, pixels.shape[1], pixels.shape[0])
        pairs.append(cut_of(pixels, box, (SIDE, SIDE), kind))
    windows = torch.from_numpy(np.concatenate([window for _, window in pairs]))
    cuts = [cut for cut, _ in pairs]

    assert torch.equal(scaled(windows.cuda(), cuts).cpu(), scaled(windows, cuts))


@pytest.mark.gpu
def test_restoring_a_batch_does_not_wait_for_the_gpu():
    rng = np.random.default_rng(0)
    pixels = dots(rng, 110, 90)
    cuts, windows = zip(
        *(
            cut_of(pixels, random_box(rng, 110, 90), (SIDE, SIDE), BICUBIC, is_mirrored=bool(x % 2))
            for x in range(40)
        ),
        strict=True,
    )
    colours = [(("Contrast", 1.2), ("Color", 0.5))] * 40
    todo = Postponed(cuts=cuts, order=(2, 0, 1), colours=colours)
    flat = torch.from_numpy(np.concatenate(windows).reshape(-1))
    levels = torch.arange(3 * 256, dtype=torch.float32).view(3, 256)
    packed = Packed(flat, levels, 1, None, postponed=todo)
    cuda = torch.device("cuda")
    expected = restored(packed, cuda)  # the first one compares the device with the CPU
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = restored(packed, cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.equal(found, expected)
    assert torch.equal(found.cpu(), restored(packed))
