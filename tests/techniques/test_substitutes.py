"""What the techniques share that put other code under Pillow and keep every bit."""

import importlib.util

import pytest
from torch.utils.data import DataLoader

from flatout.data.images import substitution
from flatout.records.errors import NotApplicable
from flatout.techniques.data.fast_decode import FastDecode
from flatout.techniques.data.fast_resize import FastResize
from flatout.techniques.data.region_decode import RegionDecode
from tests.data.photographs import Crops, Photographs, photograph, seen
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import machine, profile, starved

pytestmark = pytest.mark.usefixtures("nothing_swapped")
NEEDS_DECODER = pytest.mark.skipif(
    importlib.util.find_spec("simplejpeg") is None, reason="needs simplejpeg"
)
TECHNIQUES = (pytest.param(FastDecode, marks=NEEDS_DECODER), FastResize, RegionDecode)


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number, size=(90, 70)) for number in range(12)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_batches_are_the_same_bit_by_bit(paths, technique, workers):
    dataset = Photographs if technique is FastDecode else Crops
    built = DataLoader(dataset(paths), 3, shuffle=True, num_workers=workers)
    expected = seen(built)

    technique().epoch(built)

    assert seen(built) == expected
    assert seen(technique().epoch(built)) == expected


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_workers_swap_and_the_training_process_does_not(paths, technique):
    asked = []
    built = DataLoader(Crops(paths), 3, num_workers=1, worker_init_fn=asked.append)

    technique().epoch(built)

    assert built.worker_init_fn.name == technique.__module__.rpartition(".")[2]
    assert built.worker_init_fn.then == asked.append
    assert substitution._SWAPS == {}


NO_JPEG, NO_RESIZE, NO_PART = (
    "no colour JPEG is opened",
    "resizes no colour image",
    "no part is cut out",
)
NOTHING_TO_DO = (
    (FastDecode, lambda _: Numbers(), NO_JPEG),
    (FastDecode, lambda f: Photographs([photograph(f, 50, kind="png")]), NO_JPEG),
    (FastResize, lambda _: Numbers(), NO_RESIZE),
    (FastResize, lambda f: Photographs([photograph(f, 50)]), NO_RESIZE),
    (RegionDecode, lambda _: Numbers(), NO_PART),
    (RegionDecode, lambda f: Photographs([photograph(f, 50)]), NO_PART),
    *((each, lambda _: Stream(), "iterable") for each in (FastDecode, FastResize, RegionDecode)),
    (FastDecode, lambda f: Photographs([f / "gone.jpg"]), "FileNotFoundError"),
    *((each, lambda _: Crops(["gone.jpg"]), "FileNotFoundError") for each in TECHNIQUES[1:]),
)


@pytest.mark.parametrize(("technique", "dataset", "reason"), NOTHING_TO_DO)
def test_where_there_is_nothing_to_do_nothing_is_swapped_and_it_says_why(
    tmp_path, technique, dataset, reason
):
    if technique is FastDecode:
        pytest.importorskip("simplejpeg")
    with pytest.raises(NotApplicable, match=reason):
        technique().epoch(DataLoader(dataset(tmp_path), 1))
    assert substitution._SWAPS == {}


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("facts", [starved(wait_ms=1.0), starved(batch_bytes=8_000), profile()])
def test_it_is_not_offered_where_it_cannot_matter(technique, facts):
    assert technique.candidates(facts, machine()) == ()
