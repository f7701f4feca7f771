import ctypes

import pytest
from torch.utils.data import DataLoader

from flatout.data.images import lazy_jpegs, substitution
from flatout.data.images.pillow import ResizeSwap
from flatout.kernels import compiled
from flatout.kernels.region import open_library
from flatout.records.errors import NotApplicable
from flatout.techniques.data import region_decode
from flatout.techniques.data.fast_resize import resize_fast
from flatout.techniques.data.region_decode import RegionDecode, decode_regions
from tests.data.photographs import Crops, photograph, seen
from tests.techniques.facts import machine, pipeline, profile, starved

PROMISE = ("pictures.py", {})

pytestmark = pytest.mark.usefixtures("nothing_swapped")


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number, size=(90, 70)) for number in range(12)]


def test_with_the_other_resampler_they_are_the_same_as_well(paths):
    built = DataLoader(Crops(paths * 5), 6)
    expected = seen(built)

    decode_regions(resize_fast(built))

    assert seen(built) == expected
    parts, resized = map(substitution.find_swap, (lazy_jpegs.RegionSwap, ResizeSwap))
    assert parts.trouble == resized.trouble == ""
    assert parts.made >= 30
    assert resized.made >= 20


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
