"""Techniques on the data that a screen switches, in the process that makes the samples."""

from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from flatout.data.images import pillow, substitution
from flatout.techniques.data.fast_decode import FastDecode
from flatout.techniques.data.fast_resize import FastResize
from flatout.techniques.data.ram_cache import RamCache
from flatout.techniques.data.region_decode import RegionDecode
from tests.data.photographs import Crops, Photographs, photograph, seen

ON, OFF = True, False
NO_FETCHER = SimpleNamespace()
pytestmark = pytest.mark.usefixtures("nothing_swapped")


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number, size=(90, 70)) for number in range(12)]


@pytest.mark.parametrize("kind", [FastDecode, FastResize, RegionDecode])
def test_pictures_are_made_in_the_script_s_way_while_it_is_off(paths, kind):
    technique = kind()
    loader = technique.epoch(DataLoader(Crops(paths * 5), 6))
    (swap,) = substitution._SWAPS.values()
    made = []

    batches = []
    for is_on in (ON, OFF, ON):
        technique.turn_in_fetcher(NO_FETCHER, is_on)
        before = swap.made + swap.compared
        batches.append(seen(loader))
        made.append(swap.made + swap.compared - before)

    assert made[1] == 0 < min(made[0], made[2])
    assert batches[0] == batches[1] == batches[2]


def test_what_was_refused_in_this_process_has_nothing_to_switch():
    FastResize().turn_in_fetcher(NO_FETCHER, ON)

    assert not substitution._SWAPS


def test_kept_samples_are_made_again_while_it_is_off(paths):
    technique = RamCache().bind()
    own = Photographs(paths)
    kept = technique.loader({"dataset": own})["dataset"]
    fetcher = SimpleNamespace(dataset=kept)

    found = []
    for is_on in (OFF, ON, OFF):
        technique.turn_in_fetcher(fetcher, is_on)
        found.append(fetcher.dataset)

    assert found == [own, kept, own]


def test_pixels_are_decoded_again_while_it_is_off(paths, monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", ImageFile.ImageFile.load)
    monkeypatch.setattr(pillow, "_ACTIVE", [])
    technique = RamCache().bind()
    dataset = Photographs(paths, flips=True)
    technique.loader({"dataset": dataset})

    assert pillow.is_keeping()
    technique.turn_in_fetcher(SimpleNamespace(dataset=dataset), OFF)
    assert not pillow.is_keeping()
    technique.turn_in_fetcher(SimpleNamespace(dataset=dataset), ON)
    technique.turn_in_fetcher(SimpleNamespace(dataset=dataset), ON)

    assert technique.decoded == pillow._ACTIVE
