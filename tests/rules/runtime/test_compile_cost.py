import pytest

from flatout.records.readings import CompileFacts
from flatout.rules.runtime.compile_cost import check
from tests.techniques.facts import machine, profile


def known(steps):
    return profile(compiling=CompileFacts(seconds=30.0), planned_steps=steps)


def test_a_training_that_is_shorter_than_its_compiling_is_found():
    finding = check(known(100.0), machine())

    assert finding.because == (
        "compiling took 30 s, and all 100 steps of this training take 10 s: it pays back only "
        "where a step without it takes more than 4.00x as long"
    )
    assert finding.share == pytest.approx(0.75)
    assert finding.of == "training"


def test_it_is_silent_about_long_trainings_and_where_the_length_is_not_known():
    assert check(known(1000.0), machine()) is None
    assert check(known(None), machine()) is None
    assert check(profile(planned_steps=10.0), machine()) is None
