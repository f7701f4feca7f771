import ctypes
import random

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from flatout.data.images import lazy_jpegs, substitution
from flatout.data.images.pillow import ResizeSwap
from flatout.kernels import compiled
from flatout.kernels.region import open_library
from flatout.records.errors import NotApplicable
from flatout.techniques.data import region_decode
from flatout.techniques.data.fast_resize import resize_fast
from flatout.techniques.data.region_decode import RegionDecode, decode_regions
from tests.data.photographs import Photographs, photograph, tensor_of
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import machine, pipeline, profile, starved

PROMISE = ("pictures.py", {})


@pytest.fixture(autouse=True)
def undo():
    for swap in [*substitution._SWAPS.values()]:
        swap.undo()  # of a test before, in whatever order they run
    yield
    for swap in [*substitution._SWAPS.values()]:
        swap.undo()


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number, size=(90, 70)) for number in range(12)]


class Crops(Dataset):
    """A random box of a photograph, cut out and resized, or resized at once."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        left, top = random.randint(0, 40), random.randint(0, 30)
        box = (left, top, random.randint(left + 5, 90), random.randint(top + 5, 70))
        if random.random() < 0.5:
            return tensor_of(image.crop(box).resize((32, 24))), index
        return tensor_of(image.resize((32, 24), random.randint(1, 5), box)), index


def seen(built):
    random.seed(0)
    torch.manual_seed(0)
    return [[x.tolist() for x in batch] for batch in built]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_bit_by_bit(paths, workers):
    built = DataLoader(Crops(paths), 3, shuffle=True, num_workers=workers)
    expected = seen(built)

    RegionDecode().epoch(built)

    assert seen(built) == expected
    assert seen(RegionDecode().epoch(built)) == expected


def test_with_the_other_resampler_they_are_the_same_as_well(paths):
    built = DataLoader(Crops(paths * 5), 6)
    expected = seen(built)

    decode_regions(resize_fast(built))

    assert seen(built) == expected
    parts, resized = map(substitution.find_swap, (lazy_jpegs.RegionSwap, ResizeSwap))
    assert parts.trouble == resized.trouble == ""
    assert parts.made >= 30
    assert resized.made >= 20


def test_workers_swap_and_the_training_process_does_not(paths):
    asked = []
    built = DataLoader(Crops(paths), 3, num_workers=1, worker_init_fn=asked.append)

    RegionDecode().epoch(built)

    assert built.worker_init_fn.name == "region_decode"
    assert built.worker_init_fn.then == asked.append
    assert substitution._SWAPS == {}


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (lambda _: Numbers(), "no part is cut out"),
        (lambda _: Stream(), "iterable"),
        (Photographs, "no part is cut out"),
        (lambda _: Crops(["gone.jpg"]), "FileNotFoundError"),
    ],
)
def test_where_nothing_is_cut_out_nothing_is_swapped_and_it_says_why(paths, dataset, reason):
    with pytest.raises(NotApplicable, match=reason):
        RegionDecode().epoch(DataLoader(dataset(paths), 1))
    assert substitution._SWAPS == {}


def test_a_decoder_with_other_pixels_is_refused(paths, monkeypatch):
    def fill(_data, size, _box, pixels, *_):
        # Left alone, the memory may hold the right pixels of an earlier image.
        ctypes.memset(pixels, 7, lazy_jpegs.PIXEL_BYTES * size[0] * size[1])
        return True

    def wrong():
        return lazy_jpegs.swap_regions(fill)

    monkeypatch.setattr(region_decode, "swap", wrong)

    with pytest.raises(NotApplicable, match="90 x 70 comes out different"):
        RegionDecode().epoch(DataLoader(Crops(paths), 3))


def test_without_a_compiler_it_is_not_offered_and_refuses(paths, monkeypatch):
    compiled.load_library.cache_clear()
    open_library.cache_clear()
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)

    assert RegionDecode.candidates(starved(), machine()) == ()
    with pytest.raises(NotApplicable, match="C compiler"):
        RegionDecode().epoch(DataLoader(Crops(paths), 3))


def test_it_is_offered_for_images_and_takes_a_quarter_of_decoding_away():
    facts = starved()
    looked = profile(
        phases_ms={"data_wait": 300.0}, loaders=facts.loaders, pipeline=pipeline(resize=1, decode=1)
    )

    (found,) = RegionDecode.candidates(facts, machine())

    assert found.predict(facts, machine()).step_ms == pytest.approx(-0.24 * 0.3 * 300)
    assert found.predict(looked, machine()).step_ms == pytest.approx(-0.24 * 0.5 * 300)


@pytest.mark.parametrize("facts", [starved(wait_ms=1.0), starved(batch_bytes=8_000), profile()])
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert RegionDecode.candidates(facts, machine()) == ()
