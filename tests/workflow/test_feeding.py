from dataclasses import replace

import pytest

from flatout.core.ablation import Ablation, ablation_from_json
from flatout.core.feeding import Feeding
from flatout.reporting.verdict import feeding_words
from flatout.workflow.feeding import feeding_of
from tests.techniques.facts import loader, pipeline, profile


def final(**changes):
    """Return a step of 100 ms for 10 samples."""
    return profile(loaders=(loader(),), samples_per_step=10.0, **changes)


def looked(**stages):
    return replace(pipeline(**stages), usable_cores=2)


def test_on_a_gpu_the_cores_make_samples_and_nothing_else():
    found = feeding_of(final(kind="cuda"), 50.0, looked(decode=5.0, transform=15.0))

    assert (found.samples_per_s, found.free_data_per_s) == (100, 200)
    assert (found.cores_per_s, found.decode_per_s) == (100, 400)
    assert (found.binds, found.share) == ("cores", 1.0)


def test_a_training_on_the_cpu_takes_its_part_of_the_cores():
    found = feeding_of(final(cpu_threads=1), 50.0, looked(decode=5.0, transform=10.0))

    assert found.trained_ms == 5.0
    assert (found.cores_per_s, found.decode_per_s) == (100, 200)


def test_where_the_cores_have_time_left_free_data_is_the_limit():
    found = feeding_of(final(kind="cuda"), 80.0, looked(python=1.0))

    assert (found.binds, found.share, found.decode_per_s) == ("free_data", 0.8, None)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (
            {"free_data_per_s": 150.0, "cores_per_s": 100.0, "decode_per_s": 140.0},
            "Fed at 97 % of what the cores can make: 97.0 of 100 samples/s; free data would give "
            "150, decoding alone would allow 140.",
        ),
        (
            {"free_data_per_s": 100.0, "cores_per_s": 300.0, "decode_per_s": 400.0},
            "Fed at 97 % of what free data would give: 97.0 of 100 samples/s; the cores could make "
            "300.",
        ),
    ],
)
def test_a_reader_is_told_the_distance_and_which_limit_it_is(rates, expected):
    assert feeding_words(Feeding(samples_per_s=97.0, **rates)) == expected


def test_the_ablations_json_brings_it_back():
    feeding = Feeding(samples_per_s=97.0, free_data_per_s=150.0, cores_per_s=100.0)
    made = Ablation(workload="train.py", baseline=final(), feeding=feeding)

    assert ablation_from_json(made.to_json()).feeding == feeding
    assert made.to_json()["best"]["feeding"]["binds"] == "cores"
