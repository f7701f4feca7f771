"""Ways of several techniques that are tried at once, before a loader's first batch."""

import multiprocessing
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from flatout.agent.hooks.loader import note_recipe, recipe_of
from flatout.data.byte_batches.transport import find_plan
from flatout.data.images import pillow, substitution
from flatout.data.proof.joint_proof import is_proven
from flatout.records.errors import NotApplicable
from flatout.techniques.data import fast_resize
from flatout.techniques.data.device_preprocess import DevicePreprocess
from flatout.techniques.data.fast_resize import FastResize
from flatout.techniques.data.persistent_workers import PersistentWorkers
from flatout.techniques.data.region_decode import RegionDecode
from tests.data.photographs import photograph, seen

TECHNIQUES = (RegionDecode(), FastResize(), PersistentWorkers(), DevicePreprocess())
NAMES = ("region_decode", "fast_resize", "device_preprocess")
MADE = multiprocessing.Value("i", 0)
"""How often a first sample was made, over all processes; no part of the data set's state."""


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number, size=(320, 240)) for number in range(8)]


class Crops(Dataset):
    """A random part of a photograph, made small and scaled; it counts its first samples."""

    def __init__(self, paths, size=(96, 96)):
        self.paths, self.size = paths, size

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with MADE:
            MADE.value += not index
        image = Image.open(self.paths[index]).convert("RGB")
        left, top = random.uniform(0, 40), random.uniform(0, 30)
        image = image.resize(self.size, Image.Resampling.BILINEAR, (left, top, 260, 200))
        return torch.from_numpy((np.asarray(image, dtype=np.float32) / 255 - 0.5) / 0.25), index


class Whole(Crops):
    """Whole photographs: nothing is cut out, nothing made small."""

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255), index


def loader_of(dataset, workers=1, techniques=TECHNIQUES):
    loader = DataLoader(dataset, 4, num_workers=workers)
    note_recipe(loader, techniques)
    return loader


def begun(loader):
    """Return the names of what a loader's workers begin with."""
    names, link = [], loader.worker_init_fn
    while link is not None:
        names.append(getattr(link, "name", ""))
        link = getattr(link, "then", None)
    return names


def apply_all(loader):
    """Apply the techniques as the hook point does; return the reasons of those that refuse."""
    tried = {
        type(technique).__name__: reason_of(technique, loader) for technique in recipe_of(loader)
    }
    tried.pop("PersistentWorkers", None)  # it has nothing to do before the second epoch
    return {name: reason for name, reason in tried.items() if reason}


def reason_of(technique, loader):
    try:
        technique.epoch(loader)
    except NotApplicable as reason:
        return str(reason)
    return ""


def test_the_script_s_way_and_all_others_are_gone_once(paths):
    loader = loader_of(Crops(paths))
    before = MADE.value

    assert apply_all(loader) == {}

    assert MADE.value - before == 2
    assert all(is_proven(loader, name) for name in NAMES)
    assert {"fast_resize", "region_decode"} <= set(begun(loader))
    assert find_plan(loader.collate_fn)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_the_script_s_own(paths, workers):
    expected = seen(loader_of(Crops(paths), workers))
    loader = loader_of(Crops(paths), workers)

    apply_all(loader)

    assert seen(loader) == expected


def test_without_workers_nothing_is_left_begun_by_the_trial(paths):
    loader = loader_of(Crops(paths), workers=0)

    assert is_proven(loader, "fast_resize")

    assert substitution._SWAPS == {}


def test_one_way_with_other_bits_is_refused_and_the_others_prove_alone(paths, monkeypatch):
    def wrong():
        swap = pillow.swap_resize(lambda _image, size, _kind, _box: Image.new("RGB", size))
        monkeypatch.setattr(substitution, "FIRST_COMPARED", 0)
        return swap

    monkeypatch.setattr(fast_resize, "swap", wrong)
    loader = loader_of(Crops(paths))

    reasons = apply_all(loader)

    assert list(reasons) == ["FastResize"]
    assert not any(is_proven(loader, name) for name in NAMES)
    assert "region_decode" in begun(loader)
    assert find_plan(loader.collate_fn)
    assert "fast_resize" not in begun(loader)


def test_a_way_that_is_not_taken_is_refused_in_its_own_words(paths):
    loader = loader_of(Whole(paths))

    reasons = apply_all(loader)

    assert reasons == {
        "RegionDecode": "no part is cut out of a JPEG",
        "FastResize": "Pillow resizes no colour image",
    }
    assert is_proven(loader, "device_preprocess")


def test_another_data_set_is_not_what_was_proven(paths):
    loader = loader_of(Crops(paths))
    assert is_proven(loader, "fast_resize")

    object.__setattr__(loader, "dataset", Whole(paths))

    assert not is_proven(loader, "fast_resize")


@pytest.mark.parametrize("techniques", [(), (FastResize(),), (PersistentWorkers(), FastResize())])
def test_a_technique_that_is_alone_proves_alone(paths, techniques):
    loader = loader_of(Crops(paths), techniques=techniques)

    assert not is_proven(loader, "fast_resize")


def test_another_collation_is_not_what_was_proven(paths):
    loader = loader_of(Crops(paths))
    assert is_proven(loader, "device_preprocess")

    loader.collate_fn = lambda samples: samples

    assert not is_proven(loader, "device_preprocess")


def test_an_error_in_one_way_is_that_technique_s_alone(paths, monkeypatch):
    def broken():
        raise RuntimeError("a defect")

    monkeypatch.setattr(fast_resize, "prepared", broken)
    loader = loader_of(Crops(paths), techniques=TECHNIQUES[::3])

    assert is_proven(loader_of(Crops(paths)), "region_decode")
    assert apply_all(loader) == {}


def test_a_loader_can_be_pickled_after_its_techniques_were_tried(paths):
    loader = loader_of(Crops(paths))
    is_proven(loader, "fast_resize")

    assert b"flatout." not in pickle.dumps(loader)


def test_a_second_loader_is_proven_beside_the_script_s_own_way(paths, monkeypatch):
    first = loader_of(Crops(paths), workers=0)
    assert apply_all(first) == {}
    seen(first)
    swap = substitution.find_swap(pillow.ResizeSwap)

    def wrong(image, size, *_):
        return Image.new("RGB", size)

    monkeypatch.setattr(swap, "resample", wrong)

    reasons = apply_all(loader_of(Crops(paths, size=(80, 80)), workers=0))

    assert "FastResize" in reasons


def test_a_technique_without_what_it_needs_is_left_out_and_says_so(paths, monkeypatch):
    def missing():
        raise NotApplicable("there is no C compiler")

    monkeypatch.setattr(fast_resize, "prepared", missing)
    loader = loader_of(Crops(paths))

    reasons = apply_all(loader)

    assert reasons == {"FastResize": "there is no C compiler"}
    assert is_proven(loader, "region_decode")
    assert is_proven(loader, "device_preprocess")


def test_a_sample_that_cannot_be_made_is_each_technique_s_own_reason(paths):
    loader = loader_of(Crops([*paths[:2], "gone.jpg", *paths[3:]]))

    reasons = apply_all(loader)

    assert set(reasons) == {"RegionDecode", "FastResize", "DevicePreprocess"}
    assert all("FileNotFoundError" in reason for reason in reasons.values())
