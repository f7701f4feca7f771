import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from flatout.data.images import pillow, substitution
from flatout.kernels import compiled
from flatout.records.errors import NotApplicable
from flatout.techniques.data import fast_resize
from flatout.techniques.data.fast_resize import FastResize, resize_fast
from tests.data.photographs import Photographs, photograph, tensor_of
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import machine, pipeline, profile, starved

PROMISE = ("pictures.py", {})


@pytest.fixture(autouse=True)
def undo():
    for swap in list(substitution._SWAPS.values()):
        swap.undo()  # of a test before, in whatever order they run
    yield
    for swap in list(substitution._SWAPS.values()):
        swap.undo()


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number, size=(90, 70)) for number in range(12)]


class Crops(Dataset):
    """A random box of a photograph, resized with a random filter."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        left, top = random.uniform(0, 40), random.uniform(0, 30)
        box = (left, top, random.uniform(left + 5, 90), random.uniform(top + 5, 70))
        return tensor_of(image.resize((32, 24), random.randint(1, 5), box)), index


def seen(built):
    random.seed(0)
    torch.manual_seed(0)
    return [[x.tolist() for x in batch] for batch in built]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_bit_by_bit(paths, workers):
    built = DataLoader(Crops(paths), 3, shuffle=True, num_workers=workers)
    expected = seen(built)

    FastResize().epoch(built)

    assert seen(built) == expected
    assert seen(FastResize().epoch(built)) == expected


def test_in_the_training_process_images_come_from_the_other_resampler(paths):
    built = resize_fast(DataLoader(Crops(paths * 5), 6))

    seen(built)

    (swap,) = substitution._SWAPS.values()
    assert (swap.trouble, swap.compared + swap.made) == ("", 60)
    assert swap.made >= 40


def test_workers_swap_and_the_training_process_does_not(paths):
    asked = []
    built = DataLoader(Crops(paths), 3, num_workers=1, worker_init_fn=asked.append)

    FastResize().epoch(built)

    assert built.worker_init_fn.name == "fast_resize"
    assert built.worker_init_fn.then == asked.append
    assert substitution._SWAPS == {}


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (lambda _: Numbers(), "resizes no colour image"),
        (lambda _: Stream(), "iterable"),
        (Photographs, "resizes no colour image"),
        (lambda _: Crops(["gone.jpg"]), "FileNotFoundError"),
    ],
)
def test_where_nothing_is_resized_nothing_is_swapped_and_it_says_why(paths, dataset, reason):
    with pytest.raises(NotApplicable, match=reason):
        FastResize().epoch(DataLoader(dataset(paths), 1))
    assert substitution._SWAPS == {}


def test_a_resampler_with_other_bytes_is_refused(paths, monkeypatch):
    def wrong():
        return pillow.swap_resize(lambda _image, size, _kind, _box: Image.new("RGB", size))

    monkeypatch.setattr(fast_resize, "swap", wrong)

    with pytest.raises(NotApplicable, match="90 x 70 comes out different"):
        FastResize().epoch(DataLoader(Crops(paths), 3))


def test_without_a_compiler_it_is_not_offered_and_refuses(paths, monkeypatch):
    compiled.load_library.cache_clear()
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)

    assert FastResize.candidates(starved(), machine()) == ()
    with pytest.raises(NotApplicable, match="C compiler"):
        compiled.load_library("resample")


def test_it_is_offered_for_images_and_takes_resizing_away():
    facts = starved()
    looked = profile(
        phases_ms={"data_wait": 300.0}, loaders=facts.loaders, pipeline=pipeline(resize=1, decode=1)
    )

    (found,) = FastResize.candidates(facts, machine())

    assert found.predict(facts, machine()).step_ms == pytest.approx(-0.6 * 0.18 * 300)
    assert found.predict(looked, machine()).step_ms == pytest.approx(-0.6 * 0.5 * 300)


@pytest.mark.parametrize("facts", [starved(wait_ms=1.0), starved(batch_bytes=8_000), profile()])
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert FastResize.candidates(facts, machine()) == ()


def test_what_pillow_refuses_it_refuses_in_its_own_words():
    fast_resize.swap()
    image = Image.fromarray(np.zeros((6, 8, 3), np.uint8))

    with pytest.raises(ValueError, match="height and width must be > 0"):
        image.resize((0, 3), 2)
    with pytest.raises(ValueError, match="original image size"):
        image.resize((4, 3), 2, (0, 0, 9, 6))
    assert image.resize((8, 6)).tobytes() == image.tobytes()
    assert image.convert("L").resize((4, 3), 2).mode == "L"
