import functools
import importlib.util
from dataclasses import replace

import pytest
from torch.utils.data import DataLoader, Dataset

from flatout.data.images import decoders, substitution
from flatout.records.errors import NotApplicable
from flatout.techniques.data.fast_decode import FastDecode, decode_fast
from flatout.tuning.ranking import WORTH_A_TRIAL
from tests.data.photographs import Photographs, photograph, seen
from tests.techniques.facts import machine, pipeline, starved

PROMISE = ("pictures.py", {})

pytestmark = [
    pytest.mark.usefixtures("nothing_swapped"),
    pytest.mark.skipif(importlib.util.find_spec("simplejpeg") is None, reason="needs simplejpeg"),
]


@pytest.fixture
def paths(tmp_path):
    return [photograph(tmp_path, number) for number in range(12)]


def test_in_the_training_process_images_come_from_the_other_decoder(paths):
    built = decode_fast(DataLoader(Photographs(paths), 3))

    seen(built)

    (swap,) = substitution._SWAPS.values()
    assert (swap.compared, swap.made, swap.trouble) == (4, 8, "")


def test_a_decoder_with_other_pixels_is_refused_by_name(paths, monkeypatch):
    def wrong(name):
        del name
        right = decoders._simplejpeg()
        return decoders.Decoder(
            name="wrong", decode=lambda data: right.decode(data)[..., :3] // 2, layout="RGB"
        )

    monkeypatch.setattr(decoders, "load_decoder", wrong)

    with pytest.raises(NotApplicable, match="wrong decodes an image to other pixels than Pillow"):
        FastDecode().epoch(DataLoader(Photographs(paths), 3))


def test_it_is_offered_where_a_loop_waits_for_images():
    (found,) = FastDecode.candidates(starved(), machine())

    assert found.decoder == "simplejpeg"


def predicted(monkeypatch, ratio, **changes):
    monkeypatch.setattr(decoders, "decoding_ratio", lambda _: ratio)
    return FastDecode().predict(replace(starved(), **changes), machine()).step_ms


def test_what_it_saves_is_decoding_by_the_ratio_that_was_measured_here(monkeypatch):
    assert predicted(monkeypatch, 0.5) == pytest.approx(-0.3 * 0.5 * 300)
    assert predicted(monkeypatch, 0.5, pipeline=pipeline(decode=3, python=1)) == pytest.approx(
        -0.75 * 0.5 * 300
    )


@pytest.mark.parametrize("ratio", [1.0, 1.2])
def test_a_decoder_that_is_no_faster_is_not_worth_a_trial(monkeypatch, ratio):
    change_ms = predicted(monkeypatch, ratio)

    assert 400 / (400 + change_ms) < WORTH_A_TRIAL


def test_both_decoders_are_timed_here_and_one_that_is_missing_is_not():
    assert 0.2 < decoders.decoding_ratio("simplejpeg") < 5
    assert decoders.decoding_ratio("opencv") > 0


class Threads(Dataset):
    """Each sample is how many threads OpenCV has once the decoder is there."""

    def __len__(self):
        return 1

    def __getitem__(self, _index):
        cv2 = pytest.importorskip("cv2")
        decoders.load_decoder("opencv")
        return cv2.getNumThreads()


@pytest.mark.parametrize(("workers", "threads"), [(0, 2), (1, 1)])
def test_opencv_keeps_its_threads_outside_of_workers(workers, threads, request):
    cv2 = pytest.importorskip("cv2")
    request.addfinalizer(functools.partial(cv2.setNumThreads, cv2.getNumThreads()))
    cv2.setNumThreads(2)

    assert list(DataLoader(Threads(), None, num_workers=workers)) == [threads]


@pytest.mark.parametrize("there", [("opencv",), ("simplejpeg", "opencv")])
def test_the_first_of_those_that_are_there_is_offered(monkeypatch, there):
    monkeypatch.setattr(decoders, "installed", lambda: there)

    assert FastDecode.candidates(starved(), machine()) == [FastDecode(decoder=there[0])]
