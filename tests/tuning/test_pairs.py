"""What a recipe's trial is compared by."""

from dataclasses import replace

import pytest

from flatout.tuning.pairs import pace_ms
from tests.techniques.facts import profile

BASE = replace(profile(), samples_per_step=16.0)


@pytest.mark.parametrize(
    ("samples", "expected_ms"),
    [(16.0, 100.0), (15.5, 100.0), (0.0, 100.0), (32.0, 50.0), (8.0, 200.0)],
)
def test_steps_are_compared_by_the_time_for_equally_many_samples(samples, expected_ms):
    candidate = replace(profile(), samples_per_step=samples)

    assert pace_ms(candidate, BASE) == pytest.approx(expected_ms)


def test_unknown_samples_compare_whole_steps():
    assert pace_ms(replace(BASE, samples_per_step=64.0), profile()) == 100.0
