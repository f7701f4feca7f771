import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from flatout.data.images import pillow, substitution
from flatout.kernels import compiled
from flatout.records.errors import NotApplicable
from flatout.techniques.data import fast_resize
from flatout.techniques.data.fast_resize import FastResize, resize_fast
from tests.data.photographs import Crops, photograph, seen
from tests.techniques.facts import machine, pipeline, profile, starved

PROMISE = ("pictures.py", {})

pytestmark = pytest.mark.usefixtures("nothing_swapped")


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number, size=(90, 70)) for number in range(12)]


def test_in_the_training_process_images_come_from_the_other_resampler(paths):
    built = resize_fast(DataLoader(Crops(paths * 5), 6))

    seen(built)

    (swap,) = substitution._SWAPS.values()
    assert (swap.trouble, swap.compared + swap.made) == ("", 60)
    assert swap.made >= 40


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


def test_what_pillow_refuses_it_refuses_in_its_own_words():
    fast_resize.swap()
    image = Image.fromarray(np.zeros((6, 8, 3), np.uint8))

    with pytest.raises(ValueError, match="height and width must be > 0"):
        image.resize((0, 3), 2)
    with pytest.raises(ValueError, match="original image size"):
        image.resize((4, 3), 2, (0, 0, 9, 6))
    assert image.resize((8, 6)).tobytes() == image.tobytes()
    assert image.convert("L").resize((4, 3), 2).mode == "L"
