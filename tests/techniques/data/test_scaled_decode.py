import random

import pytest
import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset

from flatout.data.images import substitution
from flatout.data.images.lazy_jpegs import swap_shrinking
from flatout.kernels import compiled
from flatout.records.errors import NotApplicable
from flatout.techniques.data import scaled_decode
from flatout.techniques.data.scaled_decode import ScaledDecode
from tests.data.photographs import photograph, tensor_of
from tests.techniques.data.samples import Stream
from tests.techniques.facts import machine, starved

PROMISE = ("pictures.py --size 8", {})

pytestmark = pytest.mark.usefixtures("nothing_swapped")


@pytest.fixture
def paths(tmp_path):
    found = [photograph(tmp_path, number, size=(500, 400)) for number in range(8)]
    for path in found:
        Image.open(path).filter(ImageFilter.GaussianBlur(9)).save(path, quality=95)
    return found


class Small(Dataset):
    """A random crop of a photograph, made small."""

    def __init__(self, paths, side=32):
        self.paths, self.side = paths, side

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        left, top = random.randint(0, 100), random.randint(0, 100)
        image = image.crop((left, top, left + 300, top + 300)).resize((self.side, self.side))
        return tensor_of(image), index


def seen(built):
    random.seed(0)
    torch.manual_seed(0)
    return list(built)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_alike_and_labels_the_same(paths, workers):
    built = DataLoader(Small(paths), 4, shuffle=True, num_workers=workers)
    expected = seen(built)

    ScaledDecode().epoch(built)

    found = seen(built)
    for (one, labels), (two, others) in zip(expected, found, strict=True):
        assert labels.tolist() == others.tolist()
        assert (one.float() - two.float()).abs().mean() < 1.0
        assert not torch.equal(one, two)
    if workers:
        assert built.worker_init_fn.name == "scaled_decode"


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (lambda paths: Small(paths, side=200), "no JPEG is so much larger"),
        (lambda _: Stream(), "iterable"),
        (lambda _: Small(["gone.jpg"]), "FileNotFoundError"),
    ],
)
def test_where_nothing_is_shrunk_nothing_is_swapped_and_it_says_why(paths, dataset, reason):
    with pytest.raises(NotApplicable, match=reason):
        ScaledDecode().epoch(DataLoader(dataset(paths), 1))
    assert substitution._SWAPS == {}


def test_pictures_that_are_not_alike_are_refused(paths, monkeypatch):
    monkeypatch.setattr(scaled_decode, "swap", lambda gap: swap_shrinking(lambda *_: True, gap))

    with pytest.raises(NotApplicable, match="not alike"):
        ScaledDecode().epoch(DataLoader(Small(paths), 4))


def test_it_is_offered_for_images_where_there_is_a_compiler(monkeypatch):
    (found,) = ScaledDecode.candidates(starved(), machine())
    assert found.predict(starved(), machine()).step_ms == pytest.approx(-0.5 * 0.3 * 300)
    assert ScaledDecode.candidates(starved(wait_ms=1.0), machine()) == ()

    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    assert ScaledDecode.candidates(starved(), machine()) == ()
