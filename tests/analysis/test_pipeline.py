from dataclasses import replace

import pytest

from flatout.analysis.journey import pipeline_of, stage_of
from flatout.records import catalogue
from flatout.records.journey import STAGES
from flatout.records.profile import Ceilings
from tests.rules.rank_facts import rank
from tests.techniques.facts import machine, profile

SEEN = {
    "samples": 10,
    "cpu_s": 0.036,
    "wall_s": 0.046,
    "batch_bytes": 6_000_000,
    "read_bytes": 770_000,
    "functions": {
        "~:<method 'decode' of 'ImagingDecoder' objects>": 3.0,
        "/lib/PIL/Image.py:resize": 1.0,
        "~:<method 'div' of 'torch._C.TensorBase' objects>": 1.5,
        "<built-in method io.open>": 0.5,
        "/home/me/train.py:__getitem__": 0.5,
        "/lib/torch/utils/data/_utils/collate.py:default_collate": 0.5,
        "<built-in method tokenizers.encode>": 0.5,
    },
    "transport_s": 0.004,
    "transport_samples": 8,
    "missing": {},
}


def found(cores=4, known=("ram_cache", "fast_decode"), **changes):
    training = replace(profile(), samples_per_s=1000.0, ceilings=Ceilings(free_data=2.0))
    return pipeline_of(SEEN | changes, training, machine(usable_cores=cores), known)


def test_shares_come_from_the_profiler_and_the_time_from_plain_batches():
    cpu_ms = {stage.name: stage.cpu_ms for stage in found().stages}

    # 3.6 ms a sample over 7.5 s of profile, and half a millisecond of sending.
    assert cpu_ms == pytest.approx(
        {
            "read": 0.24,
            "decode": 1.44,
            "tokenise": 0.24,
            "transform": 0.48,
            "normalise": 0.72,
            "python": 0.24,
            "collate": 0.24,
            "transport": 0.5,
        }
    )


def test_what_is_blocked_takes_no_core():
    (read,) = (stage for stage in found().stages if stage.name == "read")

    assert read.wait_ms == pytest.approx(1.0)
    assert read.bytes == 77_000


def test_cores_are_those_for_the_device_with_free_data():
    pipeline = found()

    assert pipeline.samples_per_s == 2000
    assert pipeline.cores_needed == pytest.approx(8.2)
    assert not pipeline.is_fed
    assert found(cores=16).is_fed


def test_a_rank_s_samples_are_held_against_a_rank_s_cores():
    one = {"functions": {"/home/me/train.py:__getitem__": 1.0}, "transport_s": None}
    training = replace(
        profile(), samples_per_s=4000.0, ranks=tuple(rank(number) for number in range(4))
    )

    pipeline = pipeline_of(SEEN | one | {"cpu_s": 0.04}, training, machine(usable_cores=32), ())

    # 1000 samples a second of each rank, 4 ms each.
    assert pipeline.samples_per_s == 1000
    assert pipeline.cores_needed == pytest.approx(4)
    assert pipeline.usable_cores == 8
    assert pipeline.is_fed


def test_a_technique_leaves_the_cores_of_the_other_legs():
    pipeline = found()

    assert pipeline.cores_without("fast_decode") == pytest.approx(8.2 - 2.88)
    assert pipeline.cores_without("nothing") == pytest.approx(8.2)


def test_only_techniques_that_there_are_are_named():
    techniques = {technique for stage in found().stages for technique in stage.techniques}

    assert techniques == {"ram_cache", "fast_decode"}


def test_nothing_was_looked_at():
    assert pipeline_of(None, profile(), machine(), ()) is None
    assert found(samples=0) is None


def test_every_stage_has_its_techniques_and_no_technique_names_another_stage():
    assert {x for stages in catalogue.declared("stages").values() for x in stages} == set(STAGES)


def test_what_keeps_samples_is_of_no_use_after_a_stage_that_makes_each_anew():
    stages = found(known=("device_cache", "ram_cache"), is_repeated=False).stages

    assert {x.name: x.techniques for x in stages if x.techniques} == {
        "read": ("ram_cache",),
        "decode": ("ram_cache",),
    }


def test_what_needs_no_decoding_is_known_by_its_stages():
    stages = found(known=("packed_data", "scaled_decode", "read_ahead")).stages
    techniques = {stage.name: stage.techniques for stage in stages if stage.techniques}

    assert techniques == {
        "read": ("read_ahead", "packed_data"),
        "decode": ("packed_data", "scaled_decode"),
    }


@pytest.mark.parametrize(
    ("function", "stage"),
    [
        ("~:<method 'read' of '_io.BufferedReader' objects>", "read"),
        ("/usr/lib/python3/pathlib.py:open", "read"),
        ("/lib/PIL/JpegImagePlugin.py:jpeg_factory", "decode"),
        ("<built-in method cv2.imdecode>", "decode"),
        ("<method 'resize' of 'ImagingCore' objects>", "resize"),
        ("<built-in method cv2.resize>", "transform"),
        ("/lib/torchvision/transforms/functional.py:normalize", "normalise"),
        ("/lib/torchvision/transforms/v2/_geometry.py:forward", "transform"),
        ("<built-in method torch.stack>", "collate"),
        ("/lib/transformers/tokenization_utils_fast.py:_batch_encode_plus", "tokenise"),
        ("/home/me/data.py:mix", "python"),
    ],
)
def test_functions_are_known_by_their_library(function, stage):
    assert stage_of(function) == stage
